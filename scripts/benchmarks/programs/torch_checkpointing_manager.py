"""torch_checkpointing: a new directory per step; in the background its checkpoint process, with its lock as the fence."""

from __future__ import annotations

import importlib.metadata

import torch
from common import Peer, Pending, State, main
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def start(place: str, state: State) -> Peer:
    items = {"state": {name: torch.from_numpy(array) for name, array in state.items()}}

    def manager(config: CheckpointManager.Config) -> CheckpointManager:
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # with it saves end with EINVAL
        return config.build()

    at_once = manager(CheckpointManager.Config.with_sync_save())
    behind = manager(CheckpointManager.Config.with_async_save())

    def sync(path: str, turn: int) -> None:
        at_once.save(path, items)

    def overlap(path: str, turn: int) -> Pending:
        written = behind.save(path, items)
        assert written is not None

        def fence() -> None:
            with behind.lock():
                pass

        return Pending(written.result, fence)

    return Peer(importlib.metadata.version("torch-checkpointing"), {"sync": sync, "overlap": overlap}, close=behind.close)


if __name__ == "__main__":
    main(start)
