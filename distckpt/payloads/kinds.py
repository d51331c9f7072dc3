"""What a training loop holds, told apart without importing the framework it comes from.

An engine shards its optimizer in a way of its own, so it is recognised by its class and saved by the payload that knows it.
A module is a module whatever wraps it (DDP, FSDP1, FSDP2): DCP sees through that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distckpt.errors import ConfigError
from distckpt.payloads.base import Payload

_ENGINES: dict[tuple[str, str], tuple[str, str]] = {
    ("deepspeed", "DeepSpeedEngine"): ("distckpt.payloads.deepspeed", "DeepSpeed"),
    ("accelerate", "Accelerator"): ("distckpt.payloads.accelerator", "AcceleratorState"),
}
"""(package, class), a base class included, to (module, payload), which is made of the object alone."""

_MODULE = ("named_parameters", "state_dict")
_OPTIMIZER = ("state_dict", "load_state_dict", "param_groups")


def engine_of(value: Any) -> Payload | None:
    """The payload of a framework's engine, made of it; None when ``value`` is none."""
    for kind in type(value).__mro__:
        known = _ENGINES.get((kind.__module__.partition(".")[0], kind.__name__))
        if known is not None:
            module, name = known
            payload: Payload = getattr(import_module(module), name)(value)
            return payload
    return None


def check_module(value: Any, where: str) -> None:
    lacks = lacking(value, _MODULE)
    if lacks:
        raise ConfigError(f"{where} takes a torch module (plain, DDP or FSDP) or a framework's engine, not a {_name(value)}: it "
                          f"lacks {lacks}; what has state_dict() and load_state_dict() can be saved under a keyword of its own")


def check_optimizers(value: Any, where: str) -> None:
    """``value``: None, an optimizer, or several in a list."""
    for one in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
        lacks = lacking(one, _OPTIMIZER)
        if lacks:
            raise ConfigError(f"{where} takes a torch optimizer or a list of them, not a {_name(one)}: it lacks {lacks}")


def is_sharded(value: Any) -> bool:
    """Whether DCP must write it, as it does the model: a module, or a dict that holds tensors with a layout over the ranks."""
    return isinstance(value, torch.nn.Module) or isinstance(value, dict) and any(isinstance(v, DTensor) for v in _leaves(value))


def is_alike(value: Any) -> bool:
    """Whether its state is the same on all ranks by what it is: a schedule, or a loss scale, which is agreed on in each step."""
    return isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value


def lacking(value: Any, names: tuple[str, ...]) -> str:
    """Which of ``names`` an object does not have, in words; empty when it has all."""
    return " and ".join(f"{name}()" if name != "param_groups" else name for name in names if not hasattr(value, name))


def _name(value: Any) -> str:
    return type(value).__name__
