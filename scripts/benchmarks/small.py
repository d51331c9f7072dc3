"""Much that is small: 10,000 tensors beside DCP, 1,000 files beside a loop that syncs each: row 12 of the issue."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import distckpt
from scripts.benchmarks.report import Row
from scripts.benchmarks.rounds import scenarios


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"tensors": _tensors, "files": _files})


def _in_turns(turns: int, ours: Callable[[int], object], theirs: Callable[[], object], away: Callable[[], object],
              rest: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Seconds of each, on a disk at rest, in an order that turns round; the first round warms up. ``away`` and ``rest`` come
    after theirs and ours, and are not counted."""
    mine: list[float] = []
    beside: list[float] = []
    for turn in range(turns + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            os.sync()
            begun = time.perf_counter()
            if which:
                theirs()
                beside.append(time.perf_counter() - begun)
                away()
            else:
                ours(turn)
                mine.append(time.perf_counter() - begun)
                rest()
    return mine[1:], beside[1:]


def _tensors(place: Path, quick: bool) -> Iterator[Row]:
    count, turns = (1000, 3) if quick else (10_000, 9)
    state: dict[str, Any] = {f"layer.{i}.weight": torch.randn(1024) for i in range(count)}
    with distckpt.CheckpointManager(place / "ours", keep_last=1) as manager:
        ours, theirs = _in_turns(turns, lambda turn: manager.save(turn, distckpt.Shards(state)),
                                 lambda: dcp.save(state, checkpoint_id=str(place / "dcp")),
                                 lambda: shutil.rmtree(place / "dcp"), lambda: None)
    yield Row(f"{count} tensors of 4 KB, durable: Shards / dcp.save", ours, theirs, 1 / 10, f"{turns} rounds", case=12)


def _write(path: str, data: bytes, sync: bool = False) -> None:
    with open(path, "wb") as out:
        out.write(data)
        if sync:
            out.flush()
            os.fsync(out.fileno())


def _files(place: Path, quick: bool) -> Iterator[Row]:
    count, turns = (200, 3) if quick else (1000, 9)
    data = os.urandom(4096)
    with distckpt.CheckpointManager(place / "ours", keep_last=1) as manager:
        assert manager._owned is not None
        janitor = manager._owned.janitor

        def saved(turn: int) -> None:
            with manager.saving(turn) as files:
                for number in range(count):
                    _write(files.mine(str(number)), data)

        def plain() -> None:
            os.mkdir(place / "plain")
            for number in range(count):
                _write(str(place / "plain" / str(number)), data, sync=True)

        ours, theirs = _in_turns(turns, saved, plain, lambda: shutil.rmtree(place / "plain"), lambda: janitor.wait(60))
    yield Row(f"{count} files of 4 KB, durable: saving() / a loop that syncs each", ours, theirs, 1 / 8,
              f"{turns} rounds; ours are digested and committed; a journaled file system shows the difference", case=12)
