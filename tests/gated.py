"""The real gatekeeper, listeners, messengers and finalisers of several ranks, as threads over one store.

``ranks`` and ``impatient`` are fixtures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from distckpt.background import Background, Job, open_gate
from distckpt.coordination import gate as gate_module
from distckpt.coordination.gate import Act
from distckpt.coordination.listener import Caller, Listener
from distckpt.coordination.store import Client
from distckpt.durable import REAL
from distckpt.errors import DistckptError, RankFailure, SaveError
from distckpt.launch.signals import StopSignals
from distckpt.runtime import Identity, SystemRuntime
from distckpt.saving.handle import SaveHandle
from distckpt.steps import Schedule, Todo


def _schedules(every: int | None) -> Callable[[str], Schedule]:
    one = Schedule(every, False)
    return lambda series: one


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
            self.behind.append(Background(group, open_gate(group, self.runtime, limit), self.source, self.runtime,
                                          self._executor(rank), _schedules(every), StopSignals(()), tolerated, in_flight, None,
                                          lambda: None, limit))

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


def watch_attends(behind: Background) -> list[int]:
    """The boundaries at which ``poll`` left its fast path."""
    attends: list[int] = []
    attend = behind._attend

    def watched(step: int) -> Todo:
        attends.append(behind.gate.place[0])
        return attend(step)
    behind._attend = watched  # type: ignore[method-assign]
    return attends


def met(found: Ranks, rank: int, polls: int, pause: float = 0.0005, steps: Callable[[int], int] = lambda n: n,
        enough: int = 0) -> list[Any]:
    """What ``rank`` meets in so many polls, and in more on a busy machine until it is ``enough``: (ordinal, the error's type or
    the todo), without the empty ones."""
    behind, seen, late = found.behind[rank], [], time.monotonic() + 20
    for n in count():
        if n >= polls and (len(seen) >= enough or time.monotonic() > late):
            break
        try:
            todo = behind.poll(steps(n))
            if todo.save or todo.stop:
                seen.append((behind.gate.place[0], todo.save, todo.stop, todo.reason))
        except DistckptError as error:
            seen.append((behind.gate.place[0], type(error).__name__, str(error)))
        time.sleep(pause)
    return seen


def until(what: Callable[[], Any], timeout: float = 10.0) -> Any:
    """What ``what()`` gives, as soon as that is true; after ``timeout`` seconds, whatever it gives."""
    deadline = time.monotonic() + timeout
    while not (value := what()):
        if time.monotonic() > deadline:
            return value
        time.sleep(0.001)
    return value
