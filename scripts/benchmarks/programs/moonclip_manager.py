"""moonclip: a store of its own, its two newest snapshots kept. It saves in the background; "sync" flushes at once."""

from __future__ import annotations

import importlib.metadata

import torch
from common import Peer, Pending, State, main
from moonclip import CheckpointManager


def start(place: str, state: State) -> Peer:
    model = torch.nn.ParameterDict({name: torch.from_numpy(array) for name, array in state.items()}).requires_grad_(False)
    manager = CheckpointManager(f"{place}/store", world_size=1, rank=0, max_total_snapshots=2)

    def sync(path: str, turn: int) -> None:
        manager.save(step=turn, model=model)
        manager.flush()

    def background(path: str, turn: int) -> Pending:
        manager.save(step=turn, model=model)
        return Pending(manager.flush)

    return Peer(importlib.metadata.version("moonclip"), {"sync": sync, "background": background}, f"{place}/store")


if __name__ == "__main__":
    main(start)
