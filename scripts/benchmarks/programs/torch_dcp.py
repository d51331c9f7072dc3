"""torch.distributed.checkpoint: a new directory per step; in the background by a thread, its staging memory kept."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Peer, Pending, State, main
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


def start(place: str, state: State) -> Peer:
    dist.init_process_group("gloo", init_method=f"file://{os.path.abspath(place)}/meet", rank=0, world_size=1)
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    kept = DefaultStager(StagingOptions(False, False, False, False))
    overlapped = DefaultStager(StagingOptions(False, False, True, False))

    def sync(path: str, turn: int) -> None:
        dcp.save(tensors, checkpoint_id=path)

    def background(path: str, turn: int) -> Pending:
        return Pending(dcp.async_save(tensors, checkpoint_id=path, async_stager=kept).result)

    def overlap(path: str, turn: int) -> Pending:
        response = dcp.async_save(tensors, checkpoint_id=path, async_stager=overlapped)
        return Pending(response.upload_completion.result, response.staging_completion.result)

    return Peer(torch.__version__, {"sync": sync, "background": background, "overlap": overlap})


if __name__ == "__main__":
    main(start)
