"""Every interleaving of a few threads, one after the other: a small stateless model checker.

The threads run the code under test and come to a stop at each ``pause``; the driver lets one of them go on at a time.
``explore`` runs the same start again and again until every order of the pauses was taken once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any


class Abandoned(BaseException):
    """Ends a thread whose run is over."""


class Deadlock(AssertionError):
    """Nobody can go on."""


class _Task:
    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.done = False
        self.error: BaseException | None = None


class Stepper:
    """One run. ``choices`` says who goes on at each point, by index among those that can; 0 beyond its end."""

    def __init__(self, choices: list[int]) -> None:
        self._choices = choices
        self._back = threading.Semaphore(0)
        self._here = threading.local()
        self._abandon = False
        self.trace: list[tuple[int, int]] = []

    @property
    def who(self) -> str:
        """The name of the task that runs; empty outside of all."""
        task = getattr(self._here, "task", None)
        return task.name if task is not None else ""

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """The others may go first; goes on when ``ready``. Nothing, outside of all tasks."""
        task = getattr(self._here, "task", None)
        if task is None:
            return
        task.ready = ready
        self._back.release()
        task.go.acquire()
        if self._abandon:
            raise Abandoned
        task.ready = lambda: True

    def run(self, **targets: Callable[[], Any]) -> None:
        """All ``targets`` to their end; Deadlock, or the first error of one."""
        tasks = [_Task(name) for name in targets]
        threads = [threading.Thread(target=self._run, args=(task, targets[task.name]), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
            self._back.acquire()
        try:
            while not all(task.done for task in tasks):
                able = [task for task in tasks if not task.done and task.ready()]
                if not able:
                    raise Deadlock(f"{[task.name for task in tasks if not task.done]} wait for ever after {self.picked}")
                at = len(self.trace)
                pick = self._choices[at] if at < len(self._choices) else 0
                self.trace.append((pick, len(able)))
                able[pick].go.release()
                self._back.acquire()
        finally:
            self._abandon = True
            for task in tasks:
                task.go.release()
            for thread in threads:
                thread.join(10)
        for task in tasks:
            if task.error is not None:
                raise task.error

    @property
    def picked(self) -> list[int]:
        return [pick for pick, _ in self.trace]

    def _run(self, task: _Task, target: Callable[[], Any]) -> None:
        self._here.task = task
        try:
            self.pause()
            target()
        except Abandoned:
            return
        except BaseException as error:
            task.error = error
        task.done = True
        self._back.release()


def explore(limit: int = 100_000) -> Iterator[Stepper]:
    """A Stepper for every interleaving; the body of the loop runs it."""
    choices: list[int] = []
    for _ in range(limit):
        stepper = Stepper(choices)
        yield stepper
        trace = stepper.trace
        while trace and trace[-1][0] + 1 == trace[-1][1]:
            trace.pop()
        if not trace:
            return
        choices = [*[pick for pick, _ in trace[:-1]], trace[-1][0] + 1]
    raise AssertionError(f"more than {limit} interleavings")


class SteppedEvent:
    """An event whose changes are points of an interleaving. Waiting is one only when it blocks."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper, self._flag = stepper, False

    def set(self) -> None:
        self._stepper.pause()
        self._flag = True

    def clear(self) -> None:
        self._stepper.pause()
        self._flag = False

    def is_set(self) -> bool:
        return self._flag

    def wait(self, timeout: float | None = None) -> bool:
        if not self._flag:
            self._stepper.pause(lambda: self._flag)
        return True


class SteppedLock:
    """A lock that a paused task may hold. Taking it is a point of an interleaving only when it blocks."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper, self._held = stepper, False

    def __enter__(self) -> None:
        if self._held:
            self._stepper.pause(lambda: not self._held)
        self._held = True

    def __exit__(self, *exc: Any) -> None:
        self._held = False
