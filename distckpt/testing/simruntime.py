"""The seams of one simulated process: its runtime, its clients of the store, and a gate that others may overtake."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from distckpt.coordination.gate import Gate
from distckpt.coordination.store import RawStore
from distckpt.runtime import Event, Identity, Lock, Runtime, Thread
from distckpt.testing.scheduler import Process, Scheduler, Task


class SimEvent:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._flag = scheduler, False
        self._waiting: list[Task] = []

    def set(self) -> None:
        self._scheduler.visit("event", "set")
        self._flag = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)

    def clear(self) -> None:
        self._scheduler.visit("event", "clear")
        self._flag = False

    def is_set(self) -> bool:
        self._scheduler.visit("event", "is_set")
        return self._flag

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        scheduler.visit("event", "wait")
        if self._flag or (timeout is not None and timeout <= 0):
            return self._flag
        task = scheduler.current
        assert task is not None
        self._waiting.append(task)
        if scheduler.block(None if timeout is None else scheduler.now + timeout):
            return True
        if task in self._waiting:  # not so when it was set between the deadline and now
            self._waiting.remove(task)
        return self._flag


class SimLock:
    """Re-entrant, as the library's are. Taking it is a point of the schedule; giving it back is followed by one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        scheduler.visit("lock", "take")
        me = scheduler.current
        deadline = None if timeout < 0 else scheduler.now + timeout
        while self._owner is not None and self._owner is not me:
            assert me is not None
            if not blocking or (deadline is not None and scheduler.now >= deadline):
                return False
            self._waiting.append(me)
            if not scheduler.block(deadline) and me in self._waiting:
                self._waiting.remove(me)
        self._owner = me
        self._depth += 1
        return True

    def __enter__(self) -> SimLock:
        self.acquire()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.release()

    def release(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._owner = None
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)


class SimThread:
    def __init__(self, scheduler: Scheduler, task: Task) -> None:
        self._scheduler, self._task = scheduler, task

    def is_alive(self) -> bool:
        self._scheduler.visit("thread", "is_alive", self._task.name)
        return not self._task.done

    def join(self, timeout: float | None = None) -> None:
        scheduler, task = self._scheduler, self._task
        scheduler.visit("thread", "join", task.name)
        me = scheduler.current
        if task.done or me is None:
            return
        task.waiters.append(me)
        scheduler.block(None if timeout is None else scheduler.now + timeout)


class SimRuntime:
    """The ``Runtime`` of one simulated process. ``living``: the identities of the processes that live, on all hosts."""

    def __init__(self, scheduler: Scheduler, process: Process, me: Identity, living: set[Identity], seed: int) -> None:
        self._scheduler, self._process = scheduler, process
        self.me, self.living = me, living
        self._random = random.Random(seed)
        living.add(me)
        process.at_end.append(lambda: living.discard(me))
        self.visit = scheduler.visit

    def monotonic(self) -> float:
        return self._scheduler.now

    def time(self) -> float:
        return 1.7e9 + self._scheduler.now

    def sleep(self, seconds: float) -> None:
        self._scheduler.visit("thread", "sleep")
        if seconds > 0:
            self._scheduler.block(self._scheduler.now + seconds)

    def event(self) -> Event:
        return SimEvent(self._scheduler)

    def lock(self) -> Lock:
        return SimLock(self._scheduler)

    def thread(self, name: str, target: Callable[[], None], daemon: bool = True) -> Thread:
        self._scheduler.visit("thread", "start", name)
        return SimThread(self._scheduler, self._scheduler.spawn(self._process, name, target, daemon))

    def here(self) -> int:
        return id(self._scheduler.current)

    def give_way(self) -> None:
        """The scheduler gives the turns, whatever a thread asks for."""

    def cores(self) -> int:
        """Whatever this machine has: a seed is one execution."""
        return 4

    def lifeline(self) -> Callable[[], bool]:
        main = self._process.main
        return lambda: main is not None and not main.done

    def exit_now(self, code: int) -> None:
        self._scheduler.exit(code)

    def token(self, size: int) -> str:
        return self._random.randbytes(size).hex()

    def identity(self) -> Identity:
        return self.me

    def restarts(self) -> int:
        return self.me.elastic

    def recount(self, elastic: int) -> None:
        """Who this process is was said when it was made."""

    def age(self) -> float:
        return self._scheduler.now

    def alive(self, other: Identity) -> bool | None:
        return other in self.living if (other.boot, other.pidns) == (self.me.boot, self.me.pidns) else None

    def bytes_moved(self) -> int:
        return 0

    def stacks(self) -> str:
        return ""


class SimStore:
    """What rank 0 serves. As TCPStore's server it answers one request at a time, wakes a waiter when each of its keys has
    been set, and is gone with the process that holds it."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.open = True
        self.waiting: list[tuple[Task, set[str]]] = []

    def close(self, scheduler: Scheduler) -> None:
        self.open = False
        waiting, self.waiting = self.waiting, []
        for task, _ in waiting:
            scheduler.wake(task)


class SimClient:
    """One client's ``RawStore``."""

    def __init__(self, store: SimStore, scheduler: Scheduler) -> None:
        self._store, self._scheduler = store, scheduler

    def _ask(self, op: str, key: str) -> dict[str, bytes]:
        self._scheduler.visit("store", op, key)
        if not self._store.open:
            raise dist.DistNetworkError("Connection reset by peer")
        return self._store.data

    def _put(self, key: str, value: str | bytes) -> None:
        store = self._store
        store.data[key] = value if isinstance(value, bytes) else value.encode()
        if store.waiting:
            for _, missing in store.waiting:
                missing.discard(key)
            for task in [task for task, missing in store.waiting if not missing]:
                self._scheduler.wake(task)
            store.waiting = [(task, missing) for task, missing in store.waiting if missing]

    def set(self, key: str, value: str | bytes, /) -> None:
        self._ask("set", key)
        self._put(key, value)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        data = self._ask("get", keys[0] if keys else "")
        for key in keys:
            if key not in data:
                self.wait([key], timedelta(seconds=300))
        return [self._store.data[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        data = self._ask("compare_set", key)
        if key not in data and expected:
            return expected.encode()
        if key not in data or data[key] == expected.encode():
            self._put(key, desired)
        return data[key]

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        data = self._ask("wait", keys[0] if keys else "")
        missing = {key for key in keys if key not in data}
        if not missing:
            return
        scheduler, store = self._scheduler, self._store
        task = scheduler.current
        if task is None:
            raise dist.DistStoreError("wait timeout")
        entry = (task, missing)
        store.waiting.append(entry)
        seconds = timeout.total_seconds()
        if not scheduler.block(None if seconds > 1e6 else scheduler.now + seconds) and missing:
            store.waiting = [other for other in store.waiting if other is not entry]
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {sorted(missing)[0]}")
        if missing:
            raise dist.DistNetworkError("Connection reset by peer")

    def check(self, keys: list[str], /) -> bool:
        data = self._ask("check", keys[0] if keys else "")
        return all(key in data for key in keys)

    def delete_key(self, key: str, /) -> bool:
        return self._ask("delete", key).pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._ask("num_keys", ""))

    def add(self, key: str, amount: int, /) -> int:
        data = self._ask("add", key)
        total = int(data.get(key, b"0")) + amount
        self._put(key, str(total))
        return total


class WatchedGate(Gate):
    """A gate whose ``place`` and ``flag`` may be overtaken at each reading and writing."""

    def __init__(self, runtime: Runtime, limit: float = 600.0) -> None:
        assert isinstance(runtime, SimRuntime)
        self._visit = runtime.visit
        super().__init__(runtime, limit)

    @property
    def place(self) -> tuple[int, Any]:
        self._visit("gate", "read place")
        return self._place

    @place.setter
    def place(self, value: tuple[int, Any]) -> None:
        self._visit("gate", "write place")
        self._place = value

    @property
    def flag(self) -> bool:
        self._visit("gate", "read flag")
        return self._flag

    @flag.setter
    def flag(self, value: bool) -> None:
        self._visit("gate", "write flag")
        self._flag = value


if TYPE_CHECKING:
    _store: RawStore = SimClient(SimStore(), None)  # type: ignore[arg-type]
    _runtime: Runtime = SimRuntime(None, None, None, set(), 0)  # type: ignore[arg-type]
