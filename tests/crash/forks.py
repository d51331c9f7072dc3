"""Many short-lived ranks from one process: the zygote forks itself, so that a run of two ranks costs some 50 ms.

A zygote is one rank of ``tests.harness`` (torch is loaded, no thread runs), and what it is asked to do is a module-level
function that calls ``pair`` or ``alone`` again and again. Nothing is waited for longer than ``LIMIT``; a rank that does
not end by then dumps its stacks, is killed, and fails the test.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distckpt.coordination.bootstrap import Bootstrap
from distckpt.coordination.store import Client
from tests.harness import run, values

LIMIT = 30.0


@dataclass
class Ended:
    """How a rank ended: what it returned, the name and text of what it raised, the signal that killed it."""

    value: Any = None
    error: str = ""
    text: str = ""
    killed: int = 0
    seconds: float = 0.0
    log: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and not self.killed

    def __str__(self) -> str:
        state = f"killed by {self.killed}" if self.killed else f"{self.error}: {self.text}" if self.error else f"{self.value!r}"
        return f"{state}\n{self.log[-6000:]}"


def zygote(target: Callable[..., Any], *args: Any, timeout: float = 300.0) -> Any:
    """What ``target(*args)`` returns in a zygote. Call it from a test."""
    return values(run(1, _in_zygote, target, args, init=False, timeout=timeout))[0]


def _in_zygote(rank: int, world: int, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    logging.getLogger().setLevel(logging.INFO)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    return target(*args)


class Stuck(AssertionError):
    """A rank did not end; its stacks are in the text, and it was killed."""


class _Rank:
    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], drop: tuple[int, ...] = ()) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rank
        self._read, write = os.pipe()
        self.began = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._read)
            for descriptor in drop:
                os.close(descriptor)
            self._be(target, args, write)
        os.close(write)
        self._handle = os.pidfd_open(self._pid)

    def _be(self, target: Callable[..., Any], args: tuple[Any, ...], write: int) -> None:
        for descriptor in (1, 2):
            os.dup2(self._log.fileno(), descriptor)
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # SIGUSR1 is the library's: a stop signal
        try:
            answer: tuple[Any, str, str] = target(*args), "", ""
        except BaseException as error:
            traceback.print_exc(file=sys.__stderr__)
            sys.stderr.flush()
            answer = None, type(error).__name__, str(error)[:4000]
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def end(self, deadline: float) -> Ended:
        """Wait for it. The answer is small enough to stay in the pipe."""
        if not select.select([self._handle], [], [], max(deadline - time.monotonic(), 0))[0]:
            os.kill(self._pid, signal.SIGUSR2)
            select.select([self._handle], [], [], 1.0)  # its stacks are being written
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            raise Stuck(f"a rank did not end within {LIMIT:g} s; its stacks:\n{self._text()}")
        _, status = os.waitpid(self._pid, 0)
        ended = Ended(seconds=time.monotonic() - self.began, log=self._text())
        with os.fdopen(self._read, "rb") as pipe:
            answer = pipe.read()
        os.close(self._handle)
        if os.WIFSIGNALED(status):
            ended.killed = os.WTERMSIG(status)
        elif answer:
            ended.value, ended.error, ended.text = pickle.loads(answer)
        else:
            ended.error = f"exit {os.waitstatus_to_exitcode(status)}"
        return ended

    def _text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")


def alone(target: Callable[..., Any], *args: Any) -> Ended:
    """Run ``target(*args)`` in a process of its own."""
    return _Rank(target, args).end(time.monotonic() + LIMIT)


@dataclass(frozen=True)
class Place:
    """Where a rank is, and how it meets the others. ``listening``: rank 0's socket, bound by the parent, so that no port
    is guessed."""

    rank: int
    world: int
    port: int
    listening: int

    def store(self, serve: bool) -> Any:
        return dist.TCPStore("127.0.0.1", self.port, None, serve, timeout=timedelta(seconds=LIMIT), wait_for_workers=False,
                             master_listen_fd=self.listening if serve else None)

    def bootstrap(self) -> Bootstrap:
        """A control plane without a process group, at a tenth of its cost."""
        server = self.store(True) if self.rank == 0 else None
        return Bootstrap("test", self.rank, self.world, lambda: Client(self.store(False), "distckpt/test/"), server)

    def gloo(self) -> None:
        """A process group of torch's, for what runs collectives."""
        dist.init_process_group("gloo", store=self.store(self.rank == 0), rank=self.rank, world_size=self.world)


def group(world: int, target: Callable[..., Any], *args: Any) -> list[Ended]:
    """Run ``target(place, *args)`` on ``world`` ranks."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    ranks = []
    for rank in range(world):
        place = Place(rank, world, listening.getsockname()[1], listening.fileno())
        ranks.append(_Rank(target, (place, *args), drop=() if rank == 0 else (listening.fileno(),)))
    listening.close()
    deadline = time.monotonic() + LIMIT
    ends, stuck = [], list[Stuck]()
    for each in ranks:
        try:
            ends.append(each.end(deadline))
        except Stuck as error:
            stuck.append(error)  # none is left running behind the first
    if stuck:
        raise stuck[0]
    return ends
