"""ravex on moonclip, its default: all of it happens in the loop that it decorates, one optimizer step for each save."""

from __future__ import annotations

import importlib.metadata
import os
import sys

import ravex
import torch
from common import Peer, Pending, State, main


def start(place: str, state: State) -> Peer:
    model = torch.nn.ParameterDict({name: torch.from_numpy(array) for name, array in state.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    snapshots, seen = f"{place}/store/snapshots", set[str]()

    def save() -> None:
        ravex.track(model, optimizer)  # again each time, which is harmless: it holds them weakly, and here they are held
        optimizer.step()  # which saves: checkpoint_every=1, and there is no DataLoader whose next batch it would wait for

    def flush() -> None:
        ravex.flush()
        there = set(os.listdir(snapshots))
        if not there - seen:
            raise RuntimeError(f"ravex saved nothing: {ravex.status()}")
        seen.update(there)

    def sync(path: str, turn: int) -> None:
        save()
        flush()

    def background(path: str, turn: int) -> Pending:
        save()
        return Pending(flush)

    return Peer(importlib.metadata.version("ravex"), {"sync": sync, "background": background}, f"{place}/store")


if __name__ == "__main__":
    store = {"type": "local", "path": f"{sys.argv[1]}/store"}
    ravex.train_loop(checkpoint_every=1, backend="moonclip", keep_last=2, resume=False, storage=store,
                     fallback_on_error=False)(main)(start)
