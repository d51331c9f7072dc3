"""``distckpt doctor``: whether a job could keep its checkpoints in this root, from where its ranks would run.

Under any launcher every rank runs it; rank 0 prints. It changes nothing but a probe directory of its own, which it removes.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from distckpt import catalog, journal, ownership
from distckpt.catalog import Entry
from distckpt.cli import diagnosis, exits, leftovers, output, probe
from distckpt.cli.diagnosis import FAIL, OK, WARNING, Line, Seen, Story
from distckpt.cli.output import Output, complain
from distckpt.coordination import bootstrap
from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Call, Report
from distckpt.durable import REAL, Files
from distckpt.errors import DistckptError, MarkerError
from distckpt.launch import detect
from distckpt.layout import HOME, Layout
from distckpt.options import Timeouts
from distckpt.ordered import write_new
from distckpt.pace import Pace
from distckpt.reader import Root
from distckpt.removal import remove_tree
from distckpt.runtime import SYSTEM, Runtime

FINE, WARNED, WOULD_FAIL = exits.OK, 1, 2
PROBE = "doctor-"
_PIECE = 1 << 20
_LEAVING = 10.0


def run(args: argparse.Namespace, out: Output) -> int:
    try:
        group = _meet(args.timeout)
    except (DistckptError, RuntimeError, OSError, ImportError) as error:  # torch's rendezvous raises what it likes
        complain(f"the ranks do not find each other: {error}; start it on every rank, as the job is, and see that the host "
                 "of rank 0 can be reached (MASTER_ADDR, MASTER_PORT)")
        return WOULD_FAIL
    try:
        return Doctor(args, group, out).run()
    except DistckptError as error:
        complain(str(error))
        return WOULD_FAIL
    finally:
        with suppress(DistckptError):  # all that matters has been said
            group.close(_LEAVING)
        _part()


def _meet(timeout: float) -> Group:
    """All ranks of this job, by its launcher. Collective."""
    from datetime import timedelta

    import torch.distributed as dist

    how = detect()
    if how.variable == "WORLD_SIZE" and how.world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    elif how.kind == "mpiexec" and how.world > 1:
        import mpi4py.MPI  # noqa: F401 - its import is what makes this an MPI program
    return Group.connect(bootstrap.find(None, SYSTEM), SYSTEM, timeout, timeout)


def _part() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


@dataclass
class _Probe:
    """Rank 0's directory to try things in; ``made`` are those it had to make for it, outermost first."""

    path: str
    made: list[str]


class Doctor:
    """One visit, on one rank."""

    def __init__(self, args: argparse.Namespace, group: Group, out: Output, files: Files = REAL,
                 runtime: Runtime = SYSTEM) -> None:
        self._args, self._group, self._out, self._files, self._runtime = args, group, out, files, runtime
        self._layout = Layout.at(args.root)
        self._probe: _Probe | None = None
        self._seen = Seen(group.hosts, group.kind, self._layout.root, Timeouts().visible, args.storage == "node-local")

    def run(self) -> int:
        """The exit code, the same on every rank. Collective."""
        try:
            with self._group.rounds.call("doctor") as call:
                return self._run(call)
        finally:
            self._clean()

    def _run(self, call: Call) -> int:
        patience = self._args.timeout
        told = call.round(probe.facts(self._files, self._runtime, self._layout.root), self._begin, patience)
        answer: Report = {"clock": time.time() - told["clock"]}
        if told["probe"]:
            answer |= probe.attempt(self._files, self._runtime, told["probe"], told["nonce"], self._group.rank, self._args.wait,
                                    self._moving)
            if "unseen" in answer and self._args.storage == "node-local":
                answer |= self._try_own_disk(told["probe"])
        ready = call.round(answer, self._look_back, patience + self._args.wait, progress=True)
        saved = self._small_save(told["probe"]) if ready["save"] else {}
        verdict = call.round(saved, self._end, patience, progress=True)
        return int(verdict["code"])

    def _moving(self) -> None:
        self._group.pulse.phase("looking for the other ranks' files")

    # -- rank 0 decides --------------------------------------------------------------------------------------------

    def _begin(self, reports: dict[int, Report]) -> Report:
        self._seen.facts = reports
        self._seen.story = _story(self._files, self._runtime, self._layout)
        nonce = self._runtime.token(8)
        try:
            self._probe = self._make_probe()
            write_new(self._files, os.path.join(self._probe.path, probe.NONCE), nonce.encode())
            self._files.fsync_dir(self._probe.path)
        except OSError as error:
            self._seen.unwritable = error
        usable = self._probe is not None and self._seen.unwritable is None
        return {"probe": self._probe.path if usable and self._probe else "", "nonce": nonce, "clock": time.time()}

    def _make_probe(self) -> _Probe:
        root, name = self._layout.root, f"{PROBE}{self._runtime.token(4)}"
        here = probe.standing(self._files, root)
        if here != root:
            path = os.path.join(here, f"{HOME}-{name}")
            made = [path]
        else:
            path = self._layout.home(name)
            made = [path] if self._files.is_dir(self._layout.home()) else [self._layout.home(), path]
        for directory in made:
            self._files.mkdir(directory)
        return _Probe(path, made)

    def _try_own_disk(self, path: str) -> Report:
        """This rank sees another disk than rank 0, as it should: the probe is tried there. Local."""
        try:
            made: list[str] = []
            there = path
            while not self._files.is_dir(there):
                made.insert(0, there)
                there = os.path.dirname(there)
            self._probe = _Probe(path, made or [path])
            for directory in made:
                with suppress(FileExistsError):  # another rank of this node
                    self._files.mkdir(directory)
        except OSError as error:
            return {"unseen": f"and cannot write on its own disk: {error.strerror}"}
        return {"apart": True, "tried": probe.operations(self._files, path, self._group.rank)}

    def _look_back(self, reports: dict[int, Report]) -> Report:
        seen = self._seen
        seen.clocks = {rank: float(report["clock"]) for rank, report in reports.items()}
        seen.tried = {rank: report for rank, report in reports.items() if "tried" in report or "unseen" in report}
        there = [rank for rank, report in seen.tried.items() if report.get("tried", {}).get("be seen") == "ok"]
        same = [rank for rank in there if "apart" not in seen.tried[rank]]
        if self._probe is not None and same:
            try:
                seen.back = probe.others(self._files, self._runtime, self._probe.path, same, self._args.wait, self._moving)
            except OSError as error:
                seen.unwritable = error
        lines = diagnosis.diagnose(seen)
        bad = [line.what for line in lines if line.state == FAIL and line.what != "live writer"]
        needed = 2 * self._args.size * _PIECE * self._group.world
        free = min((f["space"]["free"] for f in seen.facts.values() if "space" in f), default=needed)
        if bad or not there:
            seen.saved = {"skipped": f"{', '.join(dict.fromkeys(bad)) or 'the root'} would not let it"}
        elif free < needed:
            seen.saved = {"skipped": f"it takes {needed >> 20} MiB of free space (--size makes it smaller)"}
        return {"save": not seen.saved}

    def _end(self, reports: dict[int, Report]) -> Report:
        if not self._seen.saved:
            self._seen.saved = reports[0]
        left = self._clean()
        lines = diagnosis.diagnose(self._seen)
        if left:
            lines.append(Line("probe", WARNING, left, "remove it by hand"))
        return {"code": self._say(lines)}

    def _say(self, lines: list[Line]) -> int:
        states = [line.state for line in lines]
        strict = self._args.strict and WARNING in states
        code = WOULD_FAIL if FAIL in states else WARNED if strict else FINE
        for line in lines:
            self._out.line(f"{line.state:<9}  {line.what}: {line.seen}")
            if line.fix:
                self._out.line(f"{'':<9}    {'' if line.state == OK else 'fix: '}{line.fix}")
        bad = f"{states.count(FAIL)} would fail, {output.plural(states.count(WARNING), 'warning')}"
        self._out.line(f"{self._layout.root}: {bad if {FAIL, WARNING} & {*states} else 'all is well'}")
        self._out.document({"root": self._layout.root, "code": code, "ranks": self._group.world,
                            "hosts": sorted(set(self._seen.hosts.values())), "lines": [line.to_json() for line in lines]})
        sys.stdout.flush()
        return code

    def _clean(self) -> str:
        """Remove the probe; what stays, for people. Rank 0, once."""
        found, self._probe = self._probe, None
        if found is None:
            return ""
        top = os.path.dirname(found.made[0])
        try:
            remove_tree(self._files, top, found.path)
            for directory in reversed(found.made[:-1]):
                with suppress(OSError):  # a job has begun to use it
                    self._files.rmdir(directory)
        except OSError as error:
            return f"{found.path} could not be removed: {error}"
        return ""

    # -- every rank ------------------------------------------------------------------------------------------------

    def _small_save(self, where: str) -> Report:
        """What a save through the library costs here: how long one of a byte takes, and how fast the bytes of a larger one go.
        Collective; every rank gets the same errors."""
        from distckpt.manager import CheckpointManager

        size = self._args.size * _PIECE
        took: dict[int, float] = {}
        patience = Timeouts(arrive=self._args.timeout, progress=self._args.timeout, visible=max(self._args.wait, 2.0), close=30.0)
        try:
            with quiet(), CheckpointManager(os.path.join(where, "root"), stop_signals=(), allow_shared_root=True,
                                            timeouts=patience, storage=self._args.storage) as manager:
                for step, amount in enumerate((1, 1, size), 1):
                    begun = self._runtime.monotonic()
                    with manager.saving(step) as files, files.writer("doctor.bin") as out:
                        self._write(out.write, amount)
                    took[step] = self._runtime.monotonic() - begun
        except DistckptError as error:
            return {"error": str(error)}
        except OSError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        seconds = took[3] - took[2]
        whole = size * self._group.world
        return {"fixed": round(took[2], 4), "bytes": whole, "rate": round(whole / seconds) if seconds > 0.001 else None}

    def _write(self, write: Callable[[bytes], int], amount: int) -> None:
        piece = os.urandom(min(amount, _PIECE))
        for start in range(0, amount, _PIECE):
            write(piece[:amount - start])


@contextmanager
def quiet() -> Iterator[None]:
    """The library's own lines about the probe's root would only be in the way."""
    log = logging.getLogger("distckpt")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _story(files: Files, runtime: Runtime, layout: Layout) -> Story:
    """What is known of the run in an existing root. Reads only."""
    told = Story()
    if not files.is_dir(layout.home()):
        return told
    try:
        root = Root(layout.root, files, runtime)
        owner, told.owner_lives = ownership.owner_now(files, layout, runtime)
        if owner is not None:
            told.owner = f"pid {owner.pid} on {owner.host}" + (f", job {owner.job}" if owner.job else "")
        entries = [entry for entry in root.entries() if entry.committed]
        told.bytes = _size(root, entries[0]) if entries else None
        pace = Pace()
        pace.recall(journal.read(files, layout))
        told.seconds, told.takes = pace.stop_seconds(), pace.explain()
        _remains(root, told)
    except (DistckptError, OSError) as error:
        told.problem = f"what stands there cannot be read: {error}"
    return told


def _size(root: Root, entry: Entry) -> int | None:
    try:
        return catalog.read_marker(root.files, root.layout.final(entry.name)).size
    except (MarkerError, OSError):
        return None  # 'verify' is who speaks about it


def _remains(root: Root, told: Story) -> None:
    found = leftovers.leftovers(root)
    dead = [one for one in found if one.fate not in (leftovers.LIVE, leftovers.UNCLEAR)]
    for fate, then in ((leftovers.PUBLISH, "the next start publishes it"), (leftovers.RESTORE, "the next start puts it back"),
                       (leftovers.REMOVE, "the next start removes it")):
        names = [one.name if one.name != "-" else one.id for one in dead if one.fate == fate]
        if names:
            told.leftovers.append(f"{len(names)} in {HOME} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''}): {then}")
    told.unclear += [f"{one.path}: {one.why}" for one in found if one.fate == leftovers.UNCLEAR]
    old = [item.name for item in root.files.scan(root.layout.home()) if item.name.startswith(PROBE)]
    told.unclear += [f"{root.layout.home(name)}: the probe of another 'distckpt doctor', which runs now or was killed"
                     for name in old]

