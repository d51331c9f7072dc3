"""Rank 0's half of a save: what begin answers, what a commit is made of, what follows it."""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

from distckpt import catalog, human, rotation
from distckpt.catalog import Entry
from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Report, require_same
from distckpt.errors import DiskFull, DistckptError, MarkerError, RankFailure, StepAlreadyExists
from distckpt.layout import MAIN, MARKER, Naming, member_path_problem
from distckpt.marker import FileEntry, Head, Marker
from distckpt.ordered import walk
from distckpt.owned import OwnedRoot
from distckpt.patience import PASSING, Patience
from distckpt.retention import Policy
from distckpt.saving.commit import commit
from distckpt.saving.hooks import journal_failures
from distckpt.saving.lineage import Lineage
from distckpt.saving.terms import Go, Request, raise_failures, save_error

log = logging.getLogger(__name__)

_ROOM = 30.0


class Committer:
    """Exists on rank 0 only. One for each manager; the owned root beneath is shared by managers of one root."""

    def __init__(self, owned: OwnedRoot, group: Group, lineage: Lineage, fingerprint: str | None) -> None:
        self.owned, self.group, self.lineage = owned, group, lineage
        self._fingerprint = fingerprint
        self._request: Request | None = None
        self._policy: Policy | None = None
        self._began = 0.0
        self._begun = ""
        self._beside: list[str] = []
        self._sizes: dict[str, int | None] = {}
        self.series_committed: set[str] = set()

    def prepare(self, request: Request, policy: Policy) -> None:
        """What the coming call is about; before its first round."""
        self._request, self._policy = request, policy
        self._began = self.owned.runtime.monotonic()

    @property
    def request(self) -> Request:
        assert self._request is not None
        return self._request

    def _failure(self, error: BaseException) -> RankFailure:
        identity = self.group.identity
        try:
            free: int | None = self.owned.files.free(self.owned.layout.root)
        except OSError:
            free = None
        return RankFailure.of(error, rank=0, host=identity.host, pid=identity.pid, phase=self.group.pulse.current_phase,
                              free=free, needed=self.needed(self.request.series))

    # -- begin ---------------------------------------------------------------------------------------------------

    def begin(self, reports: dict[int, Report]) -> Report:
        """Who may write where. Every rank left the attempts before this one, so their remains are swept first (S21)."""
        request = self.request
        journal_failures(self.owned.journal.event, reports)
        raise_failures(request.step, reports, self.group.world)
        require_same(reports, {"step": "the step", "series": "the series", "on_exists": "on_exists",
                               "collective": "whether the payload runs collectives", "options": "the manager's options",
                               "members": "which members are saved"}, f"save of step {request.step}")
        try:
            with self.owned.lock:
                return {"go": self._begin(request, reports)}
        except DistckptError:
            raise  # StepAlreadyExists is an OSError too
        except OSError as error:
            self.owned.ownership.explain(error)
            raise save_error(request.step, None, {0: self._failure(error)}, self.group.world) from error

    def _begin(self, request: Request, reports: dict[int, Report]) -> dict[str, Any]:
        owned = self.owned
        owned.sweep()
        existing, replace = self._existing(request)
        discard = existing is not None and request.discardable
        attempt, seq = owned.runtime.token(8), 0
        if existing is None or discard:
            self._check_room(request, reports)
            seq = owned.next_seq()
            owned.live.add(attempt)
            self._begun = attempt
            try:
                owned.make_attempt(attempt, request.name)
            except OSError:
                owned.remove_attempt(attempt)  # nobody else has heard of it
                raise
            owned.status.note(attempt, "pending", step=request.step, series=request.series)
            me = self.group.identity
            owned.journal.event("begin", step=request.step, series=request.series, attempt=attempt, seq=seq, job=me.job,
                                restart=me.restart, elastic=me.elastic)
        go = Go(attempt=attempt, name=request.name, generation=owned.generation, seq=seq, replace=replace, discard=discard,
                existing=existing)
        return dict(vars(go))

    def never_began(self, step: int | None, error: BaseException) -> None:
        """Begin ended in an error, or its verdict came too late: nobody works on the attempt, so the next begin sweeps it."""
        attempt = self._begun if self._begun in self.owned.live else None
        self.owned.live.discard(self._begun)
        self._note("failed", "aborted" if attempt else "refused", step, attempt, error)

    def unknown(self, go: Go, error: BaseException) -> None:
        """Nobody can tell how the attempt ended; the next begin or start settles it."""
        self._note("unknown", "unknown", self.request.step, go.attempt, error)

    def _note(self, state: str, event: str, step: int | None, attempt: str | None, error: BaseException) -> None:
        text = str(error)[:2000]
        self.owned.status.note(attempt, state, step=step, error=text)
        self.owned.journal.event(event, step=step, attempt=attempt, error=text,
                                 failures_in_a_row=self.owned.status.failures_in_a_row)

    def _existing(self, request: Request) -> tuple[str | None, bool]:
        """(name that satisfies ``skip``, whether the new one replaces what stands under its name).

        An attempt in doubt, a rejected one and one of a branch that this run left behind do not count as the step:
        the new save replaces them, whatever ``on_exists`` says (S12, S24).
        """
        owned = self.owned
        standing = [e for e in owned.entries() if e.series == request.series and e.step == request.step]
        rejected = owned.rejections() if standing else {}
        for entry in standing:
            head = entry.head
            if not entry.certain:  # not known to be there, nor to be bad: the disk's fault, and no reason to move anything away
                raise OSError(errno.EIO, f"cannot tell what stands under the name of step {request.step}: {entry.problem}",
                              owned.layout.final(entry.name))
            if head is None or entry.problem or head.run != owned.record.run:
                raise self._taken(entry, f"it cannot be replaced: {entry.problem or 'it belongs to another run'}",
                                  "adopt it ('distckpt adopt'), move it away or choose another root")
            superseded = head.attempt in owned.in_doubt or head.attempt in rejected or not self._on_line(entry)
            if not superseded and request.on_exists == "skip":
                return entry.name, False
            if not superseded and request.on_exists == "error":
                raise self._taken(entry, "it is committed and on_exists is 'error'",
                                  "pass on_exists='skip' to go on with it, or 'replace' to write it again")
            holders = owned.watch.holders(head.attempt)
            if holders:
                raise self._taken(entry, f"it is in use and cannot be replaced: {'; '.join(holders)}",
                                  "release the lease ('distckpt unpin') or choose another step")
            if entry.name != request.name:
                raise self._taken(entry, f"it stands under another spelling of the step than {request.name!r}",
                                  "remove or rename one of them")
        return None, bool(standing)

    def _on_line(self, entry: Entry) -> bool:
        if not self.lineage.known:
            return True
        try:
            return self.lineage.holds(catalog.read_marker(self.owned.files, self.owned.layout.final(entry.name)))
        except MarkerError:
            return False

    def _taken(self, entry: Entry, why: str, remedy: str) -> StepAlreadyExists:
        return StepAlreadyExists(f"save of step {self.request.step}: {entry.name} exists in {self.owned.layout.root} and {why}; "
                                 f"{remedy}. Nothing was written", step=self.request.step, attempt=None, background=False,
                                 failures={}, outcome="aborted")

    def needed(self, series: str) -> int | None:
        """Bytes that a save of ``series`` will take, judging by the newest one; None for the first."""
        if series not in self._sizes:
            self._sizes[series] = None
            try:
                for entry in self.owned.entries():
                    if entry.series == series and entry.committed:
                        self._sizes[series] = catalog.read_marker(self.owned.files, self.owned.layout.final(entry.name)).size
                        break
            except (MarkerError, OSError) as error:
                log.debug("cannot tell how large the next save will be: %s", error)
        return self._sizes[series]

    def _check_room(self, request: Request, reports: dict[int, Report]) -> None:
        needed = self.needed(request.series)
        known = {rank: report["free"] for rank, report in reports.items() if report.get("free") is not None}
        if needed is None or not known:
            return
        trash = self.owned.janitor
        if min(known.values()) < needed and not trash.wait(0) and trash.wait(_ROOM):
            here = self.owned.files.free(self.owned.layout.root)  # what was in trash when the ranks looked is gone now
            known = {rank: max(free, here) for rank, free in known.items()}
        rank = min(known, key=lambda r: known[r])
        if known[rank] < needed:
            raise DiskFull(f"save of step {request.step}: the disk is too full on rank {rank} ({self.group.hosts.get(rank)}) at "
                           f"{self.owned.layout.root}: {known[rank]} bytes are free, the last checkpoint took {needed}; nothing "
                           "was written and the checkpoints before it are untouched. Free space, lower keep_last, or save "
                           "elsewhere", step=request.step, attempt=None, background=False, failures={}, outcome="aborted",
                           needed=needed, free=known[rank], path=self.owned.layout.root)

    # -- acks and commit -----------------------------------------------------------------------------------------

    def compare(self, go: Go, acked: dict[int, list[FileEntry]],
                patience: Patience) -> tuple[list[str], tuple[int, str] | None]:
        """(files on disk that nobody acked, (rank, complaint) if the acks are not what stands there).

        The union of the acks must be exactly the listing: two ranks on one path, an acked file that rank 0 does not
        see, a size that differs, a symlink - each ends the attempt. What another host wrote may be late here: what its ranks
        say of it counts, until this one has looked for as long as ``patience`` says.
        """
        owner: dict[str, FileEntry] = {}
        for rank, entries in acked.items():
            for entry in entries:
                if entry.path in owner:
                    return [], (rank, f"ranks {owner[entry.path].rank} and {rank} both wrote {entry.path!r}: use files.mine for "
                                      "a file per rank, or files.writes with files.shared for one that is the same on all")
                owner[entry.path] = entry
        staged = self.owned.layout.staging(self.owned.generation, go.attempt, go.name)
        for _ in patience.looks():
            unclaimed, complaint, final = self._compare_now(staged, owner)
            if final:
                return unclaimed, complaint
        if complaint is not None and patience.seconds:
            complaint = complaint[0], f"{complaint[1]} Seen so for {patience.seconds:.0f} s after all ranks had written"
        return unclaimed, complaint

    def _compare_now(self, staged: str, owner: dict[str, FileEntry]) -> tuple[list[str], tuple[int, str] | None, bool]:
        """As ``compare``, by one look; and whether that is final: another look may see what another host wrote."""
        unclaimed, sizes = [], {}
        try:
            for path, item in walk(self.owned.files, staged):
                if item.kind == "dir":
                    continue
                rank = owner[path].rank if path in owner else 0
                if item.kind != "file":
                    return [], (rank, f"{path!r} is a {item.kind}, not a regular file"), True
                problem = "it is the marker's name" if path == MARKER else member_path_problem(path)
                if problem:
                    return [], (rank, f"a writer left a file {path!r}, which cannot stand in a checkpoint: {problem}"), True
                sizes[path] = self.owned.files.stat(f"{staged}/{path}").size
                if path in owner and sizes[path] != owner[path].size:
                    # to open it makes this host ask for its size, where it remembers one (scripts.proof.l4, "stale")
                    self.owned.files.read(f"{staged}/{path}", 0)
                    sizes[path] = self.owned.files.stat(f"{staged}/{path}").size
                if path not in owner:
                    unclaimed.append(path)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            where = os.path.relpath(error.filename or staged, staged)
            return [], (0, f"{where!r} went away while rank 0 looked at it ({error.strerror})"), False
        hosts, here = self.group.hosts, self.group.identity.host
        for entry in sorted((e for e in owner.values() if sizes.get(e.path) != e.size), key=lambda e: hosts[e.rank] != here):
            by = f"rank {entry.rank} on {hosts[entry.rank]}"
            if entry.path in sizes:
                text = f"{entry.path!r} has {sizes[entry.path]} bytes for rank 0 on {here}, and {by} wrote {entry.size}"
            else:
                text = f"{entry.path!r} was written by {by} and is not seen by rank 0 on {here}"
            if hosts[entry.rank] == here:
                text += "; something changed it after that rank had made it durable"
            else:
                text += "; is the root on storage that all hosts share?"
            return [], (entry.rank, text), hosts[entry.rank] == here
        if not sizes:
            return [], (0, "no rank wrote anything; an empty checkpoint is not one"), len(self.group.leaders) == 1
        return unclaimed, None, True

    def commit(self, go: Go, acked: dict[int, list[FileEntry]], notes: dict[int, dict[str, Any]],
               slowest: tuple[int, float]) -> Report:
        """Marker, publish; the committed verdict, or the SaveError that says aborted or unknown."""
        owned, request, lineage = self.owned, self.request, self.lineage
        assert self._policy is not None
        entries = tuple(sorted((e for rank in acked for e in acked[rank]), key=lambda e: e.path))
        found = Marker(
            head=Head(go.seq, request.step, go.attempt, go.name, request.series, owned.record.run, owned.generation),
            world=self.group.world, files=entries, branch=lineage.branch, parent=lineage.parent, lineage=lineage.ancestors,
            time=owned.runtime.time(), host=self.group.identity.host, metrics=request.metrics, meta=request.meta,
            payload=notes.get(0, {}), fingerprint=self._fingerprint, retention=self._policy.spec)
        self._beside = list(found.payload.get("beside", []))
        with owned.lock:
            outcome = commit(owned, found, replace=go.replace)
        owned.live.discard(go.attempt)
        if outcome.state != "committed":
            assert outcome.error is not None
            if isinstance(outcome.error, DistckptError):
                raise outcome.error
            raise save_error(request.step, go.attempt, {0: self._failure(outcome.error)}, self.group.world,
                             outcome.state) from outcome.error
        lineage.fresh.append(go.attempt)
        self.series_committed.add(request.series)
        self._sizes[request.series] = found.size
        seconds = owned.runtime.monotonic() - self._began
        blocked, behind = (seconds, 0.0) if request.blocked is None else (request.blocked, seconds)
        owned.status.note(go.attempt, "committed", name=go.name)
        if owned.durations is not None:
            owned.durations = [*owned.durations[-199:], seconds]
        owned.journal.event("committed", step=request.step, series=request.series, name=go.name, attempt=go.attempt,
                            seq=go.seq, bytes=found.size, files=len(entries), seconds=round(seconds, 3),
                            blocked=round(blocked, 3), background=round(behind, 3), slowest_rank=slowest[0],
                            slowest_seconds=round(slowest[1], 3))
        log.info("committed %s: step %d, %d ranks, %d files, %s; training was blocked for %.2f s, %.2f s went in the background, "
                 "rank %d was the slowest with %.2f s", go.name, request.step, self.group.world, len(entries),
                 human.size(found.size), blocked, behind, *slowest)
        return {"committed": {"name": go.name, "attempt": go.attempt, "seq": go.seq, "bytes": found.size,
                              "files": len(entries), "slowest": list(slowest)}}

    def after_commit(self, go: Go) -> None:
        """The pointer, then rotation: only now, when every rank has the verdict (P3)."""
        request = self.request
        assert self._policy is not None
        with self.owned.lock:
            if request.series == MAIN:
                self.owned.point_to(go.name)
            self.owned.put_beside(go.name, self._beside)
            self.rotate(request.series, self._policy)

    def rotate(self, series: str, policy: Policy) -> list[str]:
        """Apply ``policy`` to ``series``; names of what went."""
        context = rotation.Context(protected={}, ignored={}, line=self.lineage.line, origin=self.lineage.parent,
                                   fresh=frozenset(self.lineage.fresh))
        return self.owned.rotate(series, policy, context)

    def aborted(self, go: Go, error: DistckptError, swept: bool) -> None:
        """Every rank that could be told was told; the space comes back now if all writers have returned."""
        self.owned.live.discard(go.attempt)
        self._note("failed", "aborted", self.request.step, go.attempt, error)
        if swept:
            with self.owned.lock:
                self.owned.remove_attempt(go.attempt)
            if isinstance(error, DiskFull):
                self.owned.janitor.wait(_ROOM)  # the caller's next move needs the room that this attempt took
            self.owned.status.again()

    def discarded(self, go: Go) -> None:
        self.owned.live.discard(go.attempt)
        with self.owned.lock:
            self.owned.remove_attempt(go.attempt)


def final_name(naming: Naming, series: str, step: int) -> str:
    return naming.of_series(series).format(step)
