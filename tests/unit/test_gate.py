"""One step for all: S16, S17 and S18 of DESIGN section 12.

First the order of four accesses, in every interleaving; then the real gatekeeper, listeners, messengers and finalisers of
several ranks as threads over one store, with random skew.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from distckpt.background import Background, Job
from distckpt.coordination import gate as gate_module
from distckpt.coordination.gate import Act, Gate
from distckpt.coordination.listener import Caller, Listener
from distckpt.coordination.store import Client
from distckpt.durable import REAL
from distckpt.errors import (
    ConfigError,
    CoordinatorLost,
    DistckptError,
    RankDisagreement,
    RankFailure,
    RankLost,
    RankTimeout,
    SaveError,
    to_wire,
)
from distckpt.launch.signals import StopSignals
from distckpt.runtime import Identity, SystemRuntime
from distckpt.saving.handle import SaveHandle
from distckpt.steps import Schedule, Todo
from tests.interleavings import Deadlock, SteppedEvent, SteppedLock, Stepper, explore

# -- every interleaving of poll with the listener (S17) ----------------------------------------------------------------


class SteppedGate(Gate):
    """The gate, with a point of interleaving before each access that the two threads share."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._values: dict[str, Any] = {}
        super().__init__(SimpleNamespace(event=lambda: SteppedEvent(stepper), lock=lambda: SteppedLock(stepper)))  # type: ignore[arg-type]

    @property
    def flag(self) -> bool:
        self._stepper.pause()
        return bool(self._values["flag"])

    @flag.setter
    def flag(self, value: bool) -> None:
        self._stepper.pause()
        self._values["flag"] = value

    @property
    def place(self) -> tuple[int, Any]:
        if self._stepper.who == "listener":  # the training thread's reading of its own value is not shared
            self._stepper.pause()
        return self._values["place"]  # type: ignore[no-any-return]

    @place.setter
    def place(self, value: tuple[int, Any]) -> None:
        self._stepper.pause()
        self._values["place"] = value


class ReadsBeforeItCloses(SteppedGate):
    """A mutant: the listener reads the ordinal, then sets the flag."""

    def freeze(self) -> dict[str, Any]:
        with self._lock:
            ordinal, step = self.place
            self.flag = True
            self._open.clear()
        return {"ordinal": ordinal, "step": step, "closing": False}


class ReadsBeforeItIsClosed(SteppedGate):
    """A mutant: the flag is set, but the gate is still open when the ordinal is read."""

    def freeze(self) -> dict[str, Any]:
        with self._lock:
            self.flag = True
            ordinal, step = self.place
            self._open.clear()
        return {"ordinal": ordinal, "step": step, "closing": False}


def _poller(gate: Gate) -> Background:
    """The real ``poll``, without the threads around it."""
    found = Background.__new__(Background)
    found.gate, found.schedule = gate, Schedule(None, False)
    found.signals = SimpleNamespace(raised="")  # type: ignore[assignment]
    found._stop_reason, found._pending, found._posted_stop = "", None, False
    return found


def _late_poll(behind: Background, step: int) -> Todo:
    """A mutant: the flag is read before the ordinal is put up."""
    gate = behind.gate
    seen = gate.flag
    gate.place = (gate.place[0] + 1, step)
    if seen:
        return behind._attend(step)
    return Todo()


def _schedules(every: int | None) -> Callable[[str], Schedule]:
    one = Schedule(every, False)
    return lambda series: one


Poll = Callable[[Background, int], Todo]


def _interleave(other: int, before: int, *, polls: int = 3, kind: type[SteppedGate] = SteppedGate, poll: Poll = Background.poll,
                cancelled: bool = False) -> Counter[str]:
    """A freeze and an act against a training thread that goes on polling, from ordinal ``before``, in every interleaving;
    another rank answers ``other``. How often the act was met where it should be, and how often it lay beyond."""
    seen: Counter[str] = Counter()
    for stepper in explore():
        gate = kind(stepper)
        gate._values["place"] = (before, None)
        behind = _poller(gate)
        acted: list[int] = []
        agreed: list[int] = []

        def listen(gate: Gate = gate, agreed: list[int] = agreed, stepper: Stepper = stepper) -> None:
            if cancelled:
                gate.freeze()
                stepper.pause()
                gate.cancel()
            at = max(int(gate.freeze()["ordinal"]), other) + 1
            agreed.append(at)
            stepper.pause()  # the answer and the act travel; the lock is free meanwhile
            gate.act(at, Act("save", "asked"))

        def train(gate: Gate = gate, behind: Background = behind, acted: list[int] = acted) -> None:
            for step in range(polls):
                if poll(behind, step).save:
                    acted.append(gate._values["place"][0])  # type: ignore[attr-defined]

        stepper.run(train=train, listener=listen)
        last, at = gate._values["place"][0], agreed[0]
        assert last == before + polls
        expected = [at] if at <= last else []
        assert acted == expected, f"act at {at}, met at {acted}, by {stepper.picked}"
        seen["met" if expected else "beyond"] += 1
    return seen


@pytest.mark.parametrize(("other", "before"), [(0, 0), (1, 0), (2, 0), (0, 2), (3, 2), (4, 0)])
def test_s17_no_rank_is_past_the_agreed_boundary(other: int, before: int) -> None:
    """Ranks meet in one number only, the highest answer: so one rank against every answer of the others is all there is to
    two ranks and to three, with any skew between them."""
    seen = _interleave(other, before)
    assert seen["met"] > 50 or before + 3 <= other, seen


def test_s17_after_a_cancelled_freeze() -> None:
    assert _interleave(0, 0, polls=1, cancelled=True)["met"] > 20


@pytest.mark.parametrize("kind", [ReadsBeforeItCloses, ReadsBeforeItIsClosed])
def test_s17_the_listener_must_close_before_it_reads(kind: type[SteppedGate]) -> None:
    with pytest.raises(AssertionError, match="met at"):
        _interleave(0, 0, kind=kind)


def test_s17_poll_must_publish_before_it_reads() -> None:
    with pytest.raises(AssertionError, match="met at"):
        _interleave(0, 0, poll=_late_poll)


def test_s18_a_background_save_that_lost_the_store_says_so_at_the_next_poll() -> None:
    """Its client may be the only one that was cut off: the listener, with another one, knows of nothing."""
    behind = _poller(Gate(SystemRuntime()))
    job: Any = SimpleNamespace(handle=SimpleNamespace(fail=lambda error: None))
    behind._failed(job, CoordinatorLost("the store is gone"))
    with pytest.raises(CoordinatorLost, match="the store is gone"):
        behind.poll(1)


def test_the_explorer_takes_every_order_and_sees_a_deadlock() -> None:
    orders = []
    for stepper in explore():
        order: list[str] = []

        def go(name: str, stepper: Stepper = stepper, order: list[str] = order) -> None:
            for _ in range(2):
                order.append(name)
                stepper.pause()

        stepper.run(a=lambda: go("a"), b=lambda: go("b"))
        orders.append("".join(order))
    assert set(orders) == {"aabb", "abab", "abba", "baab", "baba", "bbaa"}
    for stepper in explore():
        event = SteppedEvent(stepper)
        with pytest.raises(Deadlock):
            stepper.run(a=lambda: event.wait())  # noqa: B023
        break


# -- the whole of it, ranks as threads ---------------------------------------------------------------------------------


class Mortal:
    """A store that can die under those who wait on it."""

    def __init__(self) -> None:
        self._inner: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.dead = False

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        until = time.monotonic() + timeout.total_seconds()
        while not self.dead:
            try:
                return self._inner.wait(keys, timedelta(seconds=0.02))  # type: ignore[no-any-return]
            except dist.DistStoreError:
                if time.monotonic() > until:
                    raise
        raise dist.DistNetworkError("connection reset by peer")

    def __getattr__(self, name: str) -> Any:
        if self.dead:
            raise dist.DistNetworkError("broken pipe")
        return getattr(self._inner, name)


class _Runtime(SystemRuntime):
    def __init__(self) -> None:
        self.dead: set[int] = set()

    def alive(self, other: Identity) -> bool | None:
        return other.pid not in self.dead


class Ranks:
    """``world`` ranks with the real gatekeeper, listeners, messengers and finalisers, and saves that end as the test says."""

    def __init__(self, world: int, *, store: Any = None, in_flight: str = "wait", tolerated: int = 0, limit: float = 20.0,
                 every: int | None = None) -> None:
        self.world, self.store = world, store if store is not None else dist.HashStore()  # type: ignore[attr-defined]
        self.runtime = _Runtime()
        self.connections = 0
        self.behind: list[Background] = []
        self.listeners: list[Listener] = []
        self.verdicts: dict[int, Callable[[int], DistckptError | None]] = {}
        identities = {rank: Identity("host", rank, "boot", "ns", str(rank)) for rank in range(world)}
        for rank in range(world):
            listener = Listener(self.source, rank, self.runtime)
            group: Any = SimpleNamespace(rank=rank, world=world, listener=listener, identities=identities,
                                         rounds=SimpleNamespace(caller=Caller(self.runtime)))
            self.listeners.append(listener)
            self.behind.append(Background(group, self.source, self.runtime, self._executor(rank), _schedules(every),
                                          StopSignals(()), tolerated, in_flight, None, lambda: None, limit))

    def source(self) -> Client:
        self.connections += 1
        return Client(self.store, "t/")

    def _executor(self, rank: int) -> Callable[[Job], None]:
        def execute(job: Job) -> None:
            error = self.verdicts[job.handle.number](rank)
            if error is not None:
                raise error
            job.handle.commit(job.handle.path, False)
        return execute

    def save(self, rank: int, step: int) -> SaveHandle | None:
        """As the manager does it: None when it is skipped."""
        behind = self.behind[rank]
        if not behind.admit(step):
            return None
        handle = SaveHandle(REAL, "", step, rank, self.world, ended=self.runtime.event(), number=behind.next_number())
        behind.submit(Job("main", step, lambda part: None, None, handle))  # type: ignore[arg-type, return-value]
        return handle

    def close(self, rank: int) -> None:
        self.behind[rank].last_boundary()
        self.behind[rank].wait(10)

    def tell(self, rank: int, act: Act) -> None:
        self.behind[rank]._messenger.tell(act)

    def run(self, target: Callable[[int], Any], timeout: float = 20.0, ranks: list[int] | None = None) -> list[Any]:
        """``target(rank)`` on every rank; what each gave."""
        chosen = list(range(self.world)) if ranks is None else ranks
        found: dict[int, Any] = {}

        def one(rank: int) -> None:
            try:
                found[rank] = target(rank)
            except BaseException as error:
                found[rank] = error
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in chosen]
        for thread in threads:
            thread.start()
        until = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.01))
        assert not any(t.is_alive() for t in threads), f"still running after {timeout} s: {set(chosen) - set(found)}"
        for value in found.values():
            if isinstance(value, AssertionError):
                raise value
        return [found[rank] for rank in chosen]

    def end(self) -> None:
        for behind in self.behind:
            behind.stop(5)
        for rank, listener in enumerate(self.listeners):
            if rank not in self.runtime.dead:
                listener.stop(self.source())
        threads = [t for b, li in zip(self.behind, self.listeners, strict=True)
                   for t in (b._messenger._thread, li._thread, *([b._gatekeeper._thread] if b._gatekeeper else []))]
        assert not [t for t in threads if t.is_alive()]


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(world: int, **options: Any) -> Ranks:
        made.append(Ranks(world, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A freeze waits for its answers a moment only."""
    monkeypatch.setattr(gate_module, "ANSWER", 0.3)
    monkeypatch.setattr(gate_module, "RETRY", 0.02)


def failure(step: int, bad: int) -> SaveError:
    text = f"save of step {step} failed on rank {bad}"
    return SaveError(text, step=step, attempt="a", background=False, outcome="aborted",
                     failures={bad: RankFailure(bad, "OSError", "No space left on device", "host", 1, "write")})


class Loose:
    """No rank may be more than ``lead`` steps ahead of the slowest: what pipelined collectives allow."""

    def __init__(self, world: int, lead: int) -> None:
        self._at, self._lead = [0] * world, lead
        self._moved = threading.Condition()

    def step(self, rank: int, step: int) -> None:
        with self._moved:
            self._at[rank] = step
            self._moved.notify_all()
            assert self._moved.wait_for(lambda: step - min(self._at) <= self._lead, 20), self._at


def _watch_attends(behind: Background) -> list[int]:
    """The boundaries at which ``poll`` left its fast path."""
    attends: list[int] = []
    attend = behind._attend

    def watched(step: int) -> Todo:
        attends.append(behind.gate.place[0])
        return attend(step)
    behind._attend = watched  # type: ignore[method-assign]
    return attends


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
        attends = _watch_attends(behind)
        seen: list[Any] = []
        ticks = 0
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
                assert ticks < 5000
            assert raised == 1
        assert len(attends) <= (lead + 3) * SAVES, "polls without news left the fast path"
        return seen

    seen = found.run(train)
    assert all(s == seen[0] for s in seen), f"seed {world_seed}: {seen}"
    assert [s[0] for s in seen[0]] == list(range(SAVES)) and all(s[4] for s in seen[0])
    assert _until(lambda: found.store.num_keys() == 1), "more keys are left than the counter of news"


def test_nothing_is_lost_while_nothing_fails(ranks: Callable[..., Ranks]) -> None:
    """With a save in flight that never ends, no poll leaves the fast path and no key is written."""
    found, hold = ranks(2), threading.Event()

    def verdict(rank: int) -> None:
        assert hold.wait(20)

    found.verdicts[1] = verdict
    keys = found.store.num_keys()

    def train(rank: int) -> list[int]:
        attends = _watch_attends(found.behind[rank])
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
    assert _until(lambda: found.connections == 5), "two listeners, two messengers, one gatekeeper"
    found.tell(1, Act("save", "asked"))
    found.verdicts[1] = lambda rank: failure(1, 1)
    seen = found.run(lambda rank: (found.save(rank, 1), _met(found, rank, 300))[1])
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


def _met(found: Ranks, rank: int, polls: int, pause: float = 0.0005, steps: Callable[[int], int] = lambda n: n) -> list[Any]:
    """What ``rank`` meets in so many polls: (ordinal, the error's type or the todo), without the empty ones."""
    behind, seen = found.behind[rank], []
    for n in range(polls):
        try:
            todo = behind.poll(steps(n))
            if todo.save or todo.stop:
                seen.append((behind.gate.place[0], todo.save, todo.stop, todo.reason))
        except DistckptError as error:
            seen.append((behind.gate.place[0], type(error).__name__, str(error)))
        time.sleep(pause)
    return seen


def test_s17_polls_every_tenth_step_on_one_rank(ranks: Callable[..., Ranks]) -> None:
    """Boundaries are counted: the rank that polls seldom acts at the same count, and a save there is a disagreement."""
    found = ranks(2)
    steps = [lambda n: n + 1, lambda n: (n + 1) * 10]

    def train(rank: int) -> list[Any]:
        if rank == 0:
            found.tell(0, Act("save", "asked"))
        return _met(found, rank, 300, steps=steps[rank])

    seen = found.run(train)
    assert len(seen[0]) == 1 and [s[0] for s in seen[0]] == [s[0] for s in seen[1]]


def test_s17_equal_counts_with_different_steps_are_a_disagreement_on_all(ranks: Callable[..., Ranks]) -> None:
    found, meet = ranks(3), threading.Barrier(3)
    told = threading.Event()

    def train(rank: int) -> list[Any]:
        for n in range(5):
            found.behind[rank].poll(n * 10 if rank == 2 else n)
        meet.wait(10)
        if rank == 1:
            found.tell(1, Act("stop", "SIGTERM on rank 1"))
        assert _until(lambda: found.behind[rank].gate.flag), "nothing was agreed"
        meet.wait(10)
        told.set()
        return _met(found, rank, 3)

    seen = found.run(train)
    assert seen[0] == seen[1] == seen[2] and [s[:2] for s in seen[0]] == [(6, "RankDisagreement")]
    assert "4 on ranks 0-1; 40 on rank 2" in seen[0][0][2]


def test_s17_the_step_goes_down_after_a_rollback(ranks: Callable[..., Ranks]) -> None:
    found = ranks(3)

    def train(rank: int) -> list[Any]:
        if rank == 2:
            found.tell(2, Act("stop", "SIGTERM on rank 2"))
        met = _met(found, rank, 200, pause=0.0003 * (rank + 1), steps=lambda n: (5000 + n) if n < 7 else 300 + n)
        return [s[0] for s in met][:1]

    seen = found.run(train)
    assert seen[0] == seen[1] == seen[2] != []


def _until(what: Callable[[], Any], timeout: float = 10.0) -> Any:
    until = time.monotonic() + timeout
    while not (value := what()):
        if time.monotonic() > until:
            return value
        time.sleep(0.001)
    return value


def test_s18_close_answers_freezes_and_both_hear_the_failure(ranks: Callable[..., Ranks]) -> None:
    """Rank 1 is in ``close`` when the save fails; rank 0 is before its last step: no hang, the same exception on both."""
    found, closing, failed = ranks(2), threading.Event(), threading.Event()

    def verdict(rank: int) -> DistckptError:
        assert closing.wait(10)
        return failure(7, 1)

    found.verdicts[1] = verdict

    def train(rank: int) -> tuple[str, str]:
        behind = found.behind[rank]
        for step in range(8):
            behind.poll(step)
        found.save(rank, 7)
        try:
            if rank == 1:
                behind.last_boundary()
                closing.set()
                assert behind.wait(10)
                failed.set()
            else:
                assert failed.wait(10) and _until(lambda: behind.gate.flag)
                behind.poll(8)
                behind.poll(9)
                behind.last_boundary()
                assert behind.wait(10)
            behind.face_unreported()
        except SaveError as error:
            return type(error).__name__, str(error)
        return "", ""

    seen = found.run(train)
    assert seen[0] == seen[1] == ("SaveError", "save of step 7 failed on rank 1")


def test_s18_with_a_rank_in_close_nothing_is_raised_before_the_others_close(ranks: Callable[..., Ranks]) -> None:
    """A rank with polls to come must not leave by an exception while another waits for it in its last round."""
    found = ranks(2)
    found.close(1)
    found.tell(0, Act("failed", data={"number": 1, "error": to_wire(failure(3, 1))}))
    found.tell(0, Act("stop", "SIGTERM"))
    assert _until(lambda: len(found.behind[0].gate._acts) == 2) and _met(found, 0, 50) == []


def test_s18_a_starved_listener_is_cancelled_and_asked_again(ranks: Callable[..., Ranks], impatient: None) -> None:
    found, starved = ranks(2), threading.Event()
    answer = found.listeners[1].handlers["freeze"]
    asked: list[int] = []

    def slow(client: Client, message: dict[str, Any]) -> None:
        asked.append(int(message["freeze"]))
        if len(asked) == 1:
            assert starved.wait(10)
        answer(client, message)

    found.listeners[1].handlers["freeze"] = slow
    stood: list[float] = []

    def train(rank: int) -> list[Any]:
        behind = found.behind[rank]
        seen = []
        if rank == 0:
            found.tell(0, Act("save", "asked"))
            assert _until(lambda: behind.gate.flag)
        for step in range(4000):
            begun = time.monotonic()
            if behind.poll(step).save:
                seen.append(behind.gate.place[0])
                break
            stood.append(time.monotonic() - begun)
            if rank == 0 and step == 3:
                starved.set()  # rank 0 got through its closed gate meanwhile: the freeze was cancelled
            time.sleep(0.001)
        return seen

    seen = found.run(train)
    assert seen[0] == seen[1] != [] and len(asked) >= 2 and asked == sorted(set(asked))
    assert 0.2 < max(stood) < 5, "rank 0 stood at its gate until the freeze was cancelled"
    assert _until(lambda: found.store.num_keys() == 1), "a cancelled freeze left answers behind"


def test_s18_news_at_once_queue_in_one_order(ranks: Callable[..., Ranks]) -> None:
    """Every rank tells something at once, a stop twice: all acts, each once, in one order, at the same boundaries."""
    found = ranks(3)

    def train(rank: int) -> list[Any]:
        found.tell(rank, Act("save", f"asked by {rank}"))
        if rank:
            found.tell(rank, Act("stop", "SIGTERM"))
        behind, seen = found.behind[rank], []
        for step in range(300):
            todo = behind.poll(step)
            if todo.save or todo.stop:
                seen.append((behind.gate.place[0], tuple(todo)))
            time.sleep(0.0004 * (rank + 1))
        return seen

    seen = found.run(train)
    assert seen[0] == seen[1] == seen[2]
    reasons = "; ".join(s[1][2] for s in seen[0])
    assert all(f"asked by {rank}" in reasons for rank in range(3))
    stops = [s for s in seen[0] if s[1][1]]
    assert stops and stops == seen[0][-len(stops):] and stops[-1][0] == 300, "a stop stays one"
    assert found.behind[0]._gatekeeper._freezes == 4, "three saves, and one stop"  # type: ignore[union-attr]
    assert _until(lambda: found.store.num_keys() == 1)


def test_s18_a_failure_goes_before_what_is_due_at_the_same_poll(ranks: Callable[..., Ranks]) -> None:
    found = ranks(1)
    behind = found.behind[0]
    behind.gate.act(2, Act("stop", "SIGTERM"))
    for number in (1, 2):
        behind.gate.act(2, Act("failed", data={"number": number, "error": to_wire(failure(number, 0))}))
    behind.gate.act(2, Act("save", "asked"))
    seen = _met(found, 0, 5)
    assert [s[:3] for s in seen] == [(2, "SaveError", "save of step 1 failed on rank 0"),
                                     (3, "SaveError", "save of step 2 failed on rank 0"), (4, True, True), (5, True, True)]
    assert seen[2][3] == "SIGTERM; asked"


@pytest.mark.parametrize("frozen", [False, True])
def test_s18_rank_0_dead_is_coordinator_lost_at_poll(frozen: bool, ranks: Callable[..., Ranks]) -> None:
    store = Mortal()
    found = ranks(2, store=store)
    behind = found.behind[1]
    behind.poll(0)
    if frozen:
        behind.gate.freeze()
    store.dead = True
    assert _until(lambda: behind.gate.lost is not None)
    for _ in range(2):  # and it stays so
        seen = found.run(lambda rank: behind.poll(1), timeout=5, ranks=[1])
        assert isinstance(seen[0], CoordinatorLost)
    behind.gate.cancel()
    assert isinstance(found.run(lambda rank: behind.poll(1), timeout=5, ranks=[1])[0], CoordinatorLost)


def test_a_gate_that_nobody_opens_is_an_error_in_the_end(ranks: Callable[..., Ranks]) -> None:
    """Rank 0 is stopped in the middle of a freeze: every wait has a deadline (P4)."""
    found = ranks(2, limit=0.2)
    found.behind[1].gate.freeze()
    seen = found.run(lambda rank: found.behind[1].poll(1), timeout=5, ranks=[1])
    assert isinstance(seen[0], RankTimeout) and list(seen[0].missing) == [0]
    found.behind[1].gate.cancel()
    assert found.behind[1].poll(2) == Todo()


@pytest.mark.parametrize("how", ["dead", "said goodbye"])
@pytest.mark.parametrize("news", ["save", "failed"])
def test_news_after_a_rank_has_left(how: str, news: str, ranks: Callable[..., Ranks], impatient: None) -> None:
    """The living agree without it: a failure stays one, anything else becomes RankLost; nobody stands at a gate for it."""
    found = ranks(3)
    found.listeners[1].stop(found.source())
    if how == "dead":
        found.runtime.dead.add(1)
    else:
        found.source().set("bye/1", {})
    data = {"number": 1, "error": to_wire(failure(3, 1))} if news == "failed" else {}
    found.tell(2, Act(news, "asked", data))
    seen = found.run(lambda rank: _met(found, rank, 700), ranks=[0, 2])
    assert seen[0] == seen[1] and [s[1] for s in seen[0]] == ["SaveError" if news == "failed" else "RankLost"]
    assert how == "dead" or found.behind[0]._gatekeeper._freezes == 2  # type: ignore[union-attr]
    found.runtime.dead.add(1)


def test_the_end_does_not_wait_for_an_answer_that_never_comes(ranks: Callable[..., Ranks]) -> None:
    found = ranks(2)
    found.listeners[1].stop(found.source())
    found.tell(0, Act("save", "asked"))
    assert _until(lambda: found.behind[0].gate.flag)
    begun = time.monotonic()
    found.behind[0].stop(5)
    assert time.monotonic() - begun < 2 and not found.behind[0]._gatekeeper._thread.is_alive()  # type: ignore[union-attr]
    found.runtime.dead.add(1)


def test_news_behind_a_number_that_was_taken_and_never_written(ranks: Callable[..., Ranks]) -> None:
    """A rank was killed, or stopped, between the two: the news behind it is heard, and so is its own when it comes after all."""
    found = ranks(2)
    client = found.source()
    number = client.ticket("news")
    found.tell(1, Act("save", "behind it"))
    assert _until(lambda: found.behind[0].gate.flag)
    seen = found.run(lambda rank: _met(found, rank, 300))
    assert [s[3] for s in seen[0]] == [s[3] for s in seen[1]] == ["behind it"]
    client.set(f"news/{number}", Act("save", "late").to_json())
    assert _until(lambda: found.behind[0].gate.flag)
    seen = found.run(lambda rank: _met(found, rank, 300))
    assert [s[3] for s in seen[0]] == [s[3] for s in seen[1]] == ["late"]
    assert _until(lambda: found.store.num_keys() == 1)


def test_an_answer_is_not_awaited_from_a_rank_that_died_while_it_was_asked(ranks: Callable[..., Ranks]) -> None:
    found = ranks(3)
    found.listeners[1].stop(found.source())
    begun = time.monotonic()
    found.tell(2, Act("save", "asked"))
    assert _until(lambda: found.behind[0].gate.flag)
    found.runtime.dead.add(1)
    seen = found.run(lambda rank: _met(found, rank, 700), ranks=[0, 2])
    assert seen[0] == seen[1] and [s[1] for s in seen[0]] == ["RankLost"]
    assert time.monotonic() - begun < gate_module.ANSWER


def test_a_failure_is_raised_though_rank_0_has_left_since(ranks: Callable[..., Ranks]) -> None:
    """Whoever raised it first may be gone, with the store; at this boundary it is still the same error."""
    store = Mortal()
    found = ranks(2, store=store)
    behind = found.behind[1]
    behind.gate.act(2, Act("failed", data={"number": 1, "error": to_wire(failure(1, 0))}))
    behind.gate.act(2, Act("stop", "SIGTERM"))
    store.dead = True
    assert _until(lambda: behind.gate.lost is not None)
    seen = found.run(lambda rank: [_raised(behind, step) for step in (1, 2, 3)], timeout=5, ranks=[1])
    assert seen[0] == ["CoordinatorLost", "SaveError", "CoordinatorLost"]


def _raised(behind: Background, step: int) -> str:
    try:
        behind.poll(step)
    except DistckptError as error:
        return type(error).__name__
    return ""


def test_news_that_cannot_be_understood_stops_nobody(ranks: Callable[..., Ranks]) -> None:
    """A gatekeeper or a listener that ends by an unforeseen error would leave all ranks at their gates."""
    found = ranks(2)
    client = found.source()
    for value in ({"no": "kind"}, {"kind": "failed"}, {"kind": "save", "data": 7}):
        client.set(f"news/{client.ticket('news')}", value)
    found.behind[0]._group.rounds.caller.send(client, 1, "act", {"at": "soon"})
    found.behind[0]._group.rounds.caller.send(client, 1, "freeze", {})
    found.tell(1, Act("save", "asked"))
    seen = found.run(lambda rank: _met(found, rank, 200))
    assert [s[:2] for s in seen[0]] == [s[:2] for s in seen[1]] and len(seen[0]) == 1


def test_a_step_that_is_no_number_stops_nobody(ranks: Callable[..., Ranks]) -> None:
    """``poll`` takes what it is given; the control plane carries JSON."""
    found = ranks(2)

    class Odd:
        def __mod__(self, other: int) -> int:
            return 1

    found.tell(1, Act("save", "asked"))
    seen = found.run(lambda rank: _met(found, rank, 200, steps=lambda n: Odd()))  # type: ignore[arg-type, return-value]
    assert seen[0] == seen[1] and len(seen[0]) == 1


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
        assert _until(lambda: behind.gate.flag)
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
    seen = _met(found, 0, 100)
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


def test_a_disagreement_is_not_raised_for_a_rank_that_closes(ranks: Callable[..., Ranks]) -> None:
    assert gate_module._different_steps({0: {"ordinal": 4, "step": 3, "closing": False},
                                         1: {"ordinal": 4, "step": None, "closing": True}}) is None
    error = gate_module._different_steps({0: {"ordinal": 4, "step": 3, "closing": False},
                                          1: {"ordinal": 4, "step": 5, "closing": False}})
    assert isinstance(error, RankDisagreement) and error.values == {0: 3, 1: 5}
    assert isinstance(gate_module._lost({2}), RankLost)
