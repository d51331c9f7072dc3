"""The Lightning tests' ranks."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import torch

from distckpt.integrations.lightning import Checkpointing
from tests.fakegpu import FakeGpu
from tests.frameworks.lightning_nets import Loader, net_of, state_of, trainer_of
from tests.frameworks.stage import Stage
from tests.frameworks.story import Job, Told, digest


@functools.cache
def the_stage() -> Stage:
    """One for all test files: loading Lightning takes seconds. It ends with this process."""
    return Stage("tests.frameworks.lightning_job")


class Started(pl.Callback):
    """The step that ``fit`` went on from."""

    step = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step


class Gpu(pl.Callback):
    """From here on every tensor counts as one on a device, whose copies end late."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        manager = next(c for c in trainer.callbacks if isinstance(c, Checkpointing)).manager
        self.gpu = manager._behind.device = FakeGpu()


def train(rank: int, world: int, job: Job) -> Told:
    """The adapter of the story."""
    kind = job.extra.get("kind", "ddp")
    net = net_of(kind)
    torch.manual_seed(100 + rank)
    if not job.root:
        trainer = trainer_of(kind, world, job.steps)
        trainer.fit(net, Loader(rank))
        return Told(0, digest(state_of(trainer)))
    checkpointing = Checkpointing(job.root, save_every=job.every, keep_last=job.keep_last, seams=job.seams,
                                  background=job.background)
    mocked = [gpu := Gpu()] if kind == "fsdp1" else []
    trainer = trainer_of(kind, world, job.steps, started := Started(), checkpointing, *mocked)
    trainer.fit(net, Loader(rank), ckpt_path=checkpointing.ckpt_path)
    if mocked and job.background:
        assert gpu.gpu.waits >= len(range(max(started.step, 0), job.steps, job.every)), "nothing was copied from the device"
    return Told(started.step, digest(state_of(trainer)))
