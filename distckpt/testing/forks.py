"""Ranks forked from a process that has torch loaded and no threads: a run of two costs some 50 ms.

For hundreds of runs in a row: the caller itself is what is forked, so it must be such a process.

``alone`` and ``group`` run a function and say how each rank ended; ``start`` gives the running ranks, for what stops and
continues them. Nothing is waited for beyond a deadline: a rank that has not ended by then dumps its stacks and is killed.
Linux only. Importing this does not import torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distckpt.coordination.bootstrap import Bootstrap

LIMIT = 30.0
_DIE_WITH_PARENT = 1
_LIBC = ctypes.CDLL(None)


@dataclass
class Ended:
    """How a rank ended: what it returned, the name and text of what it raised, the signal that killed it; ``hung``: it had
    to be killed, and its stacks are in ``log``."""

    value: Any = None
    error: str = ""
    text: str = ""
    killed: int = 0
    hung: bool = False
    seconds: float = 0.0
    log: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and not self.killed

    def __str__(self) -> str:
        state = f"killed by {self.killed}" if self.killed else f"{self.error}: {self.text}" if self.error else f"{self.value!r}"
        return f"{'HUNG, ' if self.hung else ''}{state}\n{self.log[-6000:]}"


class Forked:
    """A running rank. It dies with this process."""

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], drop: tuple[int, ...] = ()) -> None:
        self._log = os.memfd_create("log")
        self._read, write = os.pipe()
        self._began = time.monotonic()
        self._ended: Ended | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            os.close(self._read)
            for descriptor in drop:
                os.close(descriptor)
            self._be(target, args, write)
        os.close(write)
        self._handle = os.pidfd_open(self.pid)

    def _be(self, target: Callable[..., Any], args: tuple[Any, ...], write: int) -> None:
        for descriptor in (1, 2):
            os.dup2(self._log, descriptor)
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # SIGUSR1 is a stop signal of the library
        try:
            answer: tuple[Any, str, str] = target(*args), "", ""
        except BaseException as error:  # whatever it was is how this rank ended
            traceback.print_exc(file=sys.__stderr__)
            answer = None, type(error).__name__, str(error)[:4000]
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def ended_by(self, deadline: float) -> bool:
        """Whether it has ended by ``deadline`` (on the monotonic clock)."""
        return self._ended is not None or bool(select.select([self._handle], [], [], max(deadline - time.monotonic(), 0))[0])

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def end(self, deadline: float) -> Ended:
        """Wait for it, and kill it at ``deadline``. The answer must be small enough to stay in the pipe."""
        if self._ended is not None:
            return self._ended
        hung = not self.ended_by(deadline)
        if hung:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGUSR2)
            select.select([self._handle], [], [], 1.0)  # its stacks are being written
            self.signal(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        ended = self._ended = Ended(seconds=time.monotonic() - self._began, hung=hung, log=self._text())
        with os.fdopen(self._read, "rb") as pipe:
            answer = pipe.read()
        os.close(self._handle)
        os.close(self._log)
        if os.WIFSIGNALED(status):
            ended.killed = os.WTERMSIG(status)
        elif answer:
            ended.value, ended.error, ended.text = pickle.loads(answer)
        else:
            ended.error = f"exit {os.waitstatus_to_exitcode(status)}"
        return ended

    def _text(self) -> str:
        return os.pread(self._log, 1 << 20, 0).decode("utf-8", "replace")


@dataclass(frozen=True)
class Place:
    """Where a rank is, and how it meets the others. ``listening``: rank 0's socket, bound by the parent, so that no port
    is guessed. ``limit``: seconds of torch's own waits."""

    rank: int
    world: int
    port: int
    listening: int
    limit: float = LIMIT

    def store(self, serve: bool) -> Any:
        import torch.distributed as dist

        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", self.port, None, serve, timeout=timedelta(seconds=self.limit), wait_for_workers=False,
            master_listen_fd=self.listening if serve else None)

    def bootstrap(self) -> Bootstrap:
        """A control plane without a process group, at a tenth of its cost; its clients are guarded as any other's."""
        from distckpt.coordination.bootstrap import Bootstrap
        from distckpt.coordination.store import Client, Sentry, sockets_to
        from distckpt.runtime import SYSTEM

        def connect() -> Client:
            raw, descriptors = sockets_to(self.port, lambda: self.store(False))
            return Client(raw, "distckpt/test/", "", Sentry(descriptors, SYSTEM, f"127.0.0.1:{self.port}"))

        server = self.store(True) if self.rank == 0 else None
        return Bootstrap("test", self.rank, self.world, connect, server)

    def gloo(self) -> None:
        """A process group of torch's, for what runs collectives."""
        import torch.distributed as dist

        dist.init_process_group("gloo", store=self.store(self.rank == 0), rank=self.rank, world_size=self.world,
                                timeout=timedelta(seconds=self.limit))


def start(world: int, target: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Forked]:
    """``target(place, *args)`` on ``world`` ranks, under way."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    ranks = []
    for rank in range(world):
        place = Place(rank, world, listening.getsockname()[1], listening.fileno(), limit)
        ranks.append(Forked(target, (place, *args), drop=() if rank == 0 else (listening.fileno(),)))
    listening.close()
    return ranks


class Stuck(AssertionError):
    """A rank did not end; its stacks are in the text, and it was killed."""


def group(world: int, target: Callable[..., Any], *args: Any) -> list[Ended]:
    """How ``target(place, *args)`` ended on each of ``world`` ranks; Stuck, with the stacks of one that did not."""
    deadline = time.monotonic() + LIMIT
    return _all_ended([rank.end(deadline) for rank in start(world, target, *args)])


def alone(target: Callable[..., Any], *args: Any) -> Ended:
    """How ``target(*args)`` ended in a process of its own; Stuck, with its stacks, if it did not."""
    return _all_ended([Forked(target, args).end(time.monotonic() + LIMIT)])[0]


def _all_ended(ends: list[Ended]) -> list[Ended]:
    hung = [end for end in ends if end.hung]
    if hung:
        raise Stuck(f"a rank did not end within {LIMIT:g} s; its stacks:\n{hung[0].log}")
    return ends
