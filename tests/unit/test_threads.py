"""The threads that wait to be woken: whichever way three of their steps interfere with ours, nothing that they were given is
lost, and one that was told to end has ended.

A wake that comes a step too early, or is cleared a step too late, is lost once in a million times on a real machine.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distckpt.afterwards import Afterwards
from distckpt.background import _Messenger
from distckpt.coordination.gate import Act, news_key
from distckpt.coordination.store import Client
from distckpt.janitor import Janitor
from distckpt.layout import Layout
from distckpt.leases import Watch
from distckpt.ownership import BEAT, Ownership
from distckpt.rootdir import make_root
from distckpt.runtime import Event, Identity
from distckpt.saving.finaliser import Finaliser
from distckpt.testing.explore import Delayed, schedules
from distckpt.testing.scheduler import Delays, Process, Scheduler
from distckpt.testing.simruntime import SimClient, SimEvent, SimRuntime, SimStore
from tests.support import ROOT, crash_disk

BOUND = 3
SECONDS = 10.0


class _Overtaken(SimEvent):
    """Whoever is woken may go on before the one that woke it does."""

    def set(self) -> None:
        super().set()
        self._scheduler.visit("event", "was set")


class Machine(SimRuntime):
    """The runtime of a program of one process, and what its threads stand at."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        super().__init__(scheduler, process, Identity("host", 1, "boot", "pid:[1]", "1"), set(), 0)

    def event(self) -> Event:
        return _Overtaken(self._scheduler)

    def step(self) -> None:
        """A point at which others may go first, inside what a thread does."""
        self.visit("thread", "step")

    def client(self, store: SimStore) -> Client:
        return Client(SimClient(store, self._scheduler), "")

    def still_there(self) -> list[str]:
        return [task.name for task in self._process.tasks[1:] if not task.done]


def every_schedule(program: Callable[[Machine], None]) -> int:
    """Run ``program`` in every schedule with at most ``BOUND`` delays, each to its end; how many there were."""
    count = 0

    def run(delays: Delayed) -> list[int]:
        nonlocal count
        count += 1
        policy = Delays(delays)
        scheduler = Scheduler(policy, horizon=60.0, limit=5_000)
        process = Process("one")
        scheduler.processes = [process]
        machine = Machine(scheduler, process)
        try:
            hung = scheduler.run(lambda: scheduler.spawn(process, "main", lambda: program(machine)) and None)
            stacks = scheduler.stacks()
        finally:
            scheduler.dispose()
        if process.error is not None:
            raise AssertionError(f"with the delays {dict(delays)}: {process.error}") from process.error
        assert not hung and not scheduler.died, f"with the delays {dict(delays)}: {scheduler.died} {stacks}"
        return policy.width

    for _ in schedules(BOUND, run):
        pass
    return count


class Done:
    """What a thread has done, and a wait for so much of it that gets no help from whoever waits."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.items: list[Any] = []

    def __call__(self, item: Any) -> None:
        self._machine.step()
        self.items.append(item)

    def reach(self, count: int) -> None:
        until = self._machine.monotonic() + SECONDS
        while len(self.items) < count:
            self._machine.sleep(1.0)
            assert self._machine.monotonic() < until, f"nobody does what comes after {self.items}"


def afterwards(machine: Machine) -> None:
    done = Done(machine)
    after = Afterwards(machine, machine.lock())
    for number in (1, 2):
        after.add(lambda number=number: done(number))  # type: ignore[misc]
    done.reach(2)
    after.add(lambda: done(3))
    after.stop(SECONDS)
    assert done.items == [1, 2, 3] and not machine.still_there(), (done.items, machine.still_there())


def finaliser(machine: Machine) -> None:
    done = Done(machine)
    one: Finaliser[int] = Finaliser(machine, machine.lifeline(), done, lambda: done("orphaned"), SECONDS)
    for number in (1, 2):
        one.submit(number)
        assert one.wait(SECONDS)
        assert done.items[-1] == number
    one.submit(3)
    one.stop(SECONDS)
    assert done.items == [1, 2, 3] and not machine.still_there(), (done.items, machine.still_there())


def messenger(machine: Machine) -> None:
    store = SimStore()
    here = machine.client(store)
    one = _Messenger(lambda: machine.client(store), machine, None, None)
    for number in (1, 2):
        one.tell(Act("save", str(number)))
        assert here.wait([news_key(number - 1)], SECONDS), "nobody has heard of it"
    one.tell(Act("save", "3"))
    one.stop(SECONDS)
    told = [value["reason"] for value in here.get([news_key(number) for number in range(3)])]
    assert told == ["1", "2", "3"] and not machine.still_there(), (told, machine.still_there())


def janitor(machine: Machine) -> None:
    files, layout, done = crash_disk(), Layout.at(ROOT), Done(machine)
    one = Janitor(files, layout, machine, 1, cast(Watch, SimpleNamespace()))
    one._delete = done  # type: ignore[method-assign]
    one.delete(["1"])
    assert one.wait(SECONDS) and done.items == ["1"]
    one.delete(["2"])
    done.reach(2)
    one.delete(["3", "4"])
    one.stop(SECONDS)
    assert done.items == ["1", "2", "3", "4"] and not machine.still_there(), (done.items, machine.still_there())


def owner(machine: Machine) -> None:
    """A beat that comes after the release would stand where the next writer looks for signs of life; this one is under way."""
    files, layout, wrote = crash_disk(), Layout.at(ROOT), list[str]()
    make_root(files, layout, machine)
    one = Ownership.claim(files, layout, machine, 0, lambda text: None)

    def before(op: str, path: str) -> None:
        machine.sleep(1.0 if path.endswith(".beat") else 0.0)
        wrote.append(f"{op} {path}")

    files.before_op = before
    machine.sleep(BEAT)
    one.release()
    files.before_op = None
    beats, released = ([n for n, what in enumerate(wrote) if what.endswith(end)] for end in (".beat", ".released"))
    assert released and max(beats, default=0) <= min(released) and not machine.still_there(), (wrote, machine.still_there())


@pytest.mark.parametrize("program, count", [(afterwards, 500), (finaliser, 5000), (messenger, 1000), (janitor, 1500), (owner, 5)])
def test_nothing_that_a_thread_was_given_is_lost_and_it_ends_when_it_is_told_to(
        program: Callable[[Machine], None], count: int) -> None:
    assert every_schedule(program) >= count
