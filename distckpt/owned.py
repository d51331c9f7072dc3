"""A root in the hands of its owner: all that only the committer may do, and all it must remember.

One per root and process: managers of one root share it, and with it one owner record, one ``seq`` and one commit
lock (S24). It knows nothing of ranks; the command uses it as well, for ``prune`` and ``gc``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence

from distckpt import catalog, recovery, rotation, selection
from distckpt.afterwards import Afterwards
from distckpt.catalog import Entry, RootRecord
from distckpt.durable import GONE, Files
from distckpt.errors import ConfigError, MarkerError
from distckpt.janitor import Janitor
from distckpt.journal import Journal
from distckpt.layout import ATTEMPT, HOME, MARKER, POINTER, Layout, Naming, series_of
from distckpt.leases import Watch
from distckpt.marker import Marker
from distckpt.ordered import fsync_tree_dirs, is_listed, make_dir, replace, to_trash
from distckpt.ownership import Ownership, while_stale
from distckpt.pace import Pace
from distckpt.retention import Policy
from distckpt.rootdir import agree_naming, await_newest, make_root, settle_record, sync_root
from distckpt.runtime import Runtime
from distckpt.status import Status
from distckpt.together import together

log = logging.getLogger(__name__)

_TOOL = 1 << 20

ROOM = 30.0
"""Seconds that a save waits for room that a deletion gives back."""

_open: dict[tuple[int, str, str], OwnedRoot] = {}
_opening = threading.RLock()  # two managers of one root made by two threads must end up with one owner


def _key(files: Files, layout: Layout, runtime: Runtime) -> tuple[int, str, str]:
    """One root in one process, as the runtime tells processes apart."""
    me = runtime.identity()
    return me.pid, me.started, files.real(layout.root)


def _means_something(naming: Naming, name: str) -> bool:
    return name in (HOME, POINTER) or series_of(naming, name) is not None


class OwnedRoot:
    """Open with ``OwnedRoot.open``; ``close`` once for each open. ``in_doubt``: attempts that neither count nor go, with the
    reason; ``apart``: those of them whose other domains lack them, or are not known; ``sources``: by attempt, the one whose files
    it links."""

    def __init__(self, files: Files, layout: Layout, naming: Naming, ownership: Ownership, record: RootRecord,
                 runtime: Runtime) -> None:
        self.files, self.layout, self.naming, self.runtime = files, layout, naming, runtime
        self.ownership, self.record = ownership, record
        self.lock = runtime.lock()
        self.watch = Watch(files, layout, runtime)
        self.journal = Journal(files, layout, ownership.generation, runtime)
        self.in_doubt: dict[str, str] = {}
        self.apart: set[str] = set()
        self.live: set[str] = set()
        self.sources: dict[str, str] = {}
        self.pace = Pace()
        self.status = Status(files, layout, ownership.generation, runtime)
        self.no_rotation: str | None = None
        self.highest_seq = 0
        self.users = 1
        self._examined: dict[str, Marker] = {}
        self._synced: set[str] = set()
        self._sizes: dict[str, int | None] = {}
        self._foreign_reported = False
        self.janitor = Janitor(files, layout, runtime, ownership.generation, self.watch)
        self.afterwards = Afterwards(runtime, self.lock)

    @property
    def generation(self) -> int:
        return self.ownership.generation

    # -- opening -------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, files: Files, layout: Layout, runtime: Runtime, naming: Naming | None = None,
             run_id: str | None = None, waiting: Callable[[str], None] = lambda text: None) -> OwnedRoot:
        """The root, owned by this process: claimed, fenced, recovered and swept. RootInUse while another writer lives."""
        with _opening:
            return cls._open_here(files, layout, runtime, naming, run_id, waiting)

    @classmethod
    def _open_here(cls, files: Files, layout: Layout, runtime: Runtime, naming: Naming | None, run_id: str | None,
                   waiting: Callable[[str], None]) -> OwnedRoot:
        return claim(files, layout, runtime, naming, run_id, waiting).settle(run_id)

    def _start(self, decided: Collection[str] | None, waiting: Callable[[str], None]) -> None:
        """Recovery, before the first begin; then the highest seq ever seen, so that none is used twice (S11)."""
        files = while_stale(self.files, self.layout, self.runtime, waiting)
        entries = catalog.scan(files, self.layout, self.naming)
        self.highest_seq = highest_seq(files, self.layout, self.generation, entries)
        report = recovery.recover(files, self.layout, self.naming, self.generation, decided)
        self.live |= set(report.left)
        if decided is None:
            shares = {e.head.attempt: f"it is {e.head.share}" for e in entries if e.head is not None and e.head.of > 1}
            self.in_doubt.update(shares)
            self.apart |= set(shares)
        self.journal.event("claimed", generation=self.generation, identity=self.ownership._runtime.identity().to_json(),
                           published=report.published, swept=len(report.swept), restored=report.restored)
        self.janitor.delete(self.janitor.leftovers(files))

    def close(self, timeout: float = 60.0) -> None:
        """Give the root back when the last user closes it, after ``timeout`` seconds of rotating and deleting at most."""
        until = self.runtime.monotonic() + timeout
        self.users -= 1
        if self.users > 0:
            self.afterwards.catch_up(timeout)
            return
        self.afterwards.stop(timeout)
        _open.pop(_key(self.files, self.layout, self.runtime), None)
        self.janitor.stop(max(until - self.runtime.monotonic(), 0.0))
        self.journal.event("released", generation=self.generation, **self.pace.close(self.runtime.monotonic()))
        self.ownership.release()

    # -- what stands there ---------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Every checkpoint-named entry of the root, newest commit first, read afresh."""
        return catalog.scan(self.files, self.layout, self.naming)

    def next_seq(self) -> int:
        """1 + the highest ever seen; never given twice, whatever became of it (S11)."""
        self.highest_seq += 1
        return self.highest_seq

    def examine(self, entry: Entry) -> Marker:
        """The whole marker of ``entry``, once per process: sealed, and every file of its size. MarkerError otherwise."""
        assert entry.head is not None
        known = self._examined.get(entry.head.attempt)
        if known is None:
            directory = self.layout.final(entry.name)
            known = catalog.read_marker(self.files, directory)
            problems = catalog.check_files(self.files, directory, known.files)
            if problems:
                raise MarkerError(f"{entry.name}: {problems[0].path} {problems[0].what}",
                                  files={p.path: p.what for p in problems})
            self._examined[entry.head.attempt] = known
        return known

    def vouch(self, entry: Entry) -> Marker:
        """``examine``, and all of it synced, once per process.

        An inherited checkpoint was perhaps copied here, or its last fsync failed: before it is relied on while another
        goes, it is made durable in fact (S8).
        """
        found = self.examine(entry)
        if found.head.attempt not in self._synced:
            directory = self.layout.final(entry.name)
            try:
                paths = [os.path.join(directory, name) for name in (*(file.path for file in found.files), MARKER)]
                together(self.runtime, self.files.fsync, paths)
                fsync_tree_dirs(self.files, directory)
            except OSError as error:
                self.no_rotation = f"{entry.name} could not be synced ({error})"
                raise
            self._synced.add(found.head.attempt)
        return found

    def vouched(self, found: Marker) -> None:
        """Remember a checkpoint that this process committed itself."""
        self._examined[found.head.attempt] = found
        self._synced.add(found.head.attempt)
        self._sizes[found.head.series] = found.size

    def takes(self, series: str, size: int) -> None:
        """What the last save of ``series`` wrote, where links make that less than its checkpoint's size."""
        self._sizes[series] = size

    def needed(self, series: str, links: bool = False) -> int | None:
        """Bytes that a save of ``series`` will take on this disk, judging by the newest one; None for the first, and with
        ``links`` until this process has saved one."""
        if series not in self._sizes and not links:
            self._sizes[series] = None
            try:
                for entry in self.entries():
                    if entry.series == series and entry.committed:
                        self._sizes[series] = catalog.read_marker(self.files, self.layout.final(entry.name)).size
                        break
            except (MarkerError, OSError) as error:
                log.debug("cannot tell how large the next save will be: %s", error)
        return self._sizes.get(series)

    def make_room(self) -> None:
        """Rotate what the last commit lets go, and wait until it is deleted."""
        self.afterwards.catch_up(ROOM)
        self.janitor.wait(ROOM)

    def foreign(self, entries: Sequence[Entry]) -> list[Entry]:
        """Checkpoints of another run that stand in this root; reported once, left alone."""
        found = [e for e in entries if e.head is not None and e.head.run != self.record.run]
        if found and not self._foreign_reported:
            self._foreign_reported = True
            log.warning("root %s holds %d checkpoints of another run (%s ...): left alone and not counted; "
                        "'distckpt adopt' makes one of them this run's", self.layout.root, len(found), found[0].name)
        return found

    # -- attempts ------------------------------------------------------------------------------------------------

    def hold(self, attempt: str, source: str) -> None:
        """Until ``attempt`` ends it may link files of ``source``, which therefore neither goes nor is replaced (S25)."""
        self.sources = {live: held for live, held in self.sources.items() if live in self.live}
        self.sources[attempt] = source

    def linked_by(self, attempt: str) -> list[str]:
        """The attempts in progress that may link files of ``attempt``."""
        return [live for live, source in self.sources.items() if source == attempt and live in self.live]

    def make_attempt(self, attempt: str, name: str) -> str:
        """The staging directory of a new attempt, durable in its parents. Those are never made on the way (S5)."""
        outer = self.layout.staging(self.generation, attempt)
        make_dir(self.files, outer)
        inner = os.path.join(outer, name)
        make_dir(self.files, inner)
        self.files.fsync_dir(outer)
        self.files.fsync_dir(self.layout.staging(self.generation))
        return inner

    def remove_attempt(self, attempt: str) -> None:
        """Take a dead attempt that all ranks have left out of staging; its space comes back in the background."""
        source, target = self.layout.staging(self.generation, attempt), self.layout.trash(self.generation, attempt)
        try:
            to_trash(self.files, source, target)
        except OSError as error:
            if error.errno not in GONE:
                log.warning("could not sweep the attempt %s: %s; the next save tries again", attempt, error)
            return
        self.janitor.delete([target])

    def sweep(self) -> None:
        """Remove the attempts of this generation that nobody works on any more; the caller knows that all ranks left."""
        try:
            recovery.put_back(self.files, self.layout, self.generation, recovery.Report())
        except OSError as error:
            log.warning("could not put back what a failed replace had moved away: %s; the next save or start tries again", error)
        for item in self.files.scan(self.layout.staging(self.generation)):
            if ATTEMPT.fullmatch(item.name) and item.name not in self.live:
                self.remove_attempt(item.name)

    # -- after a commit ------------------------------------------------------------------------------------------

    def point_to(self, name: str) -> None:
        """Move ``latest``, in one step and durably; its temporary lives in our generation's staging (S5)."""
        try:
            replace(self.files, self.layout.pointer, name.encode() + b"\n", self.layout.staging(self.generation, "latest.tmp"))
        except OSError as error:
            log.warning("could not move 'latest' to %s: %s; it is only a convenience, resume does not use it", name, error)

    def put_beside(self, name: str, tools: list[str]) -> None:
        """Copy files of the checkpoint ``name`` into the root, once: a framework's tools are looked for there. What has a name
        that means something in a root stays where it is."""
        for tool in tools:
            target = os.path.join(self.layout.root, os.path.basename(tool))
            try:
                if not _means_something(self.naming, os.path.basename(tool)) and not is_listed(self.files, target):
                    data = self.files.read(os.path.join(self.layout.final(name), tool), _TOOL)
                    replace(self.files, target, data, self.layout.staging(self.generation, "tool.tmp"))
            except OSError as error:
                log.warning("could not copy %s from %s into the root: %s; the checkpoint has it", tool, name, error)

    def record_rollback(self, target: int) -> None:
        """Remember durably that the run goes on from the older commit ``target``, so that a crash before the next
        commit does not resume from the abandoned branch again (S24)."""
        ranges = selection.abandon(selection.abandoned(self.files, self.layout), target, self.highest_seq)
        replace(self.files, self.layout.rollback, json.dumps({"abandoned": ranges}).encode() + b"\n",
                self.layout.staging(self.generation, "rollback.tmp"))

    def rotate(self, series: str, policy: Policy, context: rotation.Context) -> list[str]:
        """Move what the policy lets go into trash; names of what went. Never raises for the disk's sake."""
        if self.no_rotation is not None:
            log.warning("nothing is rotated until the next start: %s", self.no_rotation)
            return []
        try:
            return self.carry_out(self.verdicts(series, policy, context))
        except (OSError, MarkerError) as error:
            log.warning("could not rotate %s: %s; it will be tried again after the next save", self.layout.root, error)
            return []

    def verdicts(self, series: str, policy: Policy, context: rotation.Context) -> list[rotation.Verdict]:
        """What rotation lets go of ``series``, and why the rest stays. MarkerError, OSError."""
        entries = self.entries()
        self.foreign(entries)
        merged = dict(rotation.protected_now(self.files, self.layout, entries, self.watch))
        merged.update(context.protected)
        merged.update({a: "a save in progress links its files" for a in self.sources.values() if self.linked_by(a)})
        full = rotation.Context(merged, {**context.ignored, **self.in_doubt, **self.rejections()}, context.line,
                                context.origin, context.fresh)
        return rotation.plan(series, entries, self.record.run, policy, full, self.examine)

    def carry_out(self, verdicts: Sequence[rotation.Verdict]) -> list[str]:
        """Move into trash what goes, once what stays is durable in fact; names of what went. MarkerError, OSError."""
        victims = [v.entry for v in verdicts if not v.keep]
        if victims:
            for survivor in (v.entry for v in verdicts if v.keep and v.entry.head is not None
                             and v.entry.head.attempt in self._examined):
                self.vouch(survivor)
        gone = rotation.move_to_trash(self.files, self.layout, self.generation, victims, self.watch)
        names = [os.path.basename(path).rpartition(".")[0] for path in gone]
        if gone:
            self.janitor.delete(gone)
            self.journal.event("rotated", names=names)
        return names

    def rejections(self) -> dict[str, str]:
        return {a: f"rejected: {why}" for a, why in catalog.rejections(self.files, self.layout).items()}

    def reject(self, attempt: str, name: str, reason: str) -> None:
        """Remember that a checkpoint was found bad; it fills no slot and is not tried again until verify clears it."""
        value = {"name": name, "reason": reason, "time": self.runtime.time()}
        replace(self.files, self.layout.rejected(attempt), json.dumps(value).encode(),
                self.layout.staging(self.generation, "rejected.tmp"))


class Claimed:
    """A root that this process owns and has not recovered yet. ``owned``: it was open here already, and is shared."""

    def __init__(self, files: Files, layout: Layout, runtime: Runtime, asked: Naming | None, ownership: Ownership,
                 waiting: Callable[[str], None], owned: OwnedRoot | None = None) -> None:
        self.files, self.layout, self.runtime, self.asked, self.waiting = files, layout, runtime, asked, waiting
        self.ownership, self.owned = ownership, owned
        self._released = False

    def settle(self, run_id: str | None, decided: Collection[str] | None = None) -> OwnedRoot:
        """Recover, and make it this process's. ``decided``: of the attempts of several domains, those to roll forward, with the
        others to be swept; None where the other domains are not known: such attempts are then left as they are."""
        if self.owned is not None:
            return self.owned
        files, layout, runtime = self.files, self.layout, self.runtime
        try:
            # read again: while we waited, another owner may have made the record, saved, and released the root
            looks = while_stale(files, layout, runtime, self.waiting)
            record = catalog.read_record(looks, layout)
            naming = agree_naming(looks, layout, record, self.asked)
            record = settle_record(looks, layout, runtime, record, naming, run_id, self.ownership.generation)
            owned = OwnedRoot(files, layout, naming, self.ownership, record, runtime)
            await_newest(looks, layout, runtime, self.waiting)
            owned._start(decided, self.waiting)
        except BaseException:
            self.release()
            raise
        _open[_key(files, layout, runtime)] = self.owned = owned
        return owned

    def release(self) -> None:
        """Give it back, settled or not. Once."""
        released, self._released = self._released, True
        if released:
            return
        if self.owned is not None:
            self.owned.close()
        else:
            self.ownership.release()


def claim(files: Files, layout: Layout, runtime: Runtime, naming: Naming | None = None, run_id: str | None = None,
          waiting: Callable[[str], None] = lambda text: None) -> Claimed:
    """The root, claimed and fenced; RootInUse while another writer lives."""
    with _opening:
        shared = _open.get(_key(files, layout, runtime))
        if shared is not None and shared.files is files:
            if naming is not None and naming != shared.naming:
                raise ConfigError(f"root {layout.root} is open in this process with naming {shared.naming.template!r}; "
                                  f"{naming.template!r} cannot be used beside it: use a series or another root")
            if run_id is not None and run_id != shared.record.run:
                raise ConfigError(f"root {layout.root} is open in this process as run {shared.record.run!r}, not {run_id!r}")
            shared.users += 1
            return Claimed(files, layout, runtime, naming, shared.ownership, waiting, shared)
        make_root(files, layout, runtime)
        sync_root(files, layout)
        looks = while_stale(files, layout, runtime, waiting)
        asked, naming = naming, agree_naming(looks, layout, catalog.read_record(looks, layout), naming)
        heads = [e.head for e in catalog.scan(looks, layout, naming) if e.head is not None]
        ownership = Ownership.claim(files, layout, runtime, max((h.generation for h in heads), default=0), waiting)
        return Claimed(files, layout, runtime, asked, ownership, waiting)


def highest_seq(files: Files, layout: Layout, generation: int, entries: Sequence[Entry]) -> int:
    """The highest of the root's ``entries``, of its staging and its trash."""
    seen = [0]

    def note(entry: Entry | None, place: str) -> None:
        if entry is not None and not entry.certain:
            raise OSError(errno.EIO, f"cannot tell its place in the order of commits, {entry.problem}; check the storage, or "
                          "move it out of the root", os.path.join(place, entry.name))
        if entry is not None and entry.head is not None:
            seen.append(entry.head.seq)

    for entry in entries:
        note(entry, layout.root)
    for parent in (layout.staging(generation), layout.trash(generation)):
        for item in files.scan(parent):
            path = os.path.join(parent, item.name)
            if item.kind != "dir":
                continue
            for place, name in [(parent, item.name)] + [(path, n) for n in recovery.inside(files, path)]:
                note(catalog.look(files, place, name, "dir", ("", 0)), place)
    seen += [upto for _, upto in selection.abandoned(files, layout)]
    return max(seen)
