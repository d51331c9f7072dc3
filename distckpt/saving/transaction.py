"""One save, as every rank runs it: begin, write, durable acks, the verdict. Two-phase commit with presumed abort.

The decision is one key, taken from absent by whoever comes first: a rank that failed puts *aborted* there, rank 0 must
win it with *committing* before it writes the marker (S4; FIELD_CASES B49-B60). After its ack a rank only waits: it
never sets the key, and a deadline that passes then ends in *unknown*, to be settled with rank 0 at the next begin.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from distckpt.coordination.collector import held_off
from distckpt.coordination.group import Group
from distckpt.coordination.pulse import Watch, beat_key, describe
from distckpt.coordination.rounds import Call, Report
from distckpt.domains.parts import PREPARE, Parts
from distckpt.durable import Files
from distckpt.errors import DistckptError, RankFailure, RankLost, RankTimeout, SaveError, from_wire, to_wire
from distckpt.layout import Layout
from distckpt.marker import FileEntry
from distckpt.patience import PASSING, Patience
from distckpt.runtime import Runtime
from distckpt.saving.compare import compare
from distckpt.saving.files import RankFiles
from distckpt.saving.links import Twins
from distckpt.saving.piecewriter import PeerFailed
from distckpt.saving.terms import Go, Request, both_wrote, save_error
from distckpt.saving.unclaimed import Unclaimed

_CAUSES = 1.0
_LOCAL = 2.0
"""Seconds until a directory is said to be missing on a disk that seems to be local."""


def _let_go(error: BaseException | None) -> None:
    """Close what a failed writer left open. Torch's keeps its half-written file as long as the frames of its exception live,
    and then the file's space stays taken although its name is gone. The text of the traceback is in the report by now."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Transaction:
    """One attempt, from begin to the verdict, on one rank. ``committer`` is there on rank 0 only; ``parts`` where there are
    several storage domains."""

    def __init__(self, call: Call, group: Group, files: Files, layout: Layout, runtime: Runtime, request: Request,
                 committer: Any, *, algorithm: str | None, arrive: float, progress: float, patience: Patience,
                 parts: Parts | None = None, kept: bool = False) -> None:
        self._call, self._group, self._files, self._layout, self._runtime = call, group, files, layout, runtime
        self.request, self._committer, self._parts, self._kept = request, committer, parts, kept
        self._algorithm, self._arrive, self._progress, self._patience = algorithm, arrive, progress, patience
        self._client, self._pulse = group.rounds.client, group.pulse
        self.go: Go | None = None
        self._directory = ""
        self._decision = ""
        self._writing = 0.0

    # -- begin ---------------------------------------------------------------------------------------------------

    def begin(self, report: Report) -> RankFiles | None:
        """The files to write into; None when the step is there already and is skipped. Raises alike on every rank."""
        decide: Callable[[dict[int, Report]], Report] = self._committer.begin if self._committer else _never
        room = self._parts.room(self.request) if self._parts else {}
        try:
            verdict = self._call.round({
                **report, **room, "step": self.request.step, "series": self.request.series, "on_exists": self.request.on_exists,
                "collective": self.request.collective, "free": self._free()}, decide, self._arrive)
        except BaseException as error:
            if self._committer is not None:
                self._committer.never_began(self.request.step, error)
            raise
        go = self.go = Go(**verdict["go"])
        twins = None
        if self.request.links:
            name, attempt = go.source or ("", None)
            twins = Twins(self._layout.final(name) if name else "", attempt)
        if go.existing is not None and not go.discard:
            return None
        parts = self._parts
        self._directory = self._layout.staging(parts.generation if parts else go.generation, go.attempt, go.name)
        self._decision = self._call.key(go.attempt, "decision")
        self._pulse.phase("waiting to see the staging directory")
        handle = RankFiles(self._files, self._directory, self._group.rank, self._group.world, algorithm=self._algorithm,
                           aborted=lambda: self._client.has(self._decision), skipped=go.discard, patience=self._patience,
                           first=parts.first if parts else 0, runtime=self._runtime, twins=twins, kept=self._kept)
        self._pulse.probe(handle.written_bytes)
        self._unclaimed = Unclaimed(self._call, self._group, self._files, self._directory, go.attempt, self._failure,
                                    algorithm=self._algorithm, progress=self._progress, patience=self._patience,
                                    kept=self._kept)
        if parts is not None:
            parts.begin(self._call, self.request, go, self._progress, self._failure, verdict["doubt"],
                        self._patience)
        return handle

    def _free(self) -> int | None:
        try:
            return self._files.free(self._layout.root)
        except OSError:
            return None  # the attempt itself will say what is wrong with this disk

    def await_staging(self) -> None:
        """Wait until this rank sees the staging directory. Its name came by the verdict and is never looked up before
        it exists: network file systems remember an absence for half a minute. Re-listing the parent does not."""
        assert self.go is not None
        outer = os.path.dirname(self._directory)
        if self._parts is not None:
            self._parts.make_staging()
        for _ in self._patience.looks(at_least=_LOCAL):
            try:
                seen = any(i.name == self.go.attempt for i in self._files.scan(os.path.dirname(outer)))
                if seen and any(i.name == self.go.name for i in self._files.scan(outer)):
                    break
                last = ""
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                last = f" ({error.strerror})"
            if self._parts is not None and self._client.has(self._decision):
                raise PeerFailed  # the committer of a domain could not make its directory
        else:
            waited = max(self._patience.seconds, _LOCAL)
            raise FileNotFoundError(errno.ENOENT, f"not visible on {self._group.identity.host} {waited:.0f} s after rank 0 on "
                                    f"{self._group.hosts.get(0)} made it{last}: is the root on storage that all hosts share? "
                                    "Timeouts(visible=...) is how long a rank looks for it", self._directory)
        self._writing = self._runtime.monotonic()
        self._pulse.phase("write")

    def enter_together(self, ready: bool) -> None:
        """One more round before a framework's collectives: a rank that cannot enter must not leave the others waiting in
        them, so either all enter or none (they have deadlines of their own, and name nobody)."""
        assert self.go is not None
        try:
            verdict = self._call.round({"ready": ready}, _enter, self._patience.seconds + self._progress)
        except RankTimeout as error:
            raise PeerFailed from error  # the acks will find the same ranks missing, and the verdict names them
        if ready and not verdict["enter"]:
            raise PeerFailed

    # -- end -----------------------------------------------------------------------------------------------------

    def finish(self, files: RankFiles, error: BaseException | None) -> Report:
        """The committed verdict; otherwise the same error on every rank. ``error``: what this rank's writer raised."""
        assert self.go is not None
        go, entries, failure = self.go, [], None
        if error is not None:
            files.unsynced.release()
        else:
            self._pulse.phase("fsync")
            try:
                entries = files.finish()
            except OSError as raised:
                error = raised
        claimed = [path for path, *_ in files.written()]
        if isinstance(error, PeerFailed):
            report: Report = {"stopped": asdict(self._failure(error.__cause__ or error)), "claimed": claimed}
        elif error is not None:
            failure = self._failure(error)
            if failure.disk_full:
                _let_go(error)
            report = {"failure": asdict(failure), "claimed": claimed}
            self._client.claim(self._decision, {"aborted": asdict(failure)})
        else:
            report = {"files": [[e.path, e.size, e.digest] for e in entries], "notes": files.notes,
                      "open": files.open_ended, "linked": files.bytes_linked,
                      "seconds": round(self._runtime.monotonic() - self._writing, 6)}
        if go.discard:
            return self._discard(go, failure, error)
        try:
            return self._decide(go, report, entries)
        except DistckptError as raised:
            # every rank raises now, and no rank can tell whether a collective of this save still misses a peer
            self._group.broken = self._group.broken or self.request.collective
            if error is None or isinstance(error, PeerFailed) or not isinstance(raised, SaveError):
                raise
            raise raised from error

    def _failure(self, error: BaseException) -> RankFailure:
        identity = self._group.identity
        return RankFailure.of(error, rank=self._group.rank, host=identity.host, pid=identity.pid,
                              phase=self._pulse.current_phase, free=self._free(),
                              needed=self._committer.needed(self.request.series) if self._committer else None,
                              where=self._directory)

    def _decide(self, go: Go, report: Report, entries: list[FileEntry]) -> Report:
        me, outcome_key = self._group.rank, self._call.key(go.attempt, "outcome")
        standing = self._client.claim(self._call.key(go.attempt, "ack", me, by=me), {**report, "rank": me})
        if standing.get("filled"):
            self._client.set(self._call.key(go.attempt, "left", me, by=me), {})
        if me != 0:
            if self._parts is None:
                return self._await_outcome(go, outcome_key)
            with self._parts.ending():
                return self._parts.carry_out(self._await_outcome(go, outcome_key))
        keys = self._call.keys(range(self._group.world), go.attempt, "ack")
        reports, watch = self._call.gather(keys, self._progress, progress=True, abort=self._decision)
        return self._lead(go, reports, watch, outcome_key)

    # -- rank 0 --------------------------------------------------------------------------------------------------

    def _lead(self, go: Go, reports: dict[int, Report], watch: Watch, outcome_key: str) -> Report:
        absence = self._call.absence(watch, "write") if watch.absent() else None
        try:
            problem: DistckptError | None = self._problem(go, reports, absence)
            acked: dict[int, list[FileEntry]] = {}
            unclaimed: list[str] = []
            if problem is None:
                with held_off(len(reports)):
                    acked = {rank: [FileEntry(p, s, d, rank) for p, s, d in report["files"]] for rank, report in reports.items()}
                unclaimed, problem = self._compare(go, acked) if self._parts is None else ([], None)
            notes = {rank: report.get("notes", {}) for rank, report in reports.items()}
            if problem is None and self._parts is not None:
                self._parts.announce(notes)
            listed = self._parts is None and problem is None and (bool(unclaimed) or self._unclaimed.may_hide(reports))
            if problem is None and not self._fix(PREPARE if self._parts else "sync" if listed else "committing"):
                problem = self._problem(go, reports, absence)
            elif problem is None and listed:
                problem = self._sync_unclaimed(go, unclaimed, acked)
            if problem is None:
                self._pulse.phase("commit")
                self._committer.linked = {rank: report.get("linked", 0) for rank, report in reports.items()}
                commit = self._parts.commit if self._parts else partial(self._committer.commit, patience=self._patience)
                verdict: Report = commit(go, acked, notes, _slowest(reports))
            else:
                self._client.claim(self._decision, {"aborted": None})
                raise problem
        except DistckptError as error:
            if not (isinstance(error, SaveError) and error.outcome == "unknown"):
                self._client.set(outcome_key, {"error": to_wire(error)})
                still = [self._call.key(go.attempt, "left", r, by=r) for r in watch.keys
                         if r not in reports and r not in watch.lost]
                self._committer.aborted(go, error, swept=self._all_left(still, bool(watch.timed_out)))
            else:
                self._client.set(outcome_key, {"error": to_wire(error)})
                self._committer.unknown(go, error)
            if watch.absent():
                self._call.ask_for_stacks(watch)
            raise
        except BaseException as error:  # announced and raised again: whatever fails here must not strand the others
            failure = self._failure(error)
            told = save_error(self.request.step, go.attempt, {0: failure}, self._group.world, "unknown")
            self._client.set(outcome_key, {"error": to_wire(told)})
            self._committer.unknown(go, told)
            raise
        self._client.set(outcome_key, verdict)
        self._committer.after_commit(go, self._parts.rotation() if self._parts else None)
        return verdict

    def _fix(self, decision: str) -> bool:
        """Fix that nobody can abort any more; False when a rank did first (S4)."""
        return self._client.claim(self._decision, {decision: True}).get(decision) is True

    def _problem(self, go: Go, reports: dict[int, Report], absence: RankTimeout | None) -> DistckptError | None:
        """Why this attempt cannot be committed, as far as the reports tell."""
        failures = {r: RankFailure(**rep["failure"]) for r, rep in reports.items() if "failure" in rep}
        standing = self._client.peek(self._decision)
        if standing is not None and standing.get("aborted"):
            first = RankFailure(**standing["aborted"])
            failures.setdefault(first.rank, first)
        if not failures and absence is None:  # it only stopped, for a peer that turned out to be there
            failures = {r: RankFailure(**rep["stopped"]) for r, rep in reports.items() if "stopped" in rep}
        if not failures:
            return absence
        for rank, beat in (absence.missing if absence is not None else {}).items():
            what = "it has ended, or left" if isinstance(absence, RankLost) else "no word from it"
            known = failures.get(rank)
            failures[rank] = (RankFailure(**{**asdict(known), "message": f"{known.message}; then, {what}"}) if known is not None
                              else RankFailure(rank, type(absence).__name__, what, str((beat or {}).get("host")),
                                               int((beat or {}).get("pid") or 0), str((beat or {}).get("phase"))))
        failures = {r: self._with_needs(_with_both(f, self._directory, self._beside(r, reports))) for r, f in failures.items()}
        return save_error(self.request.step, go.attempt, failures, self._group.world)

    def _beside(self, rank: int, reports: dict[int, Report]) -> dict[int, Report]:
        """Of the ranks that write where ``rank`` does: on nodes' own disks a replicated file stands once on each."""
        if self._parts is None:
            return reports
        ranks = next(ranks for ranks in self._parts.domains.all if rank in ranks)
        return {rank: report for rank, report in reports.items() if rank in ranks}

    def _with_needs(self, failure: RankFailure) -> RankFailure:
        if not failure.disk_full or failure.needed is not None:
            return failure
        return RankFailure(**{**asdict(failure), "needed": self._committer.needed(self.request.series)})

    def _compare(self, go: Go, acked: dict[int, list[FileEntry]]) -> tuple[list[str], SaveError | None]:
        """Files on disk that nobody acked; and an error when the acks are not what stands there."""
        try:
            unclaimed, complaint = compare(self._files, self._directory, acked, self._group.hosts, self._patience)
        except OSError as error:
            return [], save_error(self.request.step, go.attempt, {0: self._failure(error)}, self._group.world)
        if complaint is None:
            return unclaimed, None
        rank, text = complaint
        identity = self._group.identities[rank]
        failure = RankFailure(rank, "IntegrityError", text, identity.host, identity.pid, "durable")
        return [], save_error(self.request.step, go.attempt, {rank: failure}, self._group.world)

    def _sync_unclaimed(self, go: Go, unclaimed: list[str], acked: dict[int, list[FileEntry]]) -> SaveError | None:
        """Make them durable on every host, and count them in ``acked``. Then look again where rank 0 may be shown an old listing,
        so that no file is left out."""
        failures = self._unclaimed.sync(unclaimed, acked)
        if failures:
            return save_error(self.request.step, go.attempt, failures, self._group.world)
        late, problem = self._compare(go, acked) if self._unclaimed.shown_late else ([], None)
        if late and problem is None:
            error = OSError(errno.EIO, f"{late[0]} appeared after every rank had written and every host's files were synced")
            return save_error(self.request.step, go.attempt, {0: self._failure(error)}, self._group.world)
        return problem

    def _all_left(self, keys: list[str], hopeless: bool) -> bool:
        """Whether every writer has returned, so that the space may be given back at once; else the next begin does (S21)."""
        until = self._runtime.monotonic() + (0.0 if hopeless else _CAUSES)
        while not all(self._client.has(key) for key in keys):
            if self._runtime.monotonic() >= until:
                return False
            self._runtime.sleep(0.02)
        return True

    # -- the others ----------------------------------------------------------------------------------------------

    def _await_outcome(self, go: Go, outcome_key: str) -> Report:
        self._pulse.phase("waiting for the decision")
        if not self._call.await_rank0(self._decision, self._progress):
            raise self._unknown(go)
        decision = self._client.get([self._decision])[0]
        if decision.get("sync"):
            self._unclaimed.answer()
        elif decision.get(PREPARE):
            if self._parts is None or not self._parts.prepare():
                raise self._unknown(go)
        elif "aborted" in decision:
            return self._aborted(go, decision, outcome_key)
        self._pulse.phase("waiting for the commit")
        if not self._call.await_rank0(outcome_key, self._progress):
            raise self._unknown(go)
        return self._read(outcome_key)

    def _aborted(self, go: Go, decision: Report, outcome_key: str) -> Report:
        """An abort is final. Rank 0's list of causes is waited for briefly; rank 0 may itself still be writing."""
        first = decision.get("aborted")
        if first is None:
            if self._call.await_rank0(outcome_key, self._progress):
                return self._read(outcome_key)
            raise self._unknown(go)
        until = self._runtime.monotonic() + _CAUSES
        while self._runtime.monotonic() < until:
            if self._client.has(outcome_key):
                return self._read(outcome_key)
            self._runtime.sleep(0.01)
        failure = RankFailure(**first)
        raise save_error(self.request.step, go.attempt, {failure.rank: failure}, self._group.world)

    def _read(self, outcome_key: str) -> Report:
        verdict = self._client.get([outcome_key])[0]
        if "error" in verdict:
            raise from_wire(verdict["error"])
        return verdict

    def _unknown(self, go: Go) -> RankTimeout:
        beat = self._client.peek(beat_key(0))
        return RankTimeout(f"save of step {self.request.step} (attempt {go.attempt}): rank 0 stands still for "
                           f"{self._progress:g} s after this rank's ack; {describe({0: beat})}. The outcome is unknown: it is "
                           "settled at the next save or start", missing={0: beat}, phase=self._pulse.current_phase)

    # -- skip inside ``saving()`` --------------------------------------------------------------------------------

    def _discard(self, go: Go, failure: RankFailure | None, error: BaseException | None) -> Report:
        """The step was there already: what the block wrote all the same is thrown away, when all have left it."""
        report: Report = {"failure": asdict(failure)} if failure else {}

        def decide(reports: dict[int, Report]) -> Report:
            self._committer.discarded(go)
            failures = {r: RankFailure(**rep["failure"]) for r, rep in reports.items() if "failure" in rep}
            if failures:
                raise save_error(self.request.step, go.attempt, failures, self._group.world)
            return {"existing": go.existing}

        try:
            return self._call.round(report, decide, self._progress)
        except SaveError as raised:
            if error is None:
                raise
            raise raised from error
        finally:
            if self._parts is not None:
                self._parts.discard()


def _enter(reports: dict[int, Report]) -> Report:
    return {"enter": all(report["ready"] for report in reports.values())}


def _with_both(failure: RankFailure, directory: str, reports: dict[int, Report]) -> RankFailure:
    """A file that failed on one rank and is another rank's as well (it stood there already, or is not as this one wrote it): the
    failure names both."""
    if not failure.path:
        return failure
    name = os.path.relpath(failure.path, directory)
    for rank, report in reports.items():
        if rank != failure.rank and name in [*report.get("claimed", ()), *(entry[0] for entry in report.get("files", ()))]:
            both = both_wrote(name, *sorted((rank, failure.rank)))
            return replace(failure, message=both if failure.type == "FileExistsError" else f"{both} ({failure.message})")
    return failure


def _slowest(reports: dict[int, Report]) -> tuple[int, float]:
    """(rank, seconds) of the one that took longest to write its files and make them durable."""
    seconds = {rank: float(report.get("seconds", 0.0)) for rank, report in reports.items()}
    rank = max(seconds, key=lambda r: (seconds[r], -r))
    return rank, seconds[rank]


def _never(reports: dict[int, Report]) -> Report:
    raise AssertionError("only rank 0 decides")
