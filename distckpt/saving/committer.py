"""Rank 0's half of a save: what begin answers, what a commit is made of, what follows it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from distckpt import catalog, human, rotation
from distckpt.catalog import Entry
from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Report, require_same
from distckpt.domains.domains import Domains
from distckpt.errors import DiskFull, DistckptError, MarkerError, RankFailure, StepAlreadyExists
from distckpt.layout import MAIN, Naming
from distckpt.marker import FileEntry, Head, Marker
from distckpt.owned import ROOM, OwnedRoot
from distckpt.patience import Patience
from distckpt.retention import Policy
from distckpt.saving.commit import Outcome, commit
from distckpt.saving.hooks import journal_failures
from distckpt.saving.lineage import Lineage
from distckpt.saving.terms import Go, Request, raise_failures, save_error

log = logging.getLogger(__name__)


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
        self.linked: dict[int, int] = {}
        self.series_committed: set[str] = set()
        self.domains: Domains | None = None

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
                self.owned.afterwards.catch_up()  # what the last save's rotation frees is free before this one takes room
                verdict = {"go": self._begin(request, reports)}
                return verdict if self.domains is None else {**verdict, "doubt": sorted(self.owned.in_doubt)}
        except DistckptError:
            raise  # StepAlreadyExists is an OSError too
        except OSError as error:
            self.owned.ownership.explain(error)
            raise save_error(request.step, None, {0: self._failure(error)}, self.group.world) from error

    def _begin(self, request: Request, reports: dict[int, Report]) -> dict[str, Any]:
        owned = self.owned
        owned.sweep()
        existing, replaces = self._existing(request)
        discard = existing is not None and request.discardable
        attempt, seq, source = owned.runtime.token(8), 0, None
        if existing is None or discard:
            self._check_room(request, reports)
            seq = owned.next_seq()
            owned.live.add(attempt)
            self._begun = attempt
            source = self._source(request)
            if source is not None:  # held from here on, under the lock that rotation and replace take
                owned.hold(attempt, source[1])
            try:
                owned.make_attempt(attempt, request.name)
            except OSError:
                owned.remove_attempt(attempt)  # nobody else has heard of it
                raise
            owned.status.note(attempt, "pending", step=request.step, series=request.series)
            me = self.group.identity
            owned.journal.event("begin", step=request.step, series=request.series, attempt=attempt, seq=seq, job=me.job,
                                restart=me.restart, elastic=me.elastic)
        go = Go(attempt=attempt, name=request.name, generation=owned.generation, seq=seq, replace=replaces, discard=discard,
                existing=existing, source=source)
        return dict(vars(go))

    def _source(self, request: Request) -> tuple[str, str] | None:
        """(name, attempt) of the checkpoint whose files this save may link: the newest of the series, unless it is known to be
        bad. Not an older one then: it may have the same bad file, linked."""
        owned = self.owned
        newest = next((e for e in owned.entries() if e.committed and e.series == request.series and e.head is not None
                       and e.head.run == owned.record.run), None) if request.links else None
        if newest is None or newest.head is None or newest.head.attempt in {**owned.in_doubt, **owned.rejections()}:
            return None
        return newest.name, newest.head.attempt

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
        try:  # a torn marker satisfies no skip, nor does it stop a save
            return self.lineage.holds(catalog.read_marker(self.owned.files, self.owned.layout.final(entry.name)))
        except MarkerError:
            return False

    def _taken(self, entry: Entry, why: str, remedy: str) -> StepAlreadyExists:
        return StepAlreadyExists(f"save of step {self.request.step}: {entry.name} exists in {self.owned.layout.root} and {why}; "
                                 f"{remedy}. Nothing was written", step=self.request.step, attempt=None, background=False,
                                 failures={}, outcome="aborted")

    def needed(self, series: str) -> int | None:
        """Bytes that a save of ``series`` will take here; None where that is not known."""
        return self.owned.needed(series, self.request.links)

    def _check_room(self, request: Request, reports: dict[int, Report]) -> None:
        """DiskFull, before anybody writes, when one like the last does not fit on some disk."""
        needed = self.needed(request.series)
        here = {rank: report["free"] for rank, report in reports.items()
                if report.get("free") is not None and (self.domains is None or rank in self.domains.mine)}
        rooms = []
        if needed is not None and here:
            if min(here.values()) < needed:
                self.owned.make_room()
                # what stood in trash when the ranks looked is gone by now
                free = self.owned.files.free(self.owned.layout.root)
                gained = max(free - here.get(self.group.rank, free), 0)
                here = {rank: known + gained for rank, known in here.items()}
            rank = min(here, key=lambda r: here[r])
            rooms = [(rank, here[rank], needed)]
        rooms += [(rank, *report["room"]) for rank, report in reports.items() if report.get("room")]
        for rank, free, needed in rooms:
            if free < needed:
                raise DiskFull(f"save of step {request.step}: the disk is too full on rank {rank} "
                               f"({self.group.hosts.get(rank)}) at {self.owned.layout.root}: {free} bytes are free, the last "
                               f"checkpoint took {needed}; nothing was written and the checkpoints before it are untouched. "
                               "Free space, lower keep_last, or save elsewhere", step=request.step, attempt=None,
                               background=False, failures={}, outcome="aborted", needed=needed, free=free,
                               path=self.owned.layout.root)

    # -- acks and commit -----------------------------------------------------------------------------------------

    def draft(self, go: Go, notes: dict[int, dict[str, Any]]) -> Marker:
        """The marker of ``go``, without its files."""
        owned, request, lineage = self.owned, self.request, self.lineage
        assert self._policy is not None
        return Marker(
            head=Head(go.seq, request.step, go.attempt, go.name, request.series, owned.record.run, owned.generation),
            world=self.group.world, files=(), branch=lineage.branch, parent=lineage.parent, lineage=lineage.ancestors,
            time=owned.runtime.time(), host=self.group.identity.host, metrics=request.metrics, meta=request.meta,
            payload=notes.get(0, {}), fingerprint=self._fingerprint, retention=self._policy.spec)

    def commit(self, go: Go, acked: dict[int, list[FileEntry]], notes: dict[int, dict[str, Any]],
               slowest: tuple[int, float], patience: Patience) -> Report:
        """Marker, publish; the committed verdict, or the SaveError that says aborted or unknown."""
        found = replace(self.draft(go, notes), files=in_order(acked))
        with self.owned.lock:
            outcome = commit(self.owned, found, replace=go.replace, patience=patience)
        self.owned.live.discard(go.attempt)
        if outcome.state != "committed":
            raise self.failed(go, outcome) from outcome.error
        return self.committed(go, found, slowest)

    def failed(self, go: Go, outcome: Outcome) -> DistckptError:
        """The error of an outcome that is not committed."""
        assert outcome.error is not None
        if isinstance(outcome.error, DistckptError):
            return outcome.error
        failure = self._failure(outcome.error)
        if isinstance(outcome.error, OSError):  # a zombie meets the fence as a path that is gone (S5)
            failure = replace(failure, message=failure.message + self.owned.ownership.lost_to())
        return save_error(self.request.step, go.attempt, {0: failure}, self.group.world, outcome.state)

    def committed(self, go: Go, found: Marker, slowest: tuple[int, float], size: int | None = None,
                  count: int | None = None) -> Report:
        """Note it everywhere, and give the verdict. ``size``, ``count``: of all domains, where ``found`` is but one's."""
        owned, request, lineage = self.owned, self.request, self.lineage
        size, count = found.size if size is None else size, len(found.files) if count is None else count
        self._beside = list(found.payload.get("beside", []))
        lineage.fresh.append(go.attempt)
        self.series_committed.add(request.series)
        owned.takes(request.series, found.size - sum(
            linked for rank, linked in self.linked.items() if self.domains is None or rank in self.domains.mine))
        seconds = owned.runtime.monotonic() - self._began
        blocked, behind = (seconds, 0.0) if request.blocked is None else (request.blocked, seconds)
        owned.status.note(go.attempt, "committed", name=go.name)
        measured = owned.pace.commit(seconds, blocked, behind, owned.runtime.monotonic())
        owned.journal.event("committed", step=request.step, series=request.series, name=go.name, attempt=go.attempt,
                            seq=go.seq, bytes=size, files=count, slowest_rank=slowest[0],
                            slowest_seconds=round(slowest[1], 3), **({"linked": sum(self.linked.values())} if request.links
                                                                     else {}), **measured)
        linked = f" ({human.size(sum(self.linked.values()))} linked)" if request.links else ""
        stop = f"; {measured['since_stop']:.2f} s after the word to stop" if "since_stop" in measured else ""
        log.info("committed %s: step %d, %d ranks, %d files, %s%s; training was blocked for %.2f s, %.2f s went in the "
                 "background, rank %d was the slowest with %.2f s%s", go.name, request.step, self.group.world, count,
                 human.size(size), linked, blocked, behind, *slowest, stop)
        return {"committed": {"name": go.name, "attempt": go.attempt, "seq": go.seq, "bytes": size,
                              "files": count, "slowest": list(slowest)}}

    def after_commit(self, go: Go, rotate: Callable[[str, Policy], Any] | None = None) -> None:
        """The pointer, then rotation: only now, when every rank has the verdict (P3), and not at the caller's cost. Nothing of
        it is left when the next begin, or a resume, changes what it goes by."""
        series, policy, beside = self.request.series, self._policy, self._beside
        assert policy is not None
        rotate = rotate or partial(self.owned.rotate, context=self.context())

        def follow() -> None:
            if series == MAIN:
                self.owned.point_to(go.name)
            self.owned.put_beside(go.name, beside)
            rotate(series, policy)

        self.owned.afterwards.add(follow)

    def rotate(self, series: str, policy: Policy) -> list[str]:
        """Apply ``policy`` to ``series``; names of what went."""
        return self.owned.rotate(series, policy, self.context())

    def context(self, ignored: Mapping[str, str] | None = None, protected: Mapping[str, str] | None = None) -> rotation.Context:
        """What this run's lineage says to rotation."""
        return rotation.Context(protected=protected or {}, ignored=ignored or {}, line=self.lineage.line,
                                origin=self.lineage.parent, fresh=frozenset(self.lineage.fresh))

    def aborted(self, go: Go, error: DistckptError, swept: bool) -> None:
        """Every rank that could be told was told; the space comes back now if all writers have returned."""
        self.owned.live.discard(go.attempt)
        self._note("failed", "aborted", self.request.step, go.attempt, error)
        if swept:
            with self.owned.lock:
                self.owned.remove_attempt(go.attempt)
            if isinstance(error, DiskFull):
                self.owned.janitor.wait(ROOM)  # the caller's next move needs the room that this attempt took
            self.owned.status.again()

    def discarded(self, go: Go) -> None:
        self.owned.live.discard(go.attempt)
        with self.owned.lock:
            self.owned.remove_attempt(go.attempt)


def in_order(acked: Mapping[int, list[FileEntry]]) -> tuple[FileEntry, ...]:
    """The manifest of the ranks' acks."""
    return tuple(sorted((e for rank in acked for e in acked[rank]), key=lambda e: e.path))


def final_name(naming: Naming, series: str, step: int) -> str:
    return naming.of_series(series).format(step)
