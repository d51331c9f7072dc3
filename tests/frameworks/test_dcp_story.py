"""FSDP2 and FSDP1 tell the common story by TrainState (DDP tells it in test_story.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import distckpt
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import Job, Story, Told, digest, loop


def train(rank: int, world: int, job: Job) -> Told:
    torch.manual_seed(7)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    if job.extra["kind"] == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).float().square().mean().backward()
        optimizer.step()
        scheduler.step()

    def end(started: int) -> Told:
        """This rank's own pieces of everything."""
        pieces = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        moments = [{k: getattr(v, "_local_tensor", v) for k, v in state.items()} for state in optimizer.state.values()]
        return Told(started, digest([pieces, moments, scheduler.state_dict(), torch.rand(1)]))

    return end(loop(job, distckpt.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, rng=True), step))


stage = staged("torch.distributed.fsdp")


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_B11_ranks_that_die_at_different_points_of_a_sharded_save(kind: str, stage: Stage, tmp_path: Path) -> None:
    """B11: the newest folder is not trusted; the restart needs no hand."""
    plain = Story(stage, train, tmp_path / "plain", extra={"kind": kind}).plain()
    for background in (False, True):
        Story(stage, train, tmp_path, extra={"kind": kind}).whole(plain, background)
