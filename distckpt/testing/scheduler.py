"""Many threads of many processes in one: a seeded scheduler over greenlets, with a clock that jumps.

A simulated thread is a greenlet. It comes to a stop at every ``visit`` (an operation on a file, the store, an event, a lock,
a thread, the gate), and a ``Policy`` says who goes on. When nobody can, the clock jumps to the next deadline. So one seed is
one execution, byte for byte, and ten minutes of waiting take no time.
"""

from __future__ import annotations

import heapq
import operator
import random
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from greenlet import GreenletExit, getcurrent, greenlet

OUTSIDE = frozenset({"file", "store"})
"""Kinds of operation that others can see: at these a process is counted, and may be killed, stopped or slowed."""


class Gone(GreenletExit):  # type: ignore[misc]
    """Unwinds a thread whose process is no more; nothing that it still tries happens."""


class Task:
    """One simulated thread."""

    __slots__ = ("blocked", "daemon", "done", "glet", "name", "priority", "process", "ticket", "waiters", "woken")

    def __init__(self, process: Process, name: str, glet: Any, daemon: bool) -> None:
        self.process, self.name, self.glet, self.daemon = process, name, glet, daemon
        self.blocked = self.woken = self.done = False
        self.ticket = 0
        self.priority = 0.0
        self.waiters: list[Task] = []


class Process:
    """One simulated process: its threads, and how it ended. ``operations``: how many others could see so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: list[Task] = []
        self.main: Task | None = None
        self.alive = True
        self.killed = self.stopped = False
        self.code: int | None = None
        self.operations = 0
        self.due: dict[int, list[Callable[[], None]]] = {}
        self.delay = 0.0
        self.held: list[Task] = []
        self.value: Any = None
        self.error: BaseException | None = None
        self.at_end: list[Callable[[], None]] = []


class Policy(Protocol):
    """Who goes on. ``current`` is None when the one that ran cannot; ``ready`` is never empty, in the order of waking."""

    def choose(self, ready: list[Task], current: Task | None) -> Task: ...
    def born(self, task: Task) -> None: ...


_priority = operator.attrgetter("priority")


class Walk:
    """A random walk: at every point another one goes on with probability ``restless``."""

    def __init__(self, seed: int, restless: float) -> None:
        self._random = random.Random(seed).random
        self._restless = restless

    def born(self, task: Task) -> None:
        return None

    def choose(self, ready: list[Task], current: Task | None) -> Task:
        if current is not None and self._random() >= self._restless:
            return current
        return ready[int(self._random() * len(ready))]


class Priorities:
    """The one of highest random priority runs, until one of ``changes`` random points takes it away (PCT: a bug that needs
    d orderings is found with a known probability)."""

    def __init__(self, seed: int, changes: int, length: int) -> None:
        self._random = random.Random(seed)
        self._points = {self._random.randrange(length) for _ in range(changes)}
        self._step = 0

    def born(self, task: Task) -> None:
        task.priority = 1.0 + self._random.random()

    def choose(self, ready: list[Task], current: Task | None) -> Task:
        self._step += 1
        best = ready[0] if len(ready) == 1 else max(ready, key=_priority)
        if self._step in self._points:
            best.priority = -float(self._step)
            best = max(ready, key=_priority)
        return best


class Delays:
    """The one that runs goes on until it waits, then who was woken first; but at the points in ``delays`` the one that would
    go on is passed over, as many times as it says. ``width``: how many could have gone on, point by point."""

    def __init__(self, delays: Mapping[int, int]) -> None:
        self._delays = dict(delays)
        self.width: list[int] = []

    def born(self, task: Task) -> None:
        return None

    def choose(self, ready: list[Task], current: Task | None) -> Task:
        chosen = current if current is not None else ready[0]
        passed = self._delays.get(len(self.width))
        self.width.append(len(ready))
        if passed:
            chosen = ready[(ready.index(chosen) + passed) % len(ready)]
        return chosen


class Scheduler:
    """One execution. ``horizon``: seconds of its clock after which whoever still runs counts as hanging; ``limit``: the same
    in operations. ``trace`` holds every operation when ``traced``."""

    def __init__(self, policy: Policy, horizon: float = 900.0, limit: int = 400_000, traced: bool = False) -> None:
        self.policy, self.horizon, self.limit = policy, horizon, limit
        self.now = 1_000.0
        self.steps = self.total = 0
        self.due: dict[int, list[Callable[[], None]]] = {}
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.died: list[str] = []
        self.trace: list[str] | None = [] if traced else None
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Any, int]] = []
        self._count = 0
        self._hub: Any = None
        self._over = False
        self._disposing = False

    # -- what a simulated thread does --------------------------------------------------------------------------------

    def visit(self, kind: str, op: str, what: str = "") -> None:
        """A point at which others may go first. Nothing, outside of all simulated threads."""
        task = self.current
        if self._disposing:
            raise Gone
        if task is None:
            return
        self.steps += 1
        process = task.process
        if kind in OUTSIDE:
            self._count_operation(process)
        if self.trace is not None:
            self.trace.append(f"{self.now:.3f} {process.name}/{task.name} {kind} {op} {what}")
        if self.steps > self.limit:
            self._leave()
        chosen = self.policy.choose(self._ready, task)
        if chosen is not task:
            self.current = chosen
            chosen.glet.switch()
            if self._disposing:
                raise Gone

    def _count_operation(self, process: Process) -> None:
        process.operations += 1
        self.total += 1
        if process.operations in process.due or self.total in self.due:
            for strike in (*process.due.pop(process.operations, ()), *self.due.pop(self.total, ())):
                strike()
        if not process.alive:
            self._leave()
        if process.stopped:
            self._switch()
        if process.delay:
            self.block(self.now + process.delay)

    def block(self, deadline: float | None) -> bool:
        """Wait until woken (True) or until ``deadline`` (False; None: for ever)."""
        if self._disposing:
            raise Gone
        task = self.current
        if task is None:
            raise RuntimeError("waits outside of all simulated threads: nobody could ever end it")
        self._ready.remove(task)
        task.blocked, task.woken = True, False
        task.ticket += 1
        if deadline is not None:
            self._at(deadline, task, task.ticket)
        self._switch()
        return task.woken

    def wake(self, task: Task, woken: bool = True) -> None:
        if not task.blocked or not task.process.alive:
            return
        task.blocked, task.woken = False, woken
        task.ticket += 1
        (task.process.held if task.process.stopped else self._ready).append(task)

    def at(self, delay: float, what: Callable[[], None]) -> None:
        """Do ``what`` after ``delay`` seconds."""
        self._at(self.now + delay, what, 0)

    def _at(self, deadline: float, what: Any, ticket: int) -> None:
        self._count += 1
        heapq.heappush(self._timers, (deadline, self._count, what, ticket))

    def _switch(self) -> None:
        """Let another one run; comes back when this one is chosen again."""
        chosen = self._next()
        if chosen is None:
            self._leave()
        else:
            task, self.current = self.current, chosen
            if chosen is not task:
                chosen.glet.switch()
        if self._disposing:
            raise Gone

    def _leave(self) -> None:
        """Back to ``run``; comes back only to be unwound."""
        self._hub.switch()
        raise Gone

    def _next(self) -> Task | None:
        """Who runs now; the clock jumps when nobody can. None at the end, however it came."""
        while not self._ready:
            if not self._timers or self.steps > self.limit:
                return None
            deadline, _, what, ticket = heapq.heappop(self._timers)
            if isinstance(what, Task) and (what.ticket != ticket or not what.process.alive):
                continue
            if deadline > self.horizon + 1_000.0:
                return None
            self.now = max(self.now, deadline)
            if isinstance(what, Task):
                self.wake(what, woken=False)
            else:
                what()
        return self.policy.choose(self._ready, None)

    # -- processes and their threads ---------------------------------------------------------------------------------

    def spawn(self, process: Process, name: str, target: Callable[[], Any], daemon: bool = True) -> Task:
        def body() -> None:
            try:
                result = target()
                if task is process.main:
                    process.value = result
            except GreenletExit:
                return
            except BaseException as error:  # filed: what a thread dies of is a finding, and must not end the scheduler
                if task is process.main:
                    process.error = error
                else:
                    self.died.append(f"thread {name} of {process.name} died of {type(error).__name__}: {error}")
            if not self._disposing:  # code that ends well whatever interrupts it (``together``) is not unwound, and is no more
                self._end(task)

        task = Task(process, name, greenlet(body, self._hub), daemon)
        if not process.tasks:
            process.main = task
        process.tasks.append(task)
        self.policy.born(task)
        self._ready.append(task)
        return task

    def _end(self, task: Task) -> None:
        task.done = True
        self._ready.remove(task)
        for waiter in task.waiters:
            self.wake(waiter)
        process = task.process
        main = process.main
        if main is not None and main.done and all(t.done or t.daemon for t in process.tasks):
            process.code = process.code if process.code is not None else int(process.error is not None)
            self.bury(process)

    def bury(self, process: Process) -> None:
        """The process is no more: its threads never go on, and who depends on it learns."""
        if not process.alive:
            return
        process.alive = False
        self._ready = [task for task in self._ready if task.process is not process]
        process.held = []
        for what in process.at_end:
            what()

    def kill(self, process: Process) -> None:
        process.killed = process.alive or process.killed
        self.bury(process)

    def stop(self, process: Process, seconds: float | None) -> None:
        """As SIGSTOP; SIGCONT after ``seconds`` (None: never)."""
        if process.stopped or not process.alive:
            return
        process.stopped = True
        process.held = [task for task in self._ready if task.process is process]
        self._ready = [task for task in self._ready if task.process is not process]
        if seconds is not None:
            self.at(seconds, lambda: self.go_on(process))

    def go_on(self, process: Process) -> None:
        process.stopped = False
        if process.alive:
            self._ready += process.held
        process.held = []

    def exit(self, code: int) -> None:
        """End the process of the current thread at once."""
        task = self.current
        assert task is not None
        task.process.code = code
        self.bury(task.process)
        self._leave()

    # -- the whole ---------------------------------------------------------------------------------------------------

    def run(self, start: Callable[[], None]) -> list[str]:
        """``start`` spawns the first threads; the names of processes that did not end."""
        self._hub = getcurrent()
        start()
        while True:
            task = self._next() if any(p.alive and not (p.stopped and not self._timers) for p in self.processes) else None
            if task is None:
                break
            self.current = task
            task.glet.switch()
            self.current = None
            if self.steps > self.limit:
                break
        self.current = None
        return [process.name for process in self.processes if process.alive and not process.stopped]

    def stacks(self) -> str:
        """Where every thread of every process that still lives stands."""
        parts = []
        for process in self.processes:
            for task in process.tasks if process.alive else ():
                frame = task.glet.gr_frame
                if not task.done and frame is not None:
                    parts.append(f"--- {process.name}/{task.name}\n" + "".join(traceback.format_stack(frame)[-8:]))
        return "\n".join(parts)

    def dispose(self) -> None:
        """Unwind every thread that is left. Nothing that their handlers try has any effect."""
        self._disposing = True
        for process in self.processes:
            process.alive = False
            for task in process.tasks:
                if task.glet:
                    task.glet.throw(Gone)
        self._disposing = False
