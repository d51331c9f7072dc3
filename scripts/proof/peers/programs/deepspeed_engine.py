"""DeepSpeed, ZeRO stage 1. Its rule: ``load_checkpoint`` without a tag reads the file ``latest`` and takes what it names."""

from __future__ import annotations

import os
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from common import SAVES, Run, main
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from state import WORLD, model

SLOW = float(os.environ.get("PEER_SLOW", "0"))
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
          "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.1}}}


def session(run: Run) -> None:
    if SLOW and run.rank == run.world - 1:
        _slow_down()
    net, _ = model()
    deepspeed.init_distributed("gloo")
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)[0]
    for number in range(1, SAVES + 1):
        engine.backward(engine(torch.randn(4, 16)).square().mean())
        engine.step()
        engine.save_checkpoint(run.root, tag=f"global_step{number}")
        dist.barrier()
        run.ack(number)


def _slow_down() -> None:
    save = TorchCheckpointEngine.save

    def late(self: TorchCheckpointEngine, *args: object, **kwargs: object) -> object:
        time.sleep(SLOW)  # the disk of this rank is slow: that is what this row is about
        return save(self, *args, **kwargs)

    TorchCheckpointEngine.save = late


def pick(root: str) -> str | None:
    try:
        with open(os.path.join(root, "latest")) as pointer:
            tag = pointer.read().strip()
    except FileNotFoundError:
        return None
    return os.path.join(root, tag)


if __name__ == "__main__":
    main(deepspeed.__version__, session, pick, WORLD, distributed=True)
