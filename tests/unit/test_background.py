"""Background saves of several ranks, as threads over one store, with random skew: failures, each raised once at one step for all;
which save is in flight (S16 of DESIGN section 12); writers that die.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from distckpt.background import Job
from distckpt.coordination.gate import Act
from distckpt.errors import ConfigError, DistckptError, RankTimeout, SaveError
from distckpt.steps import Todo
from tests import gated
from tests.gated import Loose, Ranks, failure, met, until, watch_attends

ranks = gated.ranks

SAVES = 10
STEPS = 12


@pytest.mark.parametrize("world_seed", range(50))
def test_a_failure_is_raised_at_the_same_poll_once(world_seed: int, ranks: Callable[..., Ranks]) -> None:
    """500 failing saves: random failing rank, world, skew and lead; polls that repeat a step, and steps that go back."""
    dice = random.Random(world_seed)
    world, lead = dice.choice([2, 2, 3, 4]), dice.randrange(1, 6)
    found = ranks(world)
    pace = Loose(world, lead)
    bad = [dice.randrange(world) for _ in range(SAVES)]
    pause = [dice.choice([0.0, 0.0, 0.0003, 0.001]) for _ in range(world)]
    late = {(n, r): dice.choice([0.0, 0.0, 0.001, 0.003]) for n in range(SAVES) for r in range(world)}
    cause = {n: OSError(28, f"of save {n}") for n in range(SAVES)}

    def verdict(number: int) -> Callable[[int], DistckptError]:
        def on(rank: int) -> DistckptError:
            time.sleep(late[number, rank])
            error = failure(number, bad[number])
            if rank == bad[number]:
                error.__cause__ = cause[number]
            return error
        return on

    found.verdicts = {n + 1: verdict(n) for n in range(SAVES)}

    def train(rank: int) -> list[Any]:
        behind = found.behind[rank]
        attends = watch_attends(behind)
        seen: list[Any] = []
        ticks, end = 0, time.monotonic() + 60.0
        for save in range(SAVES):
            found.save(rank, save)
            raised, step = 0, 0
            while raised == 0 or step < STEPS:
                ticks += 1
                pace.step(rank, ticks)
                if pause[rank]:
                    time.sleep(pause[rank])
                before = behind.gate.place[0]
                try:
                    behind.poll(step)
                except SaveError as error:
                    raised += 1
                    seen.append((save, behind.gate.place[0], step, str(error), error.background))
                    assert rank != bad[save] or error.__cause__ is cause[save], f"rank {rank} lost its own cause"
                    step = min(step, STEPS - 3)
                assert behind.gate.place[0] == before + 1
                step += 1
                assert time.monotonic() < end, "a failure that is never raised"
            assert raised == 1
        assert len(attends) <= (lead + 3) * SAVES, "polls without news left the fast path"
        return seen

    seen = found.run(train)
    assert all(s == seen[0] for s in seen), f"seed {world_seed}: {seen}"
    assert [s[0] for s in seen[0]] == list(range(SAVES)) and all(s[4] for s in seen[0])
    assert until(lambda: found.store.num_keys() == 1), "more keys are left than the counter of news"


def test_nothing_is_lost_while_nothing_fails(ranks: Callable[..., Ranks]) -> None:
    """With a save in flight that never ends, no poll leaves the fast path and no key is written."""
    found, hold = ranks(2), threading.Event()

    def verdict(rank: int) -> None:
        assert hold.wait(20)

    found.verdicts[1] = verdict
    keys = found.store.num_keys()

    def train(rank: int) -> list[int]:
        attends = watch_attends(found.behind[rank])
        found.save(rank, 1)
        for step in range(2000):
            assert found.behind[rank].poll(step) == Todo()
        return attends
    try:
        assert found.run(train) == [[], []]
        assert found.store.num_keys() == keys
        assert not found.behind[0].wait(0) and not found.behind[1].wait(0)
    finally:
        hold.set()


def test_news_opens_no_connection(ranks: Callable[..., Ranks]) -> None:
    """TCPStore's server resolves the name of who connects, and answers nobody meanwhile: not in the middle of a freeze."""
    found = ranks(2)
    assert until(lambda: found.connections == 5), "two listeners, two messengers, one gatekeeper"
    found.tell(1, Act("save", "asked"))
    found.verdicts[1] = lambda rank: failure(1, 1)
    seen = found.run(lambda rank: (found.save(rank, 1), met(found, rank, 300, enough=2))[1])
    assert seen[0] == seen[1] and len(seen[0]) == 2 and found.connections == 5


def test_poll_does_not_wait_for_a_finalisation_that_still_runs(ranks: Callable[..., Ranks]) -> None:
    """Rank 2's own writer hangs when rank 1's failure is announced: rank 2 raises at the same poll all the same."""
    found, hold = ranks(3), threading.Event()

    def verdict(rank: int) -> DistckptError:
        if rank == 2:
            assert hold.wait(20)
        return failure(5, 1)

    found.verdicts[1] = verdict

    waits: list[float | None] = []

    def train(rank: int) -> Any:
        found.save(rank, 5)
        if rank == 2:
            inner = found.behind[2]._finaliser.wait
            found.behind[2]._finaliser.wait = lambda timeout: waits.append(timeout) or inner(timeout)  # type: ignore[method-assign]
        for step in range(100_000):
            try:
                found.behind[rank].poll(step)
            except SaveError as error:
                return step, str(error), found.behind[rank].wait(0)
            time.sleep(0.0005)
        raise AssertionError("never raised")
    try:
        seen = found.run(train)
        assert waits == [0], "poll waited for it"
        assert len({s[:2] for s in seen}) == 1 and [s[2] for s in seen] == [True, True, False]
    finally:
        hold.set()
    assert found.behind[2].wait(5)
    found.behind[2].face_unreported()  # raised once: what its own finaliser learns later is the same news


def test_a_rank_whose_own_save_ended_otherwise_tells_too(ranks: Callable[..., Ranks]) -> None:
    """Rank 1 gave up on rank 0 and knows a failure that rank 0 does not: it is still one poll for all."""
    found = ranks(2)
    found.verdicts[1] = lambda rank: RankTimeout("rank 0 did not come", missing={0: None}, phase="begin") if rank else None

    def train(rank: int) -> Any:
        found.save(rank, 5)
        for step in range(100_000):
            try:
                found.behind[rank].poll(step)
            except RankTimeout as error:
                return step, str(error)
            time.sleep(0.0005)
        raise AssertionError("never raised")

    seen = found.run(train)
    assert seen[0] == seen[1]


# -- saves in flight (S16) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["skip", "error"])
@pytest.mark.parametrize("seed", range(15))
def test_s16_a_second_save_is_decided_alike(rule: str, seed: int, ranks: Callable[..., Ranks]) -> None:
    """Ranks learn of an end at moments of their own; what a second save does is the same on all, whatever ``done()`` says."""
    dice = random.Random(seed)
    world = dice.choice([2, 3])
    found = ranks(world, in_flight=rule)
    pace = Loose(world, dice.randrange(1, 4))
    late = {(n, r): dice.choice([0.0, 0.002, 0.01]) for n in range(1, 400) for r in range(world)}
    fails = {n: dice.random() < 0.3 for n in range(1, 400)}
    differed: list[bool] = []

    def verdict(number: int) -> Callable[[int], DistckptError | None]:
        def on(rank: int) -> DistckptError | None:
            time.sleep(late[number, rank])
            return failure(number, 0) if fails[number] else None
        return on

    found.verdicts = {n: verdict(n) for n in range(1, 400)}

    def train(rank: int) -> list[Any]:
        behind, seen, handle = found.behind[rank], [], None
        for step in range(150):
            pace.step(rank, step)
            time.sleep(0.0004)
            try:
                behind.poll(step)
                if handle is not None and step % 3 == 0:
                    differed.append(handle.done())
                if step % 3 == 0:
                    made = found.save(rank, step)
                    handle = made or handle
                    seen.append((step, made is not None))
            except SaveError as error:
                seen.append((step, str(error)))
        return seen

    seen = found.run(train)
    assert all(s == seen[0] for s in seen), f"seed {seed}"
    assert {s[1] for s in seen[0]} & {True} and len({s[1] for s in seen[0]}) > 1, "both answers were given"
    assert set(differed) == {True, False}


@pytest.mark.parametrize("rule", ["skip", "error"])
def test_s16_without_poll_only_wait_is_allowed(rule: str, ranks: Callable[..., Ranks]) -> None:
    found = ranks(1, in_flight=rule)
    with pytest.raises(ConfigError, match=r"needs poll\(step\)"):
        found.save(0, 1)
    waiting = ranks(1)
    waiting.verdicts = {1: lambda rank: None, 2: lambda rank: None}
    assert waiting.save(0, 1) and waiting.save(0, 2)


def test_s16_waiting_with_a_timeout_decides_nothing(ranks: Callable[..., Ranks]) -> None:
    """``wait(timeout)`` may say yes here and no there: it must leave the save in flight, and its failure, to a boundary."""
    found, hold = ranks(2, in_flight="skip"), threading.Event()

    def verdict(rank: int) -> DistckptError | None:
        assert rank == 0 or hold.wait(10)
        return None

    found.verdicts = {1: verdict, 2: lambda rank: None}
    meet = threading.Barrier(2)

    def train(rank: int) -> list[Any]:
        behind = found.behind[rank]
        behind.poll(0)
        found.save(rank, 0)
        waited = behind.wait(0.2)
        second = found.save(rank, 1) is not None
        meet.wait(10)
        hold.set()
        assert until(lambda: behind.gate.flag)
        behind.poll(2)
        return [waited, second, found.save(rank, 2) is not None]

    assert found.run(train) == [[True, False, True], [False, False, True]]


# -- a finaliser that dies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ZeroDivisionError("1/0"), GeneratorExit()])
def test_whatever_a_writer_raises_is_filed_and_the_next_save_works(error: BaseException, ranks: Callable[..., Ranks]) -> None:
    found = ranks(1)

    def verdict(rank: int) -> DistckptError:
        raise error

    found.verdicts = {1: verdict, 2: lambda rank: None}
    first = found.save(0, 1)
    assert first is not None and found.behind[0].wait(5) and first.done()
    seen = met(found, 0, 100, enough=1)
    assert [s[1] for s in seen] == ["SaveError"] and type(error).__name__ in seen[0][2]
    assert isinstance(first.exception(), SaveError) and first.exception().__cause__ is error  # type: ignore[union-attr]
    second = found.save(0, 2)
    assert second is not None and found.behind[0].wait(5) and second.done() and second.exception() is None


def test_a_finaliser_thread_that_died_is_a_failure_and_no_hang(ranks: Callable[..., Ranks]) -> None:
    found = ranks(1)
    behind = found.behind[0]
    found.verdicts = {n: lambda rank: None for n in (1, 2, 3)}
    assert found.save(0, 1) is not None and behind.wait(5)
    finaliser = behind._finaliser
    assert finaliser is not None

    class Dies(BaseException):
        pass

    def die(job: Job) -> None:
        raise Dies

    finaliser._execute = die
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        lost = found.save(0, 2)
        assert lost is not None and behind.wait(5)
    finally:
        threading.excepthook = hook
    with pytest.raises(SaveError, match="has died"):
        found.save(0, 3)
    assert lost.done() and lost.exception() is not None
    last = found.save(0, 3)
    assert last is not None and behind.wait(5) and last.done() and last.exception() is None


def test_tolerated_failures_are_counted_alike_and_then_raised(ranks: Callable[..., Ranks]) -> None:
    found = ranks(2, tolerated=2)
    outcomes = [True, False, True, True, True, False]  # fails?
    ends: list[Callable[[int], DistckptError | None]] = [lambda rank: None, lambda rank: failure(1, 1)]
    found.verdicts = {n + 1: ends[bad] for n, bad in enumerate(outcomes)}

    def train(rank: int) -> list[Any]:
        seen = []
        for n in range(len(outcomes)):
            found.save(rank, n)
            found.behind[rank].wait(5)
            try:
                for _ in range(60):
                    found.behind[rank].poll(n)
                    time.sleep(0.001)
            except SaveError:
                seen.append((n, "raised"))
            seen.append((n, found.behind[rank].failures_in_a_row))
        return seen

    seen = found.run(train)
    assert seen[0] == seen[1] == [(0, 1), (1, 0), (2, 1), (3, 2), (4, "raised"), (4, 0), (5, 0)]
