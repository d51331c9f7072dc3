"""One step for all: S16, S17 and S18 of DESIGN section 12.

First the order of four accesses, in every interleaving; then the real gatekeeper, listeners, messengers and finalisers of
several ranks as threads over one store, with random skew.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from distckpt.background import Background
from distckpt.coordination import gate as gate_module
from distckpt.coordination.gate import Act, Gate
from distckpt.coordination.store import Client
from distckpt.errors import CoordinatorLost, DistckptError, RankDisagreement, RankLost, RankTimeout, SaveError, to_wire
from distckpt.runtime import SystemRuntime
from distckpt.steps import Schedule, Todo
from tests import gated
from tests.gated import Mortal, Ranks, failure, met, until
from tests.interleavings import Deadlock, SteppedEvent, SteppedLock, Stepper, explore

ranks, impatient = gated.ranks, gated.impatient

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


def test_s17_polls_every_tenth_step_on_one_rank(ranks: Callable[..., Ranks]) -> None:
    """Boundaries are counted: the rank that polls seldom acts at the same count, and a save there is a disagreement."""
    found = ranks(2)
    steps = [lambda n: n + 1, lambda n: (n + 1) * 10]

    def train(rank: int) -> list[Any]:
        if rank == 0:
            found.tell(0, Act("save", "asked"))
        return met(found, rank, 300, steps=steps[rank], enough=1)

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
        assert until(lambda: found.behind[rank].gate.flag), "nothing was agreed"
        meet.wait(10)
        told.set()
        return met(found, rank, 3)

    seen = found.run(train)
    assert seen[0] == seen[1] == seen[2] and [s[:2] for s in seen[0]] == [(6, "RankDisagreement")]
    assert "4 on ranks 0-1; 40 on rank 2" in seen[0][0][2]


def test_s17_the_step_goes_down_after_a_rollback(ranks: Callable[..., Ranks]) -> None:
    found = ranks(3)

    def train(rank: int) -> list[Any]:
        if rank == 2:
            found.tell(2, Act("stop", "SIGTERM on rank 2"))
        acts = met(found, rank, 200, pause=0.0003 * (rank + 1), steps=lambda n: (5000 + n) if n < 7 else 300 + n, enough=1)
        return [s[0] for s in acts][:1]

    seen = found.run(train)
    assert seen[0] == seen[1] == seen[2] != []


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
                assert failed.wait(10) and until(lambda: behind.gate.flag)
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
    assert until(lambda: len(found.behind[0].gate._acts) == 2) and met(found, 0, 50) == []


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
            assert until(lambda: behind.gate.flag)
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
    assert until(lambda: found.store.num_keys() == 1), "a cancelled freeze left answers behind"


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
    assert until(lambda: found.store.num_keys() == 1)


def test_s18_a_failure_goes_before_what_is_due_at_the_same_poll(ranks: Callable[..., Ranks]) -> None:
    found = ranks(1)
    behind = found.behind[0]
    behind.gate.act(2, Act("stop", "SIGTERM"))
    for number in (1, 2):
        behind.gate.act(2, Act("failed", data={"number": number, "error": to_wire(failure(number, 0))}))
    behind.gate.act(2, Act("save", "asked"))
    seen = met(found, 0, 5)
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
    assert until(lambda: behind.gate.lost is not None)
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
    seen = found.run(lambda rank: met(found, rank, 700, enough=1), ranks=[0, 2])
    assert seen[0] == seen[1] and [s[1] for s in seen[0]] == ["SaveError" if news == "failed" else "RankLost"]
    assert how == "dead" or found.behind[0]._gatekeeper._freezes == 2  # type: ignore[union-attr]
    found.runtime.dead.add(1)


def test_the_end_does_not_wait_for_an_answer_that_never_comes(ranks: Callable[..., Ranks]) -> None:
    found = ranks(2)
    found.listeners[1].stop(found.source())
    found.tell(0, Act("save", "asked"))
    assert until(lambda: found.behind[0].gate.flag)
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
    assert until(lambda: found.behind[0].gate.flag)
    seen = found.run(lambda rank: met(found, rank, 300, enough=1))
    assert [s[3] for s in seen[0]] == [s[3] for s in seen[1]] == ["behind it"]
    client.set(f"news/{number}", Act("save", "late").to_json())
    assert until(lambda: found.behind[0].gate.flag)
    seen = found.run(lambda rank: met(found, rank, 300, enough=1))
    assert [s[3] for s in seen[0]] == [s[3] for s in seen[1]] == ["late"]
    assert until(lambda: found.store.num_keys() == 1)


def test_an_answer_is_not_awaited_from_a_rank_that_died_while_it_was_asked(ranks: Callable[..., Ranks]) -> None:
    found = ranks(3)
    found.listeners[1].stop(found.source())
    begun = time.monotonic()
    found.tell(2, Act("save", "asked"))
    assert until(lambda: found.behind[0].gate.flag)
    found.runtime.dead.add(1)
    seen = found.run(lambda rank: met(found, rank, 700, enough=1), ranks=[0, 2])
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
    assert until(lambda: behind.gate.lost is not None)
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
    seen = found.run(lambda rank: met(found, rank, 200, enough=1))
    assert [s[:2] for s in seen[0]] == [s[:2] for s in seen[1]] and len(seen[0]) == 1


def test_a_step_that_is_no_number_stops_nobody(ranks: Callable[..., Ranks]) -> None:
    """``poll`` takes what it is given; the control plane carries JSON."""
    found = ranks(2)

    class Odd:
        def __mod__(self, other: int) -> int:
            return 1

    found.tell(1, Act("save", "asked"))
    seen = found.run(lambda rank: met(found, rank, 200, steps=lambda n: Odd(), enough=1))  # type: ignore[arg-type, return-value]
    assert seen[0] == seen[1] and len(seen[0]) == 1


def test_a_disagreement_is_not_raised_for_a_rank_that_closes(ranks: Callable[..., Ranks]) -> None:
    assert gate_module._different_steps({0: {"ordinal": 4, "step": 3, "closing": False},
                                         1: {"ordinal": 4, "step": None, "closing": True}}) is None
    error = gate_module._different_steps({0: {"ordinal": 4, "step": 3, "closing": False},
                                          1: {"ordinal": 4, "step": 5, "closing": False}})
    assert isinstance(error, RankDisagreement) and error.values == {0: 3, 1: 5}
    assert isinstance(gate_module._lost({2}), RankLost)
