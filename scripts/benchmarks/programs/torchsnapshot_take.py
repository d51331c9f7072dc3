"""torchsnapshot's ``take`` and ``async_take``: a new directory per step."""

from __future__ import annotations

import importlib.metadata

import torch
from common import Peer, Pending, State, main
from torchsnapshot import Snapshot, StateDict


def start(place: str, state: State) -> Peer:
    app = {"state": StateDict(**{name: torch.from_numpy(array) for name, array in state.items()})}

    def sync(path: str, turn: int) -> None:
        Snapshot.take(path, app)

    def background(path: str, turn: int) -> Pending:
        return Pending(Snapshot.async_take(path, app).wait)

    return Peer(importlib.metadata.version("torchsnapshot"), {"sync": sync, "background": background})


if __name__ == "__main__":
    main(start)
