"""A machine whose time passes only when somebody waits: no test sleeps, and 90 s take no time.

For single-threaded tests. Several runtimes may share one ``VirtualClock`` and with it one set of living processes,
as two hosts, two containers or two runs of one job do. A thread is recorded and not started: the test runs it where
it wants it to run.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from distckpt.runtime import Event, Identity, Lock, Runtime, Thread


class Parked(BaseException):
    """Takes a thread off the processor when its waits are used up (see ``VirtualThread.run``)."""


class VirtualClock:
    """Seconds that only ``sleep`` moves, and who lives at the moment."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now
        self.living: set[Identity] = set()


class VirtualEvent:
    """``wait`` lets the clock run. Without a timeout, nobody can end it: a thread is idle then and taken off, and
    anywhere else it is an error of the test."""

    def __init__(self, runtime: VirtualRuntime) -> None:
        self._runtime = runtime
        self._flag = False

    def set(self) -> None:
        self._flag = True

    def clear(self) -> None:
        self._flag = False

    def is_set(self) -> bool:
        return self._flag

    def wait(self, timeout: float | None = None) -> bool:
        if self._flag:
            return True
        self._runtime.use_wait()
        if timeout is None:
            if self._runtime.in_thread:
                raise Parked
            raise RuntimeError("waits for ever: nobody else runs in a virtual runtime")
        self._runtime.sleep(timeout)
        return self._flag


class VirtualThread:
    """A target that runs when the test says so."""

    def __init__(self, runtime: VirtualRuntime, name: str, target: Callable[[], None]) -> None:
        self.name, self.target = name, target
        self.finished = False
        self._runtime = runtime

    def run(self, waits: int | None = None) -> bool:
        """Run the target from its start, on this thread; whether it returned. It is taken off where it has nothing left
        to do (a wait without a timeout), and with ``waits`` at the wait after that many: a loop "wait, work" then does
        its work ``waits`` times."""
        before = self._runtime.waits, self._runtime.in_thread
        self._runtime.waits, self._runtime.in_thread = waits, True
        try:
            self.target()
        except Parked:
            return False
        finally:
            self._runtime.waits, self._runtime.in_thread = before
        self.finished = True
        return True

    def join(self, timeout: float | None = None) -> None:
        return None

    def is_alive(self) -> bool:
        return not self.finished


class VirtualRuntime:
    """The ``Runtime`` of one process on a virtual machine.

    ``hooks`` are called with the time after each sleep, so that a test can let another owner beat while we wait.
    ``skew`` seconds stand between this host's wall clock and the shared one; nothing may depend on them.
    """

    def __init__(self, clock: VirtualClock | None = None, *, host: str = "host-a", pid: int = 100, boot: str = "boot-a",
                 pidns: str = "pid:[1]", started: str = "1", job: str | None = None, restart: int = 0, skew: float = 0.0,
                 born: float = 0.0) -> None:
        self.clock = clock if clock is not None else VirtualClock()
        self.me = Identity(host, pid, boot, pidns, started, job, restart)
        self.clock.living.add(self.me)
        self.answers: dict[Identity, bool | None] = {}
        self.hooks: list[Callable[[float], None]] = []
        self.threads: list[VirtualThread] = []
        self.slept = 0.0
        self.waits: int | None = None
        self.in_thread = False
        self._skew, self._born = skew, born
        self._random = random.Random(repr(self.me))

    def die(self) -> None:
        """This process is gone, as a kernel that can tell sees it."""
        self.clock.living.discard(self.me)

    def use_wait(self) -> None:
        if self.waits is not None:
            self.waits -= 1
            if self.waits < 0:
                raise Parked

    def threads_named(self, name: str) -> list[VirtualThread]:
        return [thread for thread in self.threads if thread.name == name]

    def run(self, name: str, waits: int | None = None) -> bool:
        """Run the newest thread of this name."""
        return self.threads_named(name)[-1].run(waits)

    # -- Runtime ---------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.clock.now - self._born

    def time(self) -> float:
        return 1.7e9 + self.clock.now + self._skew

    def sleep(self, seconds: float) -> None:
        self.clock.now += max(seconds, 0.0)
        self.slept += max(seconds, 0.0)
        for hook in list(self.hooks):
            hook(self.clock.now)

    def event(self) -> Event:
        return VirtualEvent(self)

    def lock(self) -> Lock:
        return threading.RLock()

    def here(self) -> int:
        return threading.get_ident()

    def give_way(self) -> None:
        """Its threads run on the test's own, which keeps its priority."""

    def cores(self) -> int:
        return 4

    def lifeline(self) -> Callable[[], bool]:
        return lambda: True

    def exit_now(self, code: int) -> None:
        raise AssertionError(f"the process would have ended with {code}")

    def thread(self, name: str, target: Callable[[], None], daemon: bool = True) -> Thread:
        thread = VirtualThread(self, name, target)
        self.threads.append(thread)
        return thread

    def token(self, size: int) -> str:
        return self._random.randbytes(size).hex()

    def identity(self) -> Identity:
        return self.me

    def restarts(self) -> int:
        return self.me.elastic

    def recount(self, elastic: int) -> None:
        """Who this process is was said when it was made."""

    def age(self) -> float:
        return self.monotonic()

    def alive(self, other: Identity) -> bool | None:
        """From ``answers``; else as a kernel tells: None across boots and pid namespaces, who lives within them."""
        if other in self.answers:
            return self.answers[other]
        if (other.boot, other.pidns) != (self.me.boot, self.me.pidns):
            return None
        return other in self.clock.living

    def bytes_moved(self) -> int:
        return 0

    def stacks(self) -> str:
        return ""


if TYPE_CHECKING:
    _conforms: Runtime = VirtualRuntime()
