"""Each framework's own loader reads what distckpt committed, in a program that never imports it (Lightning's is in
test_lightning.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("deepspeed", reason="needs DeepSpeed")

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch.distributed.checkpoint import FileSystemWriter

import distckpt
from distckpt.payloads import dcp, torchfile
from tests.frameworks import alone
from tests.frameworks.stage import ENVIRONMENT, EXTENSIONS, Stage, staged

pytestmark = pytest.mark.xdist_group("alone")


stage = staged("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "deepspeed",
               "deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo", "distckpt.integrations.transformers",
               "distckpt.integrations.accelerate", "torch.distributed.fsdp")


@contextmanager
def by_its_own(kind: str, rank: int, saves: int) -> Iterator[None]:
    """In so many saves the framework's own writer writes each shard once, and none of ours serialises anything."""
    with mock.patch.object(FileSystemWriter, "write_data", autospec=True, side_effect=FileSystemWriter.write_data) as by_dcp, \
            mock.patch.object(TorchCheckpointEngine, "save", autospec=True, side_effect=TorchCheckpointEngine.save) as by_ds, \
            mock.patch.object(torchfile, "write") as ours, mock.patch.object(dcp, "write_state") as ours_too:
        yield
    assert by_dcp.call_count == (2 * saves if kind == "fsdp2" else 0), "the model and the optimizer"
    assert by_ds.call_count == ((2 - rank) * saves if kind == "deepspeed" else 0), "rank 0's weights, everybody's optimizer"
    assert not ours.called and not ours_too.called


def by_accelerate(rank: int, world: int, root: str, kind: str) -> str:
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, model, optimizer = alone.accelerated(kind)
    torch.manual_seed(rank)
    accelerator.backward(model(torch.randn(4, 8)).square().mean())
    optimizer.step()
    with by_its_own(kind, rank, 2), distckpt.CheckpointManager(root) as manager:
        Checkpointing(accelerator, manager).save(3)
        Checkpointing(accelerator, manager).save(4, background=True)
    return alone.of_accelerated(model, optimizer)


def by_trainer(rank: int, world: int, root: str, kind: str) -> str:
    from transformers import Trainer

    from distckpt.integrations.transformers import CrashSafe

    class MyTrainer(CrashSafe, Trainer):
        pass

    alone.before(kind)
    trainer = MyTrainer(model=alone.tiny(), args=alone.arguments(root, **alone.TRAINERS[kind]), train_dataset=alone.rows())
    with by_its_own(kind, rank, 3):
        trainer.train()
    return alone.of_trainer(trainer)


def by_deepspeed(rank: int, world: int, root: str) -> str:
    made = alone.engine()
    torch.manual_seed(rank)
    with distckpt.CheckpointManager(root) as manager:
        for _ in range(2):
            made.backward(made(torch.randn(4, 8)).square().mean())
            made.step()
            manager.save(made.global_steps, distckpt.TrainState(model=made, rng=True), background=True)
    return alone.of_engine(made)


def by_dcp(rank: int, world: int, root: str, kind: str) -> str:
    model, optimizer = alone.spread(kind)
    torch.manual_seed(rank)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    with distckpt.CheckpointManager(root) as manager:
        manager.save(4, distckpt.TrainState(model=model, optimizer=optimizer, rng=True), background=True)
    return alone.of_spread(model, optimizer)


SAVERS: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "accelerate": (by_accelerate, ("ddp",), "step-4"), "transformers": (by_trainer, ("ddp",), "checkpoint-4"),
    **{f"accelerate-{kind}": (by_accelerate, (kind,), "step-4") for kind in ("fsdp2", "deepspeed")},
    **{f"transformers-{kind}": (by_trainer, (kind,), "checkpoint-4") for kind in ("fsdp2", "deepspeed")},
    "deepspeed": (by_deepspeed, (), ""), **{kind: (by_dcp, (kind,), "step-4") for kind in ("ddp", "fsdp2", "fsdp1")},
}


def test_each_frameworks_own_loader_reads_it_in_a_program_without_distckpt(stage: Stage, tmp_path: Path) -> None:
    """To the last bit, on every rank: weights, optimizer, random states."""
    saved = {name: stage.values(2, save, str(tmp_path / name), *more) for name, (save, more, _) in SAVERS.items()}
    wanted = [f"{name}={tmp_path / name / where}" for name, (_, _, where) in SAVERS.items()]
    environment = {"TORCH_EXTENSIONS_DIR": EXTENSIONS, **os.environ, **ENVIRONMENT}
    done = subprocess.run([sys.executable, "-m", "tests.frameworks.alone", str(tmp_path / "out"), *wanted], capture_output=True,
                          text=True, timeout=200, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-6000:]
    for name in SAVERS:
        assert [(tmp_path / f"out.{name}.{rank}").read_text() for rank in range(2)] == saved[name], name
