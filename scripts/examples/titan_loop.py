"""A torchtitan-style loop: a checkpointer with a config of its own, around DCP, for a model sharded by FSDP2.

    torchrun --nproc-per-node 2 scripts/examples/titan_loop.py ROOT STEPS

torchtitan's checkpointer keeps ``interval``, ``keep_latest_k`` and ``load``/``save(step)``; what changes here is who says that
a checkpoint exists.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import distckpt


class Checkpointer:
    @dataclass
    class Config:
        folder: str
        interval: int = 5
        keep_latest_k: int = 3

    def __init__(self, config: Config, model: Any, optimizer: Any, states: dict[str, Any]) -> None:
        self.model, self.optimizer, self.states = model, optimizer, states
        self.manager = distckpt.CheckpointManager(config.folder, save_every=config.interval, keep_last=config.keep_latest_k)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, **self.states}

    def load(self) -> int:
        """The step to go on from: the same on every rank. DCP reshards for another number of ranks."""
        found = self.manager.resume().checkpoint
        if found is None:
            return 0
        state = self.state()
        dcp.load(state, checkpoint_id=found.path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return found.step

    def save(self, step: int, last_step: bool = False) -> bool:
        """Whether to stop. Every rank calls it after every step."""
        todo = self.manager.poll(step)
        if todo.save or last_step:
            with self.manager.saving(step, on_exists="skip") as files:
                if not files.skipped:
                    dcp.save(self.state(), checkpoint_id=files.path)
        return todo.stop

    def close(self) -> None:
        self.manager.close()


class Progress:
    """torchtitan's TrainState: what else a loop counts, as a Stateful that DCP stores."""

    def __init__(self) -> None:
        self.tokens = 0

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": torch.tensor(self.tokens)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = int(state["tokens"])


def main(folder: str, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    progress = Progress()
    config = Checkpointer.Config(folder, interval=2, keep_latest_k=2)
    checkpointer = Checkpointer(config, model, optimizer, {"progress": progress})
    step = begun = checkpointer.load()
    while step < steps:
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        step += 1
        progress.tokens += 8 * dist.get_world_size()
        if checkpointer.save(step, last_step=step == steps):
            break
    checkpointer.close()
    total = sum(p.full_tensor().double().sum().item() for p in model.parameters())
    print(f"from {begun} to {step}: {progress.tokens} tokens, weights {total.hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
