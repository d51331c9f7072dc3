"""Real text that ships with Python: the sources of its standard library. One rank's share of it, resumable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

LIMIT = 4 << 20


def read() -> bytes:
    """The library's top-level modules, one after the other, up to ``LIMIT`` bytes."""
    parts, size = [], 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= LIMIT:
            break
    return b"".join(parts)[:LIMIT]


class Loader:
    """Batches of ``length + 1`` bytes, in an order that is shuffled anew each epoch; every rank takes its own batches.

    What it is to resume by is two numbers, and every rank has its own: a loader that started over would show the model
    the same text again.
    """

    def __init__(self, length: int, batch: int, rank: int, world: int, seed: int = 7) -> None:
        data = torch.frombuffer(bytearray(read()), dtype=torch.uint8)
        self._blocks = data[:len(data) // (length + 1) * (length + 1)].view(-1, length + 1)
        self._batch, self._rank, self._world, self._seed = batch, rank, world, seed
        self._epoch, self._taken = 0, 0
        self._order = self._shuffle()

    def _shuffle(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)  # its own: the global one is dropout's
        return torch.randperm(len(self._blocks), generator=generator)[self._rank::self._world]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(bytes, the byte after each)."""
        if self._taken + self._batch > len(self._order):
            self._epoch, self._taken = self._epoch + 1, 0
            self._order = self._shuffle()
        rows = self._blocks[self._order[self._taken:self._taken + self._batch]].long()
        self._taken += self._batch
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._taken = state["epoch"], state["taken"]
        self._order = self._shuffle()
