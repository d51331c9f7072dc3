"""Real ranks for tests: processes forked from a server that has torch loaded (about 0.1 s each), gloo, an own port.

Every run has a hard time limit; when it hits it, all stacks of all ranks are dumped and every rank is killed. For tests as they
come: the server forks, so the caller may have threads. Who makes hundreds of runs uses ``tests.crash.forks``.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp", "numpy",
                                 "pytest", "distckpt", "distckpt.manager", "distckpt.payloads.train_state", "tests.harness"])


@dataclass
class Outcome:
    """How one rank ended: ``value`` it returned, ``error`` it raised, or ``exitcode`` (negative: the signal)."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel deals out: one of its own choice may be somebody's outgoing
    connection by the time it is listened on."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def _child(rank: int, world: int, port: int, target: Any, args: tuple[Any, ...], out: Connection, log: str, init: bool,
           env: dict[str, str]) -> None:
    stream = open(log, "w", buffering=1)  # noqa: SIM115 - lives as long as the process
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                       # torch asks for the name of every peer's address; a name server that drops the query costs 5 s
                       "RES_OPTIONS": "attempts:0", **env})
    import logging

    import torch
    import torch.distributed as dist

    logging.basicConfig(level=logging.DEBUG, stream=stream, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}")
        value = target(rank, world, *args)
        out.send(("value", value))
    except BaseException as error:
        traceback.print_exc(file=stream)
        try:
            out.send(("error", error))
        except Exception:
            out.send(("error", RuntimeError(f"{type(error).__name__}: {error}")))
    stream.flush()
    out.close()
    os._exit(0)  # no interpreter shutdown: gloo's threads of a failed group may never join


def start(world: int, target: Any, *args: Any, init: bool = True, env: dict[str, str] | None = None,
          folder: str | None = None) -> Running:
    """Start ``target(rank, world, *args)`` on ``world`` ranks. ``init``: make a gloo process group first."""
    return Running(world, target, args, init, env or {}, folder)


class Running:
    def __init__(self, world: int, target: Any, args: tuple[Any, ...], init: bool, env: dict[str, str],
                 folder: str | None) -> None:
        self.world, self._own = world, folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="ranks-"))
        self.logs = [self.folder / f"rank-{r}.log" for r in range(world)]
        port = free_port()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_child, daemon=True,
                                       args=(rank, world, port, target, args, theirs, str(self.logs[rank]), init, env))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    def join(self, timeout: float = 60.0) -> list[Outcome]:
        """How every rank ended; AssertionError with all stacks when one does not within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        outcomes = [Outcome(rank) for rank in range(self.world)]
        for rank, process in enumerate(self.processes):
            # What it returned may be larger than a pipe holds: it ends only when somebody has read it.
            if wait([self._pipes[rank], process.sentinel], max(deadline - time.monotonic(), 0.01)):
                self._receive(outcomes[rank])
            process.join(max(deadline - time.monotonic(), 0.01))
            if process.is_alive():
                self._hang(timeout)
            outcomes[rank].exitcode = process.exitcode
            outcomes[rank].text = self.logs[rank].read_text() if self.logs[rank].exists() else ""
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)  # the logs are in the outcomes
        return outcomes

    def _receive(self, outcome: Outcome) -> None:
        pipe = self._pipes[outcome.rank]
        if not wait([pipe], 0):
            return
        try:
            kind, value = pipe.recv()
        except EOFError:
            return  # it was killed
        if kind == "value":
            outcome.value = value
        else:
            outcome.error = value

    def _hang(self, timeout: float) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)
                os.kill(process.pid, signal.SIGUSR2)
        time.sleep(1.0)  # the stacks are being written by processes that may be stuck
        for process in self.processes:
            if process.is_alive():
                process.kill()
        stacks = "\n".join(f"===== rank {r}\n{p.read_text()[-12_000:]}" for r, p in enumerate(self.logs) if p.exists())
        raise AssertionError(f"ranks still running after {timeout} s; all stacks:\n{stacks}")


def run(world: int, target: Any, *args: Any, timeout: float = 60.0, init: bool = True, env: dict[str, str] | None = None,
        ) -> list[Outcome]:
    """Run to the end; see ``start``."""
    return start(world, target, *args, init=init, env=env).join(timeout)


def values(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; AssertionError with the logs if one did not."""
    for outcome in outcomes:
        assert outcome.ok, f"rank {outcome.rank} ended with {outcome.exitcode}, {outcome.error!r}\n{outcome.text[-6000:]}"
    return [outcome.value for outcome in outcomes]
