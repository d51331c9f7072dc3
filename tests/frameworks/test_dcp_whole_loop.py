"""All that a real loop holds, by TrainState and DCP, on real gloo ranks: tied and frozen parameters, mixed precision, two
optimizers with their schedulers, a loss scale, an average of the weights. It comes back on 4, 2 and 1 ranks; sharded and
replicated at once (HSDP), too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import distckpt
from tests.frameworks.story import digest
from tests.harness import run, values

FULL = StateDictOptions(full_state_dict=True)


class Tied(torch.nn.Module):
    """A small language model whose head is its embedding, with a block that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 8)
        self.frozen = torch.nn.Linear(8, 8)
        self.block = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.embedding(tokens)
        found: torch.Tensor = self.head(self.norm(torch.relu(self.block(self.frozen(hidden)))))
        return found


class Loop:
    def __init__(self, kind: str, world: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = self._wrapped(kind, world)
        self.model, self.kind = model, kind
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.optimizers = [torch.optim.AdamW([p for name, p in named if "block" not in name], lr=0.1),
                           torch.optim.SGD([p for name, p in named if "block" in name], lr=0.1, momentum=0.9)]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        if kind in ("fsdp2", "hsdp"):
            self.average: Any = {name: p.detach().clone() for name, p in model.named_parameters()}
        elif kind == "ddp":
            self.average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        else:  # FSDP1 is not to be copied: an average is a module of its own, sharded alike
            self.average = self._wrapped(kind, world)
            self.average.load_state_dict(model.state_dict())

    @staticmethod
    def _wrapped(kind: str, world: int) -> Any:
        model: Any = Tied()
        half = torch.bfloat16
        if kind in ("fsdp2", "hsdp"):
            replicas = min(world, 2)
            mesh = init_device_mesh("cpu", (world,)) if kind == "fsdp2" else init_device_mesh(
                "cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
            fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=half))
        elif kind == "fsdp1":
            how: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True,
                                   "mixed_precision": MixedPrecision(param_dtype=half)}
            model.block = FullyShardedDataParallel(model.block, **how)  # torch takes one optimizer for each unit of FSDP1
            model = FullyShardedDataParallel(model, **how)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
        return model

    def state(self) -> distckpt.TrainState:
        return distckpt.TrainState(model=self.model, optimizer=self.optimizers, scheduler=self.schedulers[0],
                                   second=self.schedulers[1], scaler=self.scaler, average=self.average)

    def step(self, number: int) -> None:
        """Data that are the same on all ranks, so that the number of ranks makes no difference."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(12, (4, 5), generator=generator)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "ddp"):
            loss = self.model(tokens).float().square().mean()
        self.scaler.scale(loss).backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            self.scaler.step(optimizer)
            scheduler.step()
        self.scaler.update()
        if isinstance(self.average, AveragedModel):
            self.average.update_parameters(self.model.module)
        elif self.kind == "fsdp1":
            with torch.no_grad():
                for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
        else:
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter.detach(), 0.1)

    def digest(self) -> str:
        """Of everything, unsharded."""
        average = {name: tensor.full_tensor() for name, tensor in self.average.items()} if isinstance(
            self.average, dict) else get_model_state_dict(self.average, options=FULL)
        return digest([get_model_state_dict(self.model, options=FULL), average, self.scaler.state_dict(),
                       get_optimizer_state_dict(self.model, self.optimizers, options=FULL),
                       [s.state_dict() for s in self.schedulers]])


KINDS = ["fsdp2", "hsdp", "fsdp1", "ddp"]


def _go_on(rank: int, world: int, folder: str, first: int, last: int) -> dict[str, tuple[str, str, int]]:
    """{kind: (digest as it was restored, digest after the steps to ``last``, forward passes counted)}"""
    found = {}
    for kind in KINDS:
        loop = Loop(kind, world, seed=first)
        with distckpt.CheckpointManager(f"{folder}/{kind}") as manager:
            if first == 0:
                manager.save(0, loop.state())
            loop = Loop(kind, world, seed=first + 1)
            assert manager.restore(loop.state()) == first, kind
            before = loop.digest() if first else ""
            for step in range(first, last):
                loop.step(step)
            manager.save(last, loop.state(), background=bool(last % 2))
            module: Any = loop.model
            assert module.head.weight is module.embedding.weight if kind in ("fsdp2", "hsdp") else True
            found[kind] = before, loop.digest(), int(get_model_state_dict(loop.model)["seen"])
        dist.barrier()
    return found


def _plain_torch(rank: int, world: int, folder: str, step: int) -> dict[str, bool]:
    """The framework's own loader: no line of distckpt runs."""
    found = {}
    for kind in KINDS:
        loop = Loop(kind, world, seed=5)
        state = {"model": get_model_state_dict(loop.model)}
        dcp.load(state, checkpoint_id=f"{folder}/{kind}/step-{step}")
        found[kind] = int(state["model"]["seen"]) == step
    return found


def test_a_whole_loop_goes_on_at_4_2_4_2_and_1_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path)
    before: dict[str, Any] = {}
    for world, first, last in ((4, 0, 3), (2, 3, 5), (4, 5, 6), (2, 6, 7), (1, 7, 8)):
        told = values(run(world, _go_on, folder, first, last))
        for kind in KINDS:
            where = f"{kind}, {world} ranks, from step {first}"
            restored, after, seen = told[0][kind]
            assert all(t[kind] == told[0][kind] for t in told), f"{where}: ranks differ"
            assert not first or restored == before[kind], f"{where}: it is not what was saved"
            assert seen == last, where
            before[kind] = after
    for found in values(run(2, _plain_torch, folder, 8)):
        assert all(found.values()), found
    straight = values(run(2, _straight, 8))
    for kind in KINDS:
        assert straight[0][kind] == before[kind], f"{kind}: an uninterrupted run on 2 ranks ends elsewhere"


def _straight(rank: int, world: int, last: int) -> dict[str, str]:
    found = {}
    for kind in KINDS:
        loop = Loop(kind, world, seed=0)
        for step in range(last):
            loop.step(step)
        found[kind] = loop.digest()
    return found
