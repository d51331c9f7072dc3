"""Ranks as threads of one process, over one HashStore: each with its own ``Files``, host and manager.

For schedules that need a hook at one exact operation of one rank, and wherever real processes are not the point.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import distckpt
from distckpt import owned
from distckpt.coordination.bootstrap import Bootstrap
from distckpt.coordination.store import Client, ClientSource
from distckpt.durable import REAL, Files
from distckpt.options import Seams, Timeouts
from distckpt.runtime import Identity, SystemRuntime
from tests.harness import Outcome, values

__all__ = ["Job", "Outcome", "Threads", "values"]

QUICK = Timeouts(arrive=10, progress=10, visible=2, close=10)


class RankRuntime(SystemRuntime):
    """The real machine, on a host of its own name; who lives is what ``living`` says."""

    def __init__(self, host: str, living: set[Identity]) -> None:
        self._living = living
        self.moved = 0
        self.me = replace(super().identity(), host=host, boot="in-process", started=self.token(4))
        living.add(self.me)

    def identity(self) -> Identity:
        return self.me

    def alive(self, other: Identity) -> bool | None:
        return other in self._living

    def bytes_moved(self) -> int:
        return self.moved


class Threads:
    """``world`` threads and their store. A hang ends the test with every stack."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.store: Any = dist.HashStore()  # type: ignore[attr-defined]

    @property
    def source(self) -> ClientSource:
        return lambda: Client(self.store, "t/")

    def run(self, target: Callable[[int], Any], timeout: float = 30.0, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """``target(rank)`` on every rank at once; how each ended."""
        chosen = list(range(self.world)) if ranks is None else list(ranks)
        outcomes = [Outcome(rank) for rank in chosen]

        def one(outcome: Outcome) -> None:
            try:
                outcome.value = target(outcome.rank)
            except BaseException as error:
                outcome.error, outcome.text = error, traceback.format_exc()
            outcome.exitcode = 0

        threads = [threading.Thread(target=one, args=(o,), name=f"rank-{o.rank}", daemon=True) for o in outcomes]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.01))
        if any(thread.is_alive() for thread in threads):
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            stuck = [o.rank for o, t in zip(outcomes, threads, strict=True) if t.is_alive()]
            raise AssertionError(f"ranks {stuck} still run after {timeout} s; all stacks are on stderr; the others: "
                                 f"{[(o.rank, o.value, o.error) for o in outcomes if o.rank not in stuck]}")
        return outcomes


class Job:
    """The ranks of one job on ``root``. ``files`` and ``hosts`` say what is special about a rank; ``options`` go to its
    manager. A second ``Job`` on the root, after ``crash()``, is the restart."""

    def __init__(self, root: str | Path, world: int = 2, *, files: Mapping[int, Files] | None = None,
                 hosts: Sequence[str] = (), timeouts: Timeouts = QUICK, **options: Any) -> None:
        self.root, self.world, self.options = str(root), world, options
        self._files, self._timeouts = dict(files or {}), timeouts
        self.living: set[Identity] = set()
        self.runtimes = [RankRuntime(hosts[rank] if hosts else "host-a", self.living) for rank in range(world)]
        self.managers: dict[int, distckpt.CheckpointManager] = {}
        self.threads = Threads(world)

    def open(self, rank: int, **options: Any) -> distckpt.CheckpointManager:
        """The manager of ``rank``. Collective, in that rank's thread."""
        seams = Seams(files=self._files.get(rank, REAL), runtime=self.runtimes[rank],
                      bootstrap=Bootstrap("threads", rank, self.world, self.threads.source, new_gloo=lambda seconds: None))
        options = {"timeouts": self._timeouts, **self.options, **options}
        manager = distckpt.CheckpointManager(options.pop("root", self.root), seams=seams, **options)
        self.managers[rank] = manager
        return manager

    def run(self, target: Callable[[distckpt.CheckpointManager], Any], timeout: float = 30.0) -> list[Outcome]:
        """Open, ``target(manager)``, close; on every rank."""

        def one(rank: int) -> Any:
            with self.open(rank) as manager:
                return target(manager)

        return self.threads.run(one, timeout)

    def start(self) -> list[distckpt.CheckpointManager]:
        """All managers, open; end it with ``finish`` or ``crash``."""
        return values(self.threads.run(self.open))

    def each(self, target: Callable[[distckpt.CheckpointManager], Any], timeout: float = 30.0,
             ranks: Sequence[int] | None = None) -> list[Outcome]:
        """One thing on the open managers of all ranks (or of ``ranks``), at once; and what follows its commits, whoever looks
        at the root then."""
        found = self.threads.run(lambda rank: target(self.managers[rank]), timeout, ranks)
        for manager in self.managers.values():
            manager._rotated()
        return found

    def finish(self) -> None:
        values(self.each(lambda manager: manager.close()))

    def crash(self) -> None:
        """All ranks are gone, without a word; nothing on disk moves. A kernel can tell that they are dead."""
        self.living.clear()
        owned._open.clear()
        for manager in self.managers.values():
            manager._group.pulse.stop()
            finaliser = manager._background._finaliser
            finaliser._stopping = True  # nor does it wait for the end of this program, as if it were its own
            finaliser._over.set()
            finaliser._wake.set()
            if manager._owned is not None:
                manager._owned.ownership._stop.set()
                manager._owned.afterwards._queue.clear()


def write(manager: distckpt.CheckpointManager, step: int, text: str = "", **options: Any) -> None:
    """A save of one small file per rank, through the seam; ``text`` makes its bytes."""
    with manager.saving(step, **options) as files, files.writer("data.bin") as out:
        out.write(content(step, manager.rank, text))


def content(step: int, rank: int, text: str = "") -> bytes:
    return f"{text} of step {step} by rank {rank};".encode() * 40


def holds(root: str | Path, step: int, world: int, text: str = "") -> bool:
    """Whether the checkpoint of ``step`` holds what ``write`` wrote with ``text``, on every rank."""
    names = [f"step-{step}/data.rank-{rank:05d}-of-{world:05d}.bin" for rank in range(world)]
    found = tree(root)
    return all(found.get(name) == content(step, rank, text) for rank, name in enumerate(names))


def same_error(outcomes: Sequence[Outcome], kind: type[BaseException]) -> list[Any]:
    """The error of every rank; AssertionError unless each raised ``kind``, with one text."""
    for outcome in outcomes:
        assert isinstance(outcome.error, kind), f"rank {outcome.rank}: {outcome.value!r} {outcome.error!r}\n{outcome.text}"
    texts = {str(outcome.error) for outcome in outcomes}
    assert len(texts) == 1, texts
    return [outcome.error for outcome in outcomes]


def tree(root: str | Path) -> dict[str, bytes]:
    """Every file under ``root``, the library's own directory aside, with its bytes."""
    found = {}
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if name != ".distckpt")  # the janitor is at work in there
        for name in sorted(names):
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = Path(path).read_bytes()
    return found


def staged(root: str | Path) -> list[str]:
    """Attempts that stand in any generation's staging."""
    return sorted(path.name for path in Path(root).glob(".distckpt/staging/*/*") if path.is_dir())


def events(root: str | Path, kind: str) -> list[dict[str, Any]]:
    """The journal's events of one kind, oldest first."""
    found = []
    for path in sorted(Path(root).glob(".distckpt/journal/*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def await_(what: Callable[[], Any], timeout: float = 10.0) -> Any:
    """Poll until ``what()`` is true; AssertionError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.005)
    return value
