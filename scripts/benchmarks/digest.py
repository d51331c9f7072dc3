"""What the digests of a durable save cost: row 16 of the issue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import distckpt
from scripts.benchmarks.report import DISK, Row
from scripts.benchmarks.rounds import Found, ranks, rotate, row, scenarios
from scripts.benchmarks.subjects import WORLD, Ours, share


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"digest": _digest})


def _rank(rank: int, world: int, place: str, size: int, turns: int) -> Found:
    state = distckpt.Shards(share(size))
    with ExitStack() as stack:
        return rotate({name: Ours(stack, f"{place}/{name}", state, digest=digest).synchronous
                       for name, digest in (("on", "xxh3-128"), ("off", None))}, turns)


def _digest(place: Path, quick: bool) -> Iterator[Row]:
    size = 64 << 20 if quick else 512 << 20
    found = ranks(_rank, str(place), size, 2 if quick else DISK)
    yield row(f"digest on / off, {size >> 20} MB, {WORLD} ranks", found, "on", "off", 1, 1.05, case=16)
