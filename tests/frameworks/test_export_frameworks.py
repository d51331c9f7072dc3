"""``distckpt export`` of what Accelerate, Transformers and Lightning wrote, on two ranks of the real frameworks: the weights that
were in the model, under the names that the framework stored them by."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel

import distckpt
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import Job
from tests.support import Command

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("lightning")

pytestmark = pytest.mark.xdist_group("export")


stage = staged("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "distckpt.integrations.transformers",
               "distckpt.integrations.accelerate", "tests.frameworks.lightning_job", "deepspeed",
               "deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo")


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
            for name, value in model.state_dict().items()}


def by_accelerate(rank: int, world: int, root: str, kind: str) -> dict[str, torch.Tensor]:
    from distckpt.integrations.accelerate import Checkpointing
    from tests.frameworks.test_accelerate import prepared

    accelerator, model, optimizer, _ = prepared(rank, kind)
    accelerator.backward(model(torch.randn(4, 8)).square().mean())
    optimizer.step()
    with distckpt.CheckpointManager(root) as manager:
        Checkpointing(accelerator, manager).save(1)
    return _whole(model)


def by_trainer(rank: int, world: int, root: str, kind: str) -> dict[str, torch.Tensor]:
    from tests.frameworks.alone import TRAINERS, before
    from tests.frameworks.test_transformers import made

    before(kind)
    trainer = made(root, Job(), max_steps=2, **TRAINERS[kind])
    trainer.train()
    return _whole(trainer.model)


def by_lightning(rank: int, world: int, root: str, kind: str) -> dict[str, torch.Tensor]:
    from distckpt.integrations.lightning import Checkpointing
    from tests.frameworks.lightning_nets import Loader, net_of, trainer_of

    checkpointing = Checkpointing(root)
    trainer = trainer_of(kind, world, 2, checkpointing)
    net = net_of(kind)
    trainer.fit(net, Loader(rank), ckpt_path=checkpointing.ckpt_path)
    with FullyShardedDataParallel.summon_full_params(trainer.model) if kind == "fsdp1" else nullcontext():
        found = _whole(net)
    dist.barrier()
    return found


WRITERS = {"accelerate": by_accelerate, "trainer": by_trainer, "lightning": by_lightning}


@pytest.mark.parametrize(("writer", "kind", "said"), [
    ("accelerate", "ddp", "model (Hugging Face)"),
    ("accelerate", "fsdp2", "pytorch_model_fsdp_0/model (DCP)"),
    ("accelerate", "fsdp-full", "pytorch_model_fsdp (Hugging Face)"),
    ("accelerate", "deepspeed", "pytorch_model/module (DeepSpeed)"),
    ("trainer", "ddp", "model (Hugging Face)"),
    ("trainer", "fsdp2", "pytorch_model_fsdp_0/model (DCP)"),
    ("trainer", "deepspeed", "model (Hugging Face)"),
    ("lightning", "ddp", "checkpoint.ckpt/state_dict (Lightning)"),
    ("lightning", "fsdp2", "checkpoint.ckpt/state_dict (DCP)"),
    ("lightning", "fsdp1", "checkpoint.ckpt/model (DCP)"),
    ("lightning", "fsdp2-full", "checkpoint.ckpt/state_dict (Lightning)"),
])
def test_what_a_framework_saved_is_exported_as_it_stood_in_the_model(
        writer: str, kind: str, said: str, stage: Stage, command: Command, tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "m.safetensors"
    first, second = stage.values(2, WRITERS[writer], str(root), kind)
    told = command("export", root, out)
    assert told.code == 0, told.err
    assert f": {said}, " in told.out, told
    found = load_file(out)
    for name, value in found.items():
        name = name if name in first else f"module.{name}"
        assert torch.equal(value, first[name]) and torch.equal(value, second[name]), name
    tied = {"lm_head.weight"} if (writer, kind) == ("trainer", "ddp") else set()  # safetensors has tied weights once
    assert len(found) == len(first) - len(tied & set(first)), (sorted(found), sorted(first))
    if (writer, kind) == ("trainer", "deepspeed"):  # the shards as well hold the whole
        assert command("export", root, tmp_path / "shards.safetensors", "--part", "global_step2/module").code == 0
        shards = load_file(tmp_path / "shards.safetensors")
        assert shards and all(torch.equal(value, found[name]) for name, value in shards.items())
