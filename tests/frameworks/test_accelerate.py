"""Accelerate's save_state and load_state through us, on real ranks: DDP and FSDP2 on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from tests.frameworks.stage import Stage
from tests.frameworks.story import Job, Story, Told, digest

pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    found = Stage("accelerate", "torch.distributed.fsdp", "distckpt.integrations.accelerate", "distckpt.payloads.accelerator")
    yield found
    found.close()


def prepared(rank: int, kind: str = "ddp", **options: Any) -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    if kind.startswith("fsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap",
            state_dict_type="FULL_STATE_DICT" if kind == "fsdp-full" else "SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    torch.manual_seed(rank)
    return accelerator, model, optimizer, scheduler


def train(rank: int, world: int, job: Job) -> Told:
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, model, optimizer, scheduler = prepared(rank, job.extra.get("kind", "ddp"))

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        scheduler.step()

    def end(started: int) -> Told:
        state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        return Told(started, digest([state, scheduler.state_dict(), torch.get_rng_state()]))

    if not job.root:
        for _ in range(job.steps):
            step()
        return end(0)
    with distckpt.CheckpointManager(job.root, save_every=job.every, keep_last=job.keep_last, seams=job.seams) as manager:
        checkpoints = Checkpointing(accelerator, manager)
        started = done = checkpoints.restore() or 0
        while done < job.steps:
            if checkpoints.poll(done).save:
                checkpoints.save(done, background=job.background)
            step()
            done += 1
        checkpoints.save(done, on_exists="skip")
    return end(started)


@pytest.mark.xdist_group("accelerate")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_story(stage: Stage, tmp_path: Path, kind: str) -> None:
    story = Story(stage, train, tmp_path, extra={"kind": kind})
    plain = story.plain()
    for background in (False, True):
        story.whole(plain, background)
