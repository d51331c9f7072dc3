"""Rounds of variants on real ranks, in an order that moves on; what they took, and two of them as a row of ratios."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.benchmarks.report import Row
from scripts.benchmarks.subjects import WORLD, Times
from tests.harness import run, values

_LIMIT = 900.0
_ENOUGH = 200.0

Found = dict[str, list[Times]]


def ranks(target: Callable[..., Found], *args: Any, env: dict[str, str] | None = None) -> Found:
    """Each round's figures, of its slowest rank."""
    found = values(run(WORLD, target, *args, timeout=_LIMIT, env=env))
    return {name: [tuple(map(max, zip(*each, strict=True))) for each in zip(*(f[name] for f in found), strict=True)]
            for name in found[0]}


def rotate(variants: dict[str, Callable[[int], Times]], turns: int, least: int = 2) -> Found:
    """Run every variant once a round, in an order that moves on by one and turns round each time: on a busy machine the
    scheduler favours who has waited before, so nobody may always follow the same one. The first round warms up.

    A busy machine gets fewer rounds, at least ``least``: as many as end in time.
    """
    names, late = list(variants), time.monotonic() + _ENOUGH
    found: Found = {name: [] for name in names}
    for turn in range(turns + 1):
        shift = turn % len(names)
        for name in (names[shift:] + names[:shift])[::-1 if turn % 2 else 1]:
            dist.barrier()
            found[name].append(variants[name](turn))
        over = torch.tensor([float(time.monotonic() > late)])
        dist.all_reduce(over)
        if over.item() and turn >= least:
            break
    return {name: times[1:] for name, times in found.items()}


def column(found: Found, name: str, index: int = 0) -> list[float]:
    return [times[index] for times in found[name]]


def row(name: str, found: Found, ours: str, theirs: str, index: int = 0, target: float | None = None, note: str = "") -> Row:
    rounds = f"{len(found[ours])} rounds"
    return Row(name, column(found, ours, index), column(found, theirs, index), target, f"{rounds}; {note}" if note else rounds)


Scenario = Callable[[Path, bool], Iterator[Row]]


def scenarios(place: Path, quick: bool, only: str, known: Mapping[str, Scenario]) -> Iterator[Row]:
    """The rows of those scenarios whose name holds ``only``, each in a directory of its own that is gone afterwards."""
    for name, scenario in known.items():
        if only in name:
            folder = place / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield from scenario(folder, quick)
            shutil.rmtree(folder, ignore_errors=True)
