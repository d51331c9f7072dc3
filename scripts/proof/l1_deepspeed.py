"""DeepSpeed in L1: the real engine, ZeRO-2, with a rank 1 whose disk is slow."""

from __future__ import annotations

import functools
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from distckpt.payloads.deepspeed import DeepSpeed

_SLOW = 0.3


def load() -> None:
    """Once, before the ranks are forked: what ``deepspeed.initialize`` would import in each of them, under strace."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name in ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo"):
        import_module(name)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at its first use


@functools.cache
def _engine(rank: int) -> Any:
    import deepspeed
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 4)
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.1}}})[0]
    if rank == 1:
        save = TorchCheckpointEngine.save

        def late(self: Any, *args: Any, **options: Any) -> Any:
            time.sleep(_SLOW)  # the disk of this rank is slow: that is what this scenario is about
            return save(self, *args, **options)

        TorchCheckpointEngine.save = late
    return engine


def payload(number: int, rank: int) -> DeepSpeed:
    """An engine after one more step."""
    engine = _engine(rank)
    torch.manual_seed(number)
    engine.backward(engine(torch.randn(4, 16)).square().mean())
    engine.step()
    return DeepSpeed(engine)


def holds(path: str, rank: int) -> bool:
    """Whether DeepSpeed's files there have the weights and the optimizer's share of this engine as it is."""
    engine, files = _engine(rank), {file.name: file for file in Path(path).rglob("*.pt")}
    model = torch.load(files["mp_rank_00_model_states.pt"], weights_only=False)["module"]
    share = torch.load(next(file for name, file in files.items() if f"zero_pp_rank_{rank}_" in name), weights_only=False)
    mine = engine.optimizer.single_partition_of_fp32_groups
    theirs = share["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    return all(torch.equal(model[name], tensor) for name, tensor in engine.module.state_dict().items()) and \
        all(torch.equal(one, other[:one.numel()]) for one, other in zip(theirs, mine, strict=True))
