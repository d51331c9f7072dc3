"""What the ranks of L4 write, and what must be read again: bytes that follow from step, rank and name alone."""

from __future__ import annotations

import random

from distckpt.testing import checker

WORLD = 2
_SIZES = {"model.bin": 192 << 10, "optim/state.bin": 96 << 10, "rng.bin": 3001}
SHARED = "config.json"


def bytes_of(step: int, rank: int, name: str) -> bytes:
    size = _SIZES.get(name, 700)
    return random.Random(f"{step}/{rank}/{name}").randbytes(size)


def names() -> list[str]:
    """What each rank writes for itself."""
    return sorted(_SIZES)


def on_disk(name: str, rank: int) -> str:
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.rank-{rank:05d}-of-{WORLD:05d}{dot}{suffix}"


def tree(step: int) -> dict[str, bytes]:
    """Every payload file of the checkpoint of ``step``."""
    files = {on_disk(name, rank): bytes_of(step, rank, name) for rank in range(WORLD) for name in names()}
    files[SHARED] = bytes_of(step, 0, SHARED)
    return files


def size() -> int:
    return sum(len(data) for data in tree(0).values())


def content(step: int) -> str:
    """As the checker tells contents apart."""
    return checker.content_of(tree(step))
