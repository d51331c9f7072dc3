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
from pathlib import Path
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


class _Rank:
    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...], keep: tuple[int, ...], drop: tuple[int, ...]) -> None:
        self._log = tempfile.TemporaryFile()
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
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
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
            os.kill(self._pid, signal.SIGUSR1)
            select.select([self._handle], [], [], 1.0)  # its stacks are being written
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            raise AssertionError(f"a rank did not end within {LIMIT:g} s; its stacks:\n{self._text()}")
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
    return _Rank(target, args, (), ()).end(time.monotonic() + LIMIT)


def group(world: int, target: Callable[..., Any], *args: Any) -> list[Ended]:
    """Run ``target(bootstrap, *args)`` on ``world`` ranks that meet in rank 0's store."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    ranks = []
    for rank in range(world):
        drop = () if rank == 0 else (listening.fileno(),)
        ranks.append(_Rank(_with_bootstrap, (rank, world, listening.getsockname()[1], listening.fileno(), target, args),
                           (), drop))
    listening.close()
    deadline = time.monotonic() + LIMIT
    return [rank.end(deadline) for rank in ranks]


def _with_bootstrap(rank: int, world: int, port: int, descriptor: int, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return target(bootstrap(rank, world, port, descriptor), *args)


def bootstrap(rank: int, world: int, port: int, descriptor: int) -> Bootstrap:
    """A control plane without a process group: rank 0 serves on a socket that its parent has bound, so no port is guessed."""
    server = None
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", port, None, True, timeout=timedelta(seconds=LIMIT), wait_for_workers=False,
                               master_listen_fd=descriptor)

    def connect() -> Client:
        raw = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=LIMIT), wait_for_workers=False)
        return Client(raw, "distckpt/test/", f" at 127.0.0.1:{port}")

    return Bootstrap("test", rank, world, connect, server)


def names(path: str | Path) -> list[str]:
    return sorted(os.listdir(path))
