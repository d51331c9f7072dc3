"""torch_checkpointing, synchronous saves, a new directory per step. It has no rule for resuming, but the rename to the final
name is its commit, so this is the highest step."""

from __future__ import annotations

import importlib.metadata
import os
import re

import torch
from common import SAVES, Run, main
from state import model, step
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def session(run: Run) -> None:
    net, optimizer = model()
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # with it, saves on ext4 and XFS end with EINVAL
    manager = config.build()
    for number in range(1, SAVES + 1):
        step(net, optimizer)
        manager.save(os.path.join(run.root, f"step_{number}"), {"net": net.state_dict(), "optimizer": optimizer.state_dict()})
        run.ack(number)


def pick(root: str) -> str | None:
    names = [name for name in os.listdir(root) if re.fullmatch(r"step_\d+", name)]
    return os.path.join(root, max(names, key=lambda name: int(name[5:]))) if names else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(importlib.metadata.version("torch-checkpointing"), session, pick)
