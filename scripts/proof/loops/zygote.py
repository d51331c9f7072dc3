"""A process that has torch loaded and no threads, and makes one run after another; and two of them, kept busy.

For L2: the runs are ``distckpt.testing.forks``'s, and this keeps two at a time going, which share what was learned once.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from scripts.proof.loops.judge import NOTICED, Item, Judged, Known, judge, learn
from scripts.proof.loops.program import PROGRAMS
from scripts.proof.loops.schedule import complaint
from scripts.proof.loops.traced import judge_traced

_ROOT = Path(__file__).resolve().parents[3]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_ANSWER = 180.0


class Zygotes:
    """``width`` of them, forked from one that has learned the programs. RuntimeError when one breaks."""

    def __init__(self, width: int, programs: list[str], folder: str) -> None:
        pairs = [socket.socketpair() for _ in range(width)]
        theirs = [pair[1].fileno() for pair in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.proof.loops.zygote", folder, ",".join(programs), *map(str, theirs)],
            stdin=subprocess.DEVNULL, pass_fds=theirs, cwd=_ROOT, env={**_clean(), **_ENVIRONMENT, "PYTHONPATH": str(_ROOT)})
        self.channels = [Connection(ours.detach()) for ours, _ in pairs]
        for _, other in pairs:
            other.close()

    def answer(self, channel: Any) -> Any:
        if not channel.poll(_ANSWER):
            raise RuntimeError(f"a zygote has not answered for {_ANSWER:g} s")
        try:
            kind, value = channel.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError("a zygote has died") from None
        if kind == "broken":
            raise RuntimeError(f"a zygote is broken:\n{value}")
        return value

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _clean() -> dict[str, str]:
    """The environment without what a launcher says of this process."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


class Pool:
    """``width`` zygotes that know ``programs``, on a file system in memory where there is one."""

    def __init__(self, width: int = 2, programs: Iterable[str] = tuple(PROGRAMS)) -> None:
        shared = Path("/dev/shm")
        self._folder = tempfile.mkdtemp(prefix="distckpt-l2-", dir=shared if os.access(shared, os.W_OK) else None)
        self._zygotes = Zygotes(width, list(programs), self._folder)
        self.known: dict[str, Known] = self._zygotes.answer(self._zygotes.channels[0])

    def judge(self, items: Iterator[Item]) -> Iterator[tuple[Item, Judged]]:
        """What came of each, as they end. ``items`` is asked for the next one when a zygote is free for it."""
        busy: dict[Any, Item] = {}
        for free in self._zygotes.channels:
            self._give(free, items, busy)
        while busy:
            ready = wait(list(busy), _ANSWER)
            if not ready:
                raise RuntimeError(f"no zygote has answered for {_ANSWER:g} s: {[str(item) for item in busy.values()]}")
            for channel in ready:
                item = busy.pop(channel)
                judged = self._zygotes.answer(channel)
                self._give(channel, items, busy)
                yield item, judged

    def _give(self, channel: Any, items: Iterator[Item], busy: dict[Any, Item]) -> None:
        item = next(items, None)
        if item is not None:
            channel.send(item)
            busy[channel] = item

    def close(self) -> None:
        self._zygotes.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# -- inside --------------------------------------------------------------------------------------------------------------

def surely(item: Item, known: Known, folder: str) -> Judged:
    """``judge``; what was noticed late is looked at again, because this machine may have been busy, and so is a fault that did
    not fire, because threads take turns as they like. Everything but what is beyond the last operation must fire, and every
    run must have been checked."""
    make = judge_traced if item.traced else judge
    judged = make(item, known, folder)
    if not judged.fired and item.strike.n <= known.count(item.strike) and not judged.violations:
        again = make(item, known, folder)
        judged.noticed = again.noticed
        judged.add(again)
    for _ in range(2):
        if judged.noticed is None or judged.noticed <= NOTICED or judged.violations:
            break
        second = make(item, known, folder)
        judged.add(second)
        if second.noticed is not None:
            judged.noticed = min(judged.noticed, second.noticed)
    if not judged.checked:
        judged.violations.append("the checker did not run")
    if judged.noticed is not None and judged.noticed > NOTICED:
        judged.violations.append(f"I6: noticed only after {judged.noticed:.2f} s")
    word = complaint(item, known, judged.fired, judged.reached)
    if word:
        judged.violations.append(word)
    return judged


def _learned(folder: str, programs: list[str], channel: Connection) -> dict[str, Known]:
    try:
        known = {name: learn(name, folder) for name in programs}
        if threading.active_count() > 1:
            raise AssertionError(f"a zygote must not have threads: {threading.enumerate()}")
    except Exception:  # whatever it is, the parent raises it
        channel.send(("broken", traceback.format_exc()))
        raise
    channel.send(("answer", known))
    return known


def _serve(channel: Connection, folder: str, known: dict[str, Known]) -> None:
    os.makedirs(folder)
    while True:
        try:
            item = channel.recv()
        except (EOFError, ConnectionError):
            return
        try:
            channel.send(("answer", surely(item, known[item.program], folder)))
        except Exception:  # as above
            channel.send(("broken", traceback.format_exc()))


def main(folder: str, programs: str, *descriptors: str) -> None:
    channels = [Connection(int(descriptor)) for descriptor in descriptors]
    known = _learned(folder, programs.split(","), channels[0])
    gc.freeze()  # or each fork copies what its collector touches
    mine = 0
    for index in range(1, len(channels)):
        if os.fork() == 0:
            mine = index
            break
    for index, channel in enumerate(channels):
        if index != mine:
            channel.close()
    _serve(channels[mine], f"{folder}/{mine}", known)
    if mine == 0:
        for _ in channels[1:]:
            os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
