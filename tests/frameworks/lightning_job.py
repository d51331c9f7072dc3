"""The Lightning tests' ranks."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import torch

from distckpt.integrations.lightning import Checkpointing
from tests.frameworks.lightning_nets import Loader, Net, Sharded, state_of, trainer_of
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


def train(rank: int, world: int, job: Job) -> Told:
    """The adapter of the story."""
    kind = job.extra.get("kind", "ddp")
    net = Sharded() if kind.startswith("fsdp2") else Net()
    torch.manual_seed(100 + rank)
    if not job.root:
        trainer = trainer_of(kind, world, job.steps)
        trainer.fit(net, Loader(rank))
        return Told(0, digest(state_of(trainer)))
    checkpointing = Checkpointing(job.root, save_every=job.every, keep_last=job.keep_last, seams=job.seams,
                                  background=job.background)
    trainer = trainer_of(kind, world, job.steps, started := Started(), checkpointing)
    trainer.fit(net, Loader(rank), ckpt_path=checkpointing.ckpt_path)
    return Told(started.step, digest(state_of(trainer)))
