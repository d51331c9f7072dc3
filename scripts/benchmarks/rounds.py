"""Scenarios one after another; rounds of variants on real ranks, in an order that moves on; two variants as a row of ratios."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from scripts.benchmarks.report import Row
from scripts.benchmarks.subjects import WORLD, Times
from tests.harness import run, values

_LIMIT = 2400.0

T = TypeVar("T")
Found = dict[str, list[Times]]
Scenario = Callable[[Path, bool], Iterator[Row]]


def scenarios(place: Path, quick: bool, only: str, known: Mapping[str, Scenario]) -> Iterator[Row]:
    """The rows of those scenarios whose name holds ``only``, each in a directory of its own that is gone afterwards. The load
    before and after each is printed. The rows of a ``quick`` run are exempt from the least number of rounds."""
    for name in (n for n in known if only in n):
        folder = place / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        begun = time.monotonic()
        print(f"-- {name}: load {os.getloadavg()[0]:.1f}", flush=True)
        try:
            for made in known[name](folder, quick):
                made.scenario, made.least = name, 0 if quick else made.least
                yield made
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            print(f"-- {name}: load {os.getloadavg()[0]:.1f} at the end, {time.monotonic() - begun:.0f} s", flush=True)


def ranks(target: Callable[..., Found], *args: Any, env: dict[str, str] | None = None, world: int = WORLD) -> Found:
    """Each round's figures, of its slowest rank."""
    found = values(run(world, target, *args, timeout=_LIMIT, env=env))
    return {name: [tuple(map(max, zip(*each, strict=True))) for each in zip(*(f[name] for f in found), strict=True)]
            for name in found[0]}


def rotated(names: list[T], turn: int) -> list[T]:
    """The order of a round: it moves on by one and turns round each time. On a busy machine the scheduler favours who has
    waited before, so nobody may always follow the same one."""
    shift = turn % len(names)
    return (names[shift:] + names[:shift])[::-1 if turn % 2 else 1]


def rotate(variants: dict[str, Callable[[int], Times]], turns: int) -> Found:
    """Run every variant once in each of ``turns`` rounds, and in one before them, which warms up. A busy machine takes longer;
    it does not get fewer."""
    names = list(variants)
    found: Found = {name: [] for name in names}
    for turn in range(turns + 1):
        for name in rotated(names, turn):
            dist.barrier()
            found[name].append(variants[name](turn))
    return {name: times[1:] for name, times in found.items()}


def sync_tree(path: str) -> None:
    """Make a framework's save durable: every file and directory of it and the directory it is in, the files shared out over the
    ranks. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    files = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]
    for name in sorted(files, key=os.path.getsize)[rank::world]:
        _fsync(name)
    dist.barrier()
    if rank == 0:
        for folder in (*(top for top, _, _ in os.walk(path, topdown=False)), os.path.dirname(path)):
            _fsync(folder)
    dist.barrier()


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def column(found: Found, name: str, index: int = 0) -> list[float]:
    return [times[index] for times in found[name]]


def row(name: str, found: Found, ours: str, theirs: str, index: int = 0, target: float | None = None, note: str = "", *,
        beside: int | None = None, **more: Any) -> Row:
    """``index``: which figure of ``ours``, and of ``theirs`` unless ``beside`` names another. ``more``: what Row takes."""
    return Row(name, column(found, ours, index), column(found, theirs, index if beside is None else beside), target, note, **more)
