"""The one exchange everything is made of: every rank reports, rank 0 decides, every rank gets the verdict.

Safety, in short. One key per rank and round, taken from absent and never added to, so that a retried or late report
cannot count twice (S19); keys carry the call's number and the attempt, so that a message of a dead attempt is never
mistaken for a live one. The verdict's key is taken by compare-and-set as well: a rank that gives up takes it first, and
then nobody can decide otherwise. A call's keys go when all reports of the *next* call are in: then every rank has read
them. Each rank deletes its own, for rank 0 alone would spend more time on that than on the save (tests/unit/test_rounds.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from distckpt.coordination.listener import Caller
from distckpt.coordination.pulse import Pulse, Watch, beat_key, describe
from distckpt.coordination.store import Client
from distckpt.errors import (
    CoordinationError,
    CoordinatorLost,
    DistckptError,
    RankDisagreement,
    RankLost,
    RankTimeout,
    from_wire,
    to_wire,
)
from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

_LOOK = 30.0
_QUARTERS = 4
"""How often a rank looks, within its deadline, at the heart of the rank 0 it waits for."""

Report = dict[str, Any]
Decide = Callable[[dict[int, Report]], Report]


class Rounds:
    """The collective calls of one group of ranks, in the order in which every rank makes them. One thread's."""

    def __init__(self, client: Client, rank: int, world: int, runtime: Runtime, pulse: Pulse,
                 caller: Caller | None = None) -> None:
        self.client, self.rank, self.world = client, rank, world
        self.runtime, self.pulse = runtime, pulse
        self.caller = caller or Caller(runtime)
        self.on_stacks: Callable[[dict[int, str]], None] = lambda stacks: None
        self._number, self._pid = 0, os.getpid()
        self._old_keys: dict[str, None] = {}
        self._keys: dict[str, None] = {}

    @contextmanager
    def call(self, op: str, step: int | None = None) -> Iterator[Call]:
        """One collective call; every rank must make it, in the same order."""
        self._number += 1
        self.pulse.enter(self._number, op, step)
        try:
            yield Call(self, self._number, op, step)
        finally:
            if os.getpid() == self._pid:  # not in a child that was forked inside the call
                self._old_keys.update(self._keys)
                self._keys = {}
                self.pulse.leave(self.client)

    def used(self, key: str) -> None:
        """Note a key of the current call, for this rank to delete in time."""
        self._keys[key] = None

    def forget_old(self) -> None:
        """Delete this rank's keys of earlier calls, once all reports of the present one are in."""
        if self._old_keys:
            self.client.delete(list(self._old_keys))
            self._old_keys = {}


class Call:
    """One collective call, made of rounds."""

    def __init__(self, rounds: Rounds, number: int, op: str, step: int | None) -> None:
        self.rounds, self.number, self.op, self.step = rounds, number, op, step
        self._turn = 0
        self._complete = False

    def key(self, *parts: object, by: int = 0) -> str:
        """A key of this call that rank ``by`` writes, and will delete."""
        key = self._key(parts)
        if by == self.rounds.rank:
            self.rounds.used(key)
        return key

    def keys(self, who: Iterable[int], *parts: object) -> dict[int, str]:
        """A key of this call for each rank of ``who``, which it writes, and will delete."""
        stem = self._key(parts)  # once: rank 0 has one to make for every rank
        keys = {rank: f"{stem}/{rank}" for rank in who}
        if self.rounds.rank in keys:
            self.rounds.used(keys[self.rounds.rank])
        return keys

    def _key(self, parts: Iterable[object]) -> str:
        return "/".join(["call", str(self.number), *map(str, parts)])

    @property
    def what(self) -> str:
        return f"{self.op}" + (f" of step {self.step}" if self.step is not None else "")

    def round(self, report: Report, decide: Decide, timeout: float, progress: bool = False) -> Report:
        """The verdict, the same on every rank; if it is an error, every rank raises that.

        ``decide`` runs on rank 0 with the reports by rank. ``timeout``: seconds until a rank that does not come is named in a
        RankTimeout on every rank that did; with ``progress`` (not in the first round of a call) counted from its last new
        bytes, rank 0's as well. Rounds are numbered and not named, so that ranks in different calls meet and disagree at once.
        """
        rounds = self.rounds
        self._turn += 1
        who = range(rounds.world) if rounds.rank == 0 else (0, rounds.rank)
        keys = self.keys(who, self._turn, "report")
        verdict_key = self.key(self._turn, "verdict")
        rounds.client.claim(keys[rounds.rank], {**report, "op": self.op})
        if rounds.rank == 0:
            return self._lead(keys, verdict_key, decide, timeout, progress)
        # With progress, rank 0 is known to be in this call, by the round before, and may be longer at its own part than others.
        return self._follow(verdict_key, None if progress else keys[0], timeout)

    def refuse(self, error: DistckptError, timeout: float) -> NoReturn:
        """Answer the coming round with an error of this rank's own: every rank raises it, and nobody waits for this one."""
        if self.rounds.world > 1:
            try:
                self.round({"refused": to_wire(error)}, _undecided, timeout)
            except DistckptError as told:
                raise told from error
        raise error

    # -- rank 0 --------------------------------------------------------------------------------------------------

    def gather(self, keys: dict[int, str], timeout: float, progress: bool = False, abort: str | None = None,
               ) -> tuple[dict[int, Report], Watch]:
        """All reports, or what there is when the pulse ended the wait; ``watch`` says why it did. Rank 0 only."""
        rounds = self.rounds
        watch = Watch(keys, self.what, timeout, progress, abort)
        rounds.pulse.watch(watch)
        try:
            while not rounds.client.wait(list(keys.values()), _LOOK):
                if rounds.pulse.lost is not None:
                    raise rounds.pulse.lost
                if not rounds.pulse.running:
                    raise CoordinationError(f"{self.what}: the manager was closed while it waited")
        finally:
            rounds.pulse.watch(None)
        found = rounds.client.get(list(keys.values()))
        reports = {rank: value for rank, value in zip(keys, found, strict=True) if not value.get("filled")}
        self._complete = self._complete or len(reports) == len(keys)
        return reports, watch

    def absence(self, watch: Watch, phase: str) -> RankTimeout:
        """The error that names who is missing, where, and in which phase each was last seen."""
        missing: dict[int, Any] = {r: watch.beats.get(r) for r in watch.absent()}
        for rank in watch.absent():
            missing[rank] = missing[rank] or self.rounds.client.peek(beat_key(rank))
            if self._complete and (missing[rank] or {}).get("call") != self.number:
                # it reported in this call, but its heart has not beaten since: what it last said of itself is older
                missing[rank] = {**(missing[rank] or {}), "phase": f"{phase} (no word since it began)", "step": self.step}
            identity = self.rounds.pulse.identities.get(rank)
            if identity is not None:
                missing[rank] = {"host": identity.host, "pid": identity.pid, **(missing[rank] or {"phase": "never"})}
        if watch.lost or watch.left:
            how = "the process has ended" if watch.lost else "it has left its manager, by an exception or by close,"
            return RankLost(f"{self.what}: {describe(missing)} - {how} while rank 0 waited in phase "
                            f"{phase!r}; its own log says why. The other ranks are fine; restart the job to resume",
                            missing=missing, phase=phase)
        return RankTimeout(f"{self.what}: no word for {watch.timeout:g} s in phase {phase!r} from {describe(missing)}; every "
                           "rank must make this call. Their stacks are in the journal if they still answer; a longer "
                           "deadline is Timeouts(arrive=..., progress=...)", missing=missing, phase=phase)

    def ask_for_stacks(self, watch: Watch) -> None:
        stacks = self.rounds.caller.stacks(self.rounds.client, [r for r in watch.absent() if r != 0 and r not in watch.lost])
        if stacks:
            self.rounds.on_stacks(stacks)

    def _lead(self, keys: dict[int, str], verdict_key: str, decide: Decide, timeout: float, progress: bool) -> Report:
        watch: Watch | None = None
        try:
            reports, watch = self.gather(keys, timeout, progress)
            if watch.absent():
                raise self.absence(watch, self.rounds.pulse.current_phase)
            ops = {rank: str(report.get("op")) for rank, report in reports.items()}
            if len(set(ops.values())) > 1:
                raise RankDisagreement(f"ranks made different calls at the same time: {by_value(ops)}; every rank must call "
                                       "the manager's methods in the same order", values=ops)
            standing = self.rounds.client.peek(verdict_key)
            if standing is not None:  # somebody gave up on this rank; what is decided now would reach nobody
                raise from_wire(standing["error"])
            refused = {rank: report["refused"] for rank, report in reports.items() if "refused" in report}
            if refused:
                raise self._refused(refused)
            verdict = decide(reports)
        except DistckptError as error:
            self._announce(verdict_key, {"error": to_wire(error)})
            if watch is not None and watch.absent():
                self.ask_for_stacks(watch)
            raise
        except Exception as error:  # whatever fails here must not strand the others, and all raise the same (P4)
            told = self._no_decision(error)
            self._announce(verdict_key, {"error": to_wire(told)})
            raise told from error
        except BaseException as error:  # an interrupt is this process's own
            self._announce(verdict_key, {"error": to_wire(self._no_decision(error))})
            raise
        return self._announce(verdict_key, verdict)

    def _no_decision(self, error: BaseException) -> CoordinationError:
        return CoordinationError(f"{self.what}: rank 0 could not decide: {type(error).__name__}: {error}; see rank 0's log")

    def _refused(self, refused: dict[int, Report]) -> DistckptError:
        rank = min(refused)
        error = from_wire(refused[rank])
        error.message = f"{self.what}: rank {rank} cannot take part: {error.message}"
        return error

    def _announce(self, key: str, verdict: Report) -> Report:
        standing = self.rounds.client.claim(key, {**verdict, "by": 0, "all": self._complete})
        if self._complete:
            self.rounds.forget_old()
        if standing.get("by") != 0:
            raise from_wire(standing["error"])
        return verdict

    # -- the others ----------------------------------------------------------------------------------------------

    def _follow(self, key: str, arrived: str | None, timeout: float) -> Report:
        rounds = self.rounds
        if not self.await_rank0(key, timeout, arrived):
            beat = rounds.client.peek(beat_key(0))
            error = RankTimeout(f"{self.what}: rank 0 did not come within {timeout:g} s; rank {rounds.rank} gave up. "
                                f"{describe({0: beat})}; every rank must make this call", missing={0: beat},
                                phase=rounds.pulse.current_phase)
            rounds.client.claim(key, {"error": to_wire(error), "by": rounds.rank})
        verdict = rounds.client.get([key])[0]
        if verdict.get("all"):
            try:
                rounds.forget_old()
            except CoordinatorLost as error:  # a courtesy must not hide how the round ended
                log.debug("rank %d leaves its old keys: %s", rounds.rank, error)
        if "error" in verdict:
            raise from_wire(verdict["error"])
        return verdict

    def await_rank0(self, key: str, timeout: float, arrived: str | None = None) -> bool:
        """Whether ``key`` came. The deadline runs only while rank 0 is elsewhere or its heartbeat stands still (S4), so one
        that has stopped is given up on after its deadline and the quarter in which it was first looked at.

        ``arrived``: a key that shows that rank 0 is in this round; None when it is known to be. A heartbeat would not do:
        a rank 0 that came last has sent none yet, and would be blamed for the one that it waits for as well.
        """
        client = self.rounds.client
        before: Any = None
        still = 0
        while not client.wait([key], timeout / _QUARTERS):
            beat = client.peek(beat_key(0)) or {}
            now = (beat.get("call"), beat.get("moves"))
            elsewhere = arrived is not None and not client.has(arrived)
            still = still + 1 if elsewhere or now == before else 0
            if still == _QUARTERS:
                return client.has(key)
            before = now
        return True


def _undecided(reports: dict[int, Report]) -> Report:
    raise AssertionError("a refused round has no verdict")


def by_value(values: dict[int, Any], limit: int = 6) -> str:
    """``{0: 5, 1: 5, 2: 6}`` as "5 on ranks 0-1; 6 on rank 2"."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(repr(values[rank]), []).append(rank)
    parts = []
    for text, ranks in list(groups.items())[:limit]:
        if len(ranks) == 1:
            where = f"rank {ranks[0]}"
        elif ranks == list(range(ranks[0], ranks[-1] + 1)):
            where = f"ranks {ranks[0]}-{ranks[-1]}"
        else:
            where = "ranks " + ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
        parts.append(f"{text} on {where}")
    return "; ".join(parts)


def require_same(reports: dict[int, Report], names: dict[str, str], what: str) -> None:
    """RankDisagreement unless all ``reports`` agree on every field of ``names`` (field: how people call it)."""
    for field, label in names.items():
        said = [report.get(field) for report in reports.values()]
        if said.count(said[0]) != len(said):
            values = {rank: report.get(field) for rank, report in reports.items()}
            raise RankDisagreement(f"{what}: ranks disagree on {label}: {by_value(values)}; every rank must pass the same",
                                   values=values)
