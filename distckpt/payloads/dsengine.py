"""What a DeepSpeed engine is and does, asked without importing DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch

from distckpt.errors import ConfigError
from distckpt.payloads.base import Ranks
from distckpt.saving.staging import pointer, tensors_of

# Hybrid engines write weights in forward; ZenFlow, SuperOffload and Muon write moments before or beside their optimizer's step.
# What is none of these is copied before training goes on. dskinds.overlaps shows the race: a step follows the save at once.
_ENGINES = ("DeepSpeedEngine", "PipelineEngine")
_WRAPPERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "FP16_Optimizer",
             "FP16_UnfusedOptimizer")


def at_boundary(engine: Any) -> bool:
    """Whether the last micro step ended a step. Who counts on its own (Accelerate) has told the engine."""
    told = getattr(engine, "_is_gradient_accumulation_boundary", None)
    if told is not None:
        return bool(told)
    return int(engine.micro_steps) % int(engine.gradient_accumulation_steps()) == 0


def stepped(engine: Any) -> tuple[list[Any], set[int]]:
    """The torch optimizers inside ``engine``, and the memory that nothing changes before one of them begins a step: weights (its
    wrapper derives them from what was stepped), their fp32 partitions and moments. Nothing, where that is not known."""
    basic, wrapper = engine.basic_optimizer, engine.optimizer
    if (not isinstance(basic, torch.optim.Optimizer) or "muon" in type(basic).__name__.lower()
            or type(engine).__name__ not in _ENGINES or wrapper is not basic and type(wrapper).__name__ not in _WRAPPERS):
        return [], set()
    optimizers = [basic, *filter(None, [getattr(wrapper, "backup_optimizer", None)])]  # the latter steps what is not offloaded
    tensors = list(engine.module.parameters())
    for optimizer in optimizers:
        tensors += [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [*optimizer.state, *tensors_of(list(optimizer.state.values()))]  # ZeRO-3 empties the groups between steps
    buffers = {pointer(b) for b in engine.module.buffers()}
    return optimizers, {pointer(t) for t in tensors} - buffers - {0}


def is_spread(engine: Any) -> bool:
    """Whether another number of ranks would need other files."""
    return bool(engine.zero_optimization() or hasattr(engine.optimizer, "dp_process_group") or engine.has_moe_layers
                or hasattr(engine.module, "ckpt_layer_path") or engine.mp_world_size > 1)


def check_step(steps: int, ranks: Ranks) -> None:
    if ranks.step is not None and ranks.step != steps:
        raise ConfigError(f"save of step {ranks.step}: engine.global_steps is {steps}, and a DeepSpeed engine goes on from that "
                          "one; pass it as the step")
