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
from dataclasses import asdict
from functools import partial
from typing import Any

from distckpt.coordination.group import Group
from distckpt.coordination.pulse import Watch, beat_key, describe
from distckpt.coordination.rounds import Call, Report
from distckpt.durable import Files
from distckpt.errors import DistckptError, RankFailure, RankLost, RankTimeout, SaveError, from_wire, to_wire
from distckpt.layout import Layout
from distckpt.marker import FileEntry
from distckpt.ordered import walk
from distckpt.patience import PASSING, Patience
from distckpt.runtime import Runtime
from distckpt.saving.files import PeerFailed, RankFiles, make_durable
from distckpt.saving.terms import Go, Request, save_error

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
    """One attempt, from begin to the verdict, on one rank. ``committer`` is there on rank 0 only."""

    def __init__(self, call: Call, group: Group, files: Files, layout: Layout, runtime: Runtime, request: Request,
                 committer: Any, *, algorithm: str | None, arrive: float, progress: float, patience: Patience) -> None:
        self._call, self._group, self._files, self._layout, self._runtime = call, group, files, layout, runtime
        self.request, self._committer = request, committer
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
        try:
            verdict = self._call.round({
                **report, "step": self.request.step, "series": self.request.series, "on_exists": self.request.on_exists,
                "collective": self.request.collective, "free": self._free()}, decide, self._arrive)
        except BaseException as error:
            if self._committer is not None:
                self._committer.never_began(self.request.step, error)
            raise
        go = self.go = Go(**verdict["go"])
        if go.existing is not None and not go.discard:
            return None
        self._directory = self._layout.staging(go.generation, go.attempt, go.name)
        self._decision = self._call.key(go.attempt, "decision")
        self._pulse.phase("waiting to see the staging directory")
        handle = RankFiles(self._files, self._directory, self._group.rank, self._group.world, algorithm=self._algorithm,
                           aborted=lambda: self._client.has(self._decision), skipped=go.discard, patience=self._patience)
        self._pulse.probe(handle.written_bytes)
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
        if error is None:
            self._pulse.phase("fsync")
            try:
                entries = files.finish()
            except OSError as raised:
                error = raised
        if isinstance(error, PeerFailed):
            report: Report = {"stopped": asdict(self._failure(error.__cause__ or error))}
        elif error is not None:
            failure = self._failure(error)
            if failure.disk_full:
                _let_go(error)
            report = {"failure": asdict(failure)}
            self._client.claim(self._decision, {"aborted": asdict(failure)})
        else:
            report = {"files": [[e.path, e.size, e.digest] for e in entries], "notes": files.notes,
                      "open": files.open_ended, "seconds": round(self._runtime.monotonic() - self._writing, 6)}
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
        keys = {rank: self._call.key(go.attempt, "ack", rank) for rank in range(self._group.world)}
        outcome_key = self._call.key(go.attempt, "outcome")
        left_keys = {rank: self._call.name(go.attempt, "left", rank) for rank in keys}
        standing = self._client.claim(keys[self._group.rank], {**report, "rank": self._group.rank})
        if standing.get("filled"):
            self._client.set(left_keys[self._group.rank], {})
        if self._group.rank != 0:
            return self._await_outcome(go, outcome_key, failed="failure" in report)
        reports, watch = self._call.gather(keys, self._progress, progress=True, abort=self._decision)
        return self._lead(go, reports, watch, outcome_key, left_keys)

    # -- rank 0 --------------------------------------------------------------------------------------------------

    def _lead(self, go: Go, reports: dict[int, Report], watch: Watch, outcome_key: str,
              left_keys: dict[int, str]) -> Report:
        absence = self._call.absence(watch, "write") if watch.absent() else None
        try:
            problem: DistckptError | None = self._problem(go, reports, absence)
            acked: dict[int, list[FileEntry]] = {}
            unclaimed: list[str] = []
            if problem is None:
                acked = {rank: [FileEntry(p, s, d, rank) for p, s, d in report["files"]] for rank, report in reports.items()}
                unclaimed, problem = self._compare(go, acked)
            listed = problem is None and (bool(unclaimed) or self._may_hide(reports))
            if problem is None and not self._fix("sync" if listed else "committing"):
                problem = self._problem(go, reports, absence)
            elif problem is None and listed:
                problem = self._sync_unclaimed(go, unclaimed, acked)
            if problem is None:
                self._pulse.phase("commit")
                verdict: Report = self._committer.commit(go, acked, {r: rep.get("notes", {}) for r, rep in reports.items()},
                                                         _slowest(reports))
            else:
                self._client.claim(self._decision, {"aborted": None})
                raise problem
        except DistckptError as error:
            if not (isinstance(error, SaveError) and error.outcome == "unknown"):
                self._client.set(outcome_key, {"error": to_wire(error)})
                still = [self._call.rounds.used(left_keys[r]) for r in left_keys if r not in reports and r not in watch.lost]
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
        self._committer.after_commit(go)
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
        failures = {r: self._with_needs(f) for r, f in failures.items()}
        return save_error(self.request.step, go.attempt, failures, self._group.world)

    def _with_needs(self, failure: RankFailure) -> RankFailure:
        if not failure.disk_full or failure.needed is not None:
            return failure
        return RankFailure(**{**asdict(failure), "needed": self._committer.needed(self.request.series)})

    def _compare(self, go: Go, acked: dict[int, list[FileEntry]]) -> tuple[list[str], SaveError | None]:
        """Files on disk that nobody acked; and an error when the acks are not what stands there."""
        try:
            unclaimed, complaint = self._committer.compare(go, acked, self._patience)
        except OSError as error:
            return [], save_error(self.request.step, go.attempt, {0: self._failure(error)}, self._group.world)
        if complaint is None:
            return unclaimed, None
        rank, text = complaint
        identity = self._group.identities[rank]
        failure = RankFailure(rank, "IntegrityError", text, identity.host, identity.pid, "durable")
        return [], save_error(self.request.step, go.attempt, {rank: failure}, self._group.world)

    def _all_left(self, keys: list[str], hopeless: bool) -> bool:
        """Whether every writer has returned, so that the space may be given back at once; else the next begin does (S21)."""
        until = self._runtime.monotonic() + (0.0 if hopeless else _CAUSES)
        while not all(self._client.has(key) for key in keys):
            if self._runtime.monotonic() >= until:
                return False
            self._runtime.sleep(0.02)
        return True

    # -- files that a framework wrote under its own names --------------------------------------------------------

    def _may_hide(self, reports: dict[int, Report]) -> bool:
        """Whether another host may have written files that nobody claims and that rank 0 is not shown yet."""
        return bool(self._patience.seconds) and len(self._group.leaders) > 1 and any(r.get("open") for r in reports.values())

    def _sync_unclaimed(self, go: Go, unclaimed: list[str], acked: dict[int, list[FileEntry]]) -> SaveError | None:
        """One more round: the first rank of every host fsyncs every unclaimed file, now that all writers have returned;
        rank 0 alone could not flush another host's pages (S20). Each also tells of what it sees and rank 0 did not; then rank 0
        looks again, so that no file is left out because it was shown an old listing."""
        keys = {rank: self._call.key(go.attempt, "synced", rank) for rank in self._group.leaders}
        others = [e.path for entries in acked.values() for e in entries] if self._patience.seconds and len(keys) > 1 else None
        self._client.set(self._call.key(go.attempt, "unclaimed"), {"files": unclaimed, "known": others})
        self._client.claim(keys[0], self._sync_here(unclaimed, 0))
        reports, watch = self._call.gather(keys, self._progress, progress=True)
        failures = {r: RankFailure(**rep["failure"]) for r, rep in reports.items() if "failure" in rep}
        if failures or len(reports) < len(keys):
            if not failures:
                raise self._call.absence(watch, "fsync of framework files")
            return save_error(self.request.step, go.attempt, failures, self._group.world)
        sizes: dict[str, tuple[int, int]] = {}
        digests: dict[str, str] = {}
        for rank, report in reports.items():
            for path, size, text in report["files"]:
                known = sizes.setdefault(path, (size, rank))
                if known[0] != size:
                    raise save_error(self.request.step, go.attempt, {rank: self._failure(OSError(
                        5, f"{path} has {size} bytes on rank {rank}'s host and {known[0]} on rank {known[1]}'s"))},
                        self._group.world)
                if text is not None:
                    digests[path] = text
        acked[0] = acked[0] + [FileEntry(p, size, digests.get(p), rank) for p, (size, rank) in sizes.items()]
        late, problem = self._compare(go, acked) if others is not None else ([], None)
        if late and problem is None:
            return save_error(self.request.step, go.attempt, {0: self._failure(OSError(
                errno.EIO, f"{late[0]} appeared after every rank had written and every host's files were synced"))},
                self._group.world)
        return problem

    def _sync_here(self, unclaimed: list[str], position: int, known: list[str] | None = None) -> Report:
        """Fsync all of them; digest this leader's share. ``known``: files that are acked, where others count as unclaimed too."""
        self._pulse.phase("fsync of framework files")
        count = len(self._group.leaders)
        found = []
        try:
            extra = self._unknown_here({*unclaimed, *known}) if known is not None else []
            for index, path in enumerate([*unclaimed, *extra]):
                algorithm = self._algorithm if index % count == position or path in extra else None
                # rank 0 has seen it; to open it is what makes this host ask for its size as well
                self._patience.again(partial(self._files.read, os.path.join(self._directory, path), 0))
                entry = make_durable(self._files, self._directory, path, self._group.rank, algorithm)
                found.append([entry.path, entry.size, entry.digest])
            for folder in sorted({os.path.dirname(path) for path in [*unclaimed, *extra]}):
                self._files.fsync_dir(os.path.join(self._directory, folder))
        except OSError as error:
            return {"failure": asdict(self._failure(error))}
        return {"files": found}

    def _unknown_here(self, known: set[str]) -> list[str]:
        """Regular files that this host sees in the attempt beside the ``known`` ones."""
        return [path for path, item in walk(self._files, self._directory) if item.kind == "file" and path not in known]

    # -- the others ----------------------------------------------------------------------------------------------

    def _await_outcome(self, go: Go, outcome_key: str, failed: bool) -> Report:
        self._pulse.phase("waiting for the decision")
        if not self._call.await_rank0(self._decision, self._progress):
            raise self._unknown(go)
        decision = self._client.get([self._decision])[0]
        if decision.get("sync"):
            key = self._call.key(go.attempt, "unclaimed")
            if self._group.leads_host and self._call.await_rank0(key, self._progress):
                told = self._client.get([key])[0]
                report = self._sync_here(told["files"], self._group.leaders.index(self._group.rank), told["known"])
                self._client.claim(self._call.key(go.attempt, "synced", self._group.rank), report)
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


def _enter(reports: dict[int, Report]) -> Report:
    return {"enter": all(report["ready"] for report in reports.values())}


def _slowest(reports: dict[int, Report]) -> tuple[int, float]:
    """(rank, seconds) of the one that took longest to write its files and make them durable."""
    seconds = {rank: float(report.get("seconds", 0.0)) for rank, report in reports.items()}
    rank = max(seconds, key=lambda r: (seconds[r], -r))
    return rank, seconds[rank]


def _never(reports: dict[int, Report]) -> Report:
    raise AssertionError("only rank 0 decides")
