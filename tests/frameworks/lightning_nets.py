"""What the Lightning tests train: a small net with dropout on data that differs by rank, by a loader that knows its place.

Nothing of distckpt is imported here: a test reads its checkpoints with this module alone.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.fsdp import FullyShardedDataParallel

BATCHES = 4


class Loader:
    """Batches of this rank; ``state_dict`` is its place, as in a loader that Lightning can resume in the middle of an epoch."""

    def __init__(self, rank: int, batches: int = BATCHES) -> None:
        self._rank, self._batches, self._next, self._epoch = rank, batches, 0, 0

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._next >= self._batches:  # Lightning counts, and does not ask for the end
            self._next, self._epoch = 0, self._epoch + 1
        while self._next < self._batches:
            made = torch.Generator().manual_seed(1000 * self._rank + 10 * self._epoch + self._next)
            self._next += 1
            yield torch.randn(4, 8, generator=made)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next, self._epoch = state["next"], state["epoch"]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Sharded(Net):
    """FSDP2, as a user of ModelParallelStrategy writes it."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Flat(Net):
    """FSDP1, as a user of FSDPStrategy writes it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=0.01)


class OnCpu(FSDPStrategy):
    """Lightning refuses a CPU for the class itself, and torch unless it is told."""

    def _setup_model(self, model: Any) -> Any:
        init = FullyShardedDataParallel.__init__

        def on_cpu(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **{**options, "device_id": torch.device("cpu")})

        with mock.patch.object(FullyShardedDataParallel, "__init__", on_cpu):
            return super()._setup_model(model)


def net_of(kind: str) -> Net:
    return {"fsdp1": Flat, "fsdp2": Sharded, "fsdp2-full": Sharded}.get(kind, Net)()


def strategy_of(kind: str, world: int) -> Strategy | str:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if kind in ("fsdp2", "fsdp2-full"):
        return ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo",
                                     save_distributed_checkpoint=kind == "fsdp2")
    if kind == "fsdp1":
        return OnCpu(state_dict_type="sharded", process_group_backend="gloo")
    assert kind == "one"
    return "auto"


def trainer_of(kind: str, world: int, steps: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "plugins": [LightningEnvironment()],
               "num_sanity_val_steps": 0, "strategy": strategy_of(kind, world), **options}
    return pl.Trainer(max_steps=steps, accelerator="cpu", devices=world, callbacks=list(callbacks),
                      enable_checkpointing=bool(callbacks), **options)


def state_of(trainer: pl.Trainer) -> Any:
    """This rank's part of everything that was trained."""
    def local(value: Any) -> Any:
        return value.to_local() if hasattr(value, "to_local") else value

    module = trainer.lightning_module
    return [{name: local(p) for name, p in module.named_parameters()},
            [{k: local(v) for k, v in slots.items()} for optimizer in trainer.optimizers for slots in optimizer.state.values()],
            [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs], torch.get_rng_state()]
