"""Much that is small: 10,000 tensors beside DCP, 1,000 files beside a loop that syncs each: row 12 of the issue."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]

import distckpt
from scripts.benchmarks.report import DISK, Row
from scripts.benchmarks.rounds import rotated, scenarios


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"tensors": _tensors, "files": _files})


Job = tuple[Callable[[int], object], Callable[[], object]]
"""What is timed, given the round, and what comes after it and is not."""


def in_turns(turns: int, jobs: dict[str, Job]) -> dict[str, list[float]]:
    """Seconds of each, on a disk at rest, in an order that turns round; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(turns + 1):
        for name in rotated(list(jobs), turn):
            job, after = jobs[name]
            os.sync()
            begun = time.perf_counter()
            job(turn)
            found[name].append(time.perf_counter() - begun)
            after()
    return {name: times[1:] for name, times in found.items()}


def _tensors(place: Path, quick: bool) -> Iterator[Row]:
    count, turns = (1000, 3) if quick else (10_000, DISK)
    state: dict[str, Any] = {f"layer.{i}.weight": torch.randn(1024) for i in range(count)}
    with distckpt.CheckpointManager(place / "ours", keep_last=1) as manager, \
            distckpt.CheckpointManager(place / "flat", keep_last=1) as flat:
        def theirs(sync: bool, turn: int) -> None:
            dcp.save(state, storage_writer=FileSystemWriter(place / "dcp", sync_files=sync))

        def away() -> None:
            shutil.rmtree(place / "dcp")

        found = in_turns(turns, {"ours": (lambda turn: manager.save(turn, distckpt.Shards(state)), lambda: None),
                                 "flat": (lambda turn: flat.save(turn, distckpt.Shards(state, format="safetensors")),
                                          lambda: None),
                                 "dcp": (partial(theirs, True), away), "unsynced": (partial(theirs, False), away)})
    name = f"{count} tensors of 4 KB, durable: Shards / dcp.save"
    yield Row(name, found["ours"], found["dcp"], 1 / 10, "which syncs its files", case=12)
    yield Row(f"{name}; by safetensors", found["flat"], found["dcp"], case=12)
    yield Row(f"{name}, sync_files=False, as it returns", found["ours"], found["unsynced"], case=12)


def _write(path: str, data: bytes, sync: bool) -> None:
    with open(path, "wb") as out:
        out.write(data)
        if sync:
            out.flush()
            os.fsync(out.fileno())


def _files(place: Path, quick: bool) -> Iterator[Row]:
    """Nothing is deleted before the end: for minutes after that, ext4 without a journal looks for free inodes among those that
    were deleted, which takes as long for either (README, "How fast, and why")."""
    count, turns = (200, 3) if quick else (1000, DISK)
    data = os.urandom(4096)
    with distckpt.CheckpointManager(place / "ours", keep_last=4 * turns) as manager:
        def by_writer(turn: int) -> None:
            with manager.saving(2 * turn) as files:
                for number in range(count):
                    with files.writer(str(number)) as out:
                        out.write(data)

        def by_hand(turn: int) -> None:
            with manager.saving(2 * turn + 1) as files:
                for number in range(count):
                    _write(files.mine(str(number)), data, False)

        def plain(sync: bool, turn: int) -> None:
            folder = place / f"{turn} {sync}"
            os.mkdir(folder)
            for number in range(count):
                _write(str(folder / str(number)), data, sync)

        found = in_turns(turns, {name: (job, lambda: None) for name, job in {
            "writer": by_writer, "hand": by_hand, "synced": partial(plain, True), "unsynced": partial(plain, False)}.items()})
    name = f"{count} files of 4 KB, durable"
    note = "ours are digested and committed; a journaled file system shows the difference"
    yield Row(f"{name}: files.writer / a loop that syncs each", found["writer"], found["synced"], 1 / 8, note, case=12)
    yield Row(f"{name}: files.mine and open / the same loop", found["hand"], found["synced"], 1 / 8, note, case=12)
    yield Row(f"{name}: files.writer / a loop that syncs none, as it returns", found["writer"], found["unsynced"], case=12)
