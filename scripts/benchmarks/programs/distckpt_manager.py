"""distckpt: Shards, one checkpoint kept."""

from __future__ import annotations

import torch
from common import Peer, Pending, Save, State, main

import distckpt


def start(place: str, state: State) -> Peer:
    manager = distckpt.CheckpointManager(f"{place}/root", keep_last=1)
    shards = distckpt.Shards({name: torch.from_numpy(array) for name, array in state.items()})

    def sync(path: str, turn: int) -> None:
        manager.save(turn, shards)

    def behind(staging: str) -> Save:
        def save(path: str, turn: int) -> Pending:
            manager.save(turn, shards, background=True, staging=staging)
            return Pending(manager.wait, manager.staged)

        return save

    def rest() -> None:
        assert manager._owned is not None
        manager._owned.janitor.wait(60)

    modes: dict[str, Save] = {"sync": sync, "background": behind("copy"), "overlap": behind("overlap")}
    return Peer(distckpt.__version__, modes, f"{place}/root", durable=True, rest=rest, close=manager.close)


if __name__ == "__main__":
    main(start)
