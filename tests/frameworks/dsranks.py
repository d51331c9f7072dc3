"""What the DeepSpeed tests run on each rank: a small engine of any kind, and a loop."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch

import distckpt
from distckpt.payloads.deepspeed import DeepSpeed
from tests.frameworks.story import Job, Told, digest

MICRO, WIDTH = 2, 16

LOADED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.pipe", "torch._dynamo")
"""For a stage: what ``deepspeed.initialize`` would import in every rank anew, which takes longer than a test."""

# An all-reduce for the ranks of one CPU, which DeepSpeed compiles at first use: minutes, and a build that is killed leaves a
# lock that every later one waits for. Without it, gloo's is used.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def config(stage: int = 2, **more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}, **more}


def net() -> torch.nn.Module:
    # Every parameter divides by two: DeepSpeed never initialises what it pads with, so its files differ there from run to run.
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2))


def engine(stage: int = 2, model: torch.nn.Module | None = None, **more: Any) -> Any:
    deepspeed.init_distributed("gloo")
    model = net() if model is None else model
    made = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad],
                                config=config(stage, **more))[0]
    torch.manual_seed(int(os.environ["RANK"]))
    return made


def step(made: Any, kind: torch.dtype = torch.float32) -> None:
    """One optimizer step: two micro steps."""
    for _ in range(made.gradient_accumulation_steps()):
        micro(made, kind)


def micro(made: Any, kind: torch.dtype = torch.float32) -> None:
    made.backward(made(torch.randn(MICRO, WIDTH, dtype=kind)).float().square().mean())
    made.step()


def final(made: Any) -> str:
    """Of the weights and the optimizer, whatever the stage: what the engine itself would save."""
    return digest(DeepSpeed(made).tree()["files"])


def train(rank: int, world: int, job: Job) -> Told:
    """The story's adapter: an engine of ``job.extra["stage"]`` by TrainState."""
    made = engine(job.extra["stage"])
    if not job.root:
        for _ in range(job.steps):
            step(made)
        return Told(0, final(made))
    state = distckpt.TrainState(model=made, rng=True)
    with distckpt.CheckpointManager(job.root, save_every=job.every, keep_last=job.keep_last, seams=job.seams) as manager:
        started = manager.restore(state) or 0
        while made.global_steps < job.steps:
            if manager.poll(made.global_steps).save:
                manager.save(made.global_steps, state, background=job.background)
            step(made)
        manager.save(made.global_steps, state, on_exists="skip")
    return Told(started, final(made))
