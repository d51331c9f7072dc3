"""What a payload knows of its tensors while training runs, found without collectives and without side effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distckpt.saving.arena import PLAIN, size_of
from distckpt.saving.staging import CONSTANT, pointer, tensors_of


@dataclass
class Live:
    """``steady`` tensors change only in a step of ``optimizers`` (with none: when the caller says so); ``moving`` ones at any
    time, as a buffer does in the forward pass. ``complete``: no tensor is missing that a first step will make."""

    steady: list[torch.Tensor] = field(default_factory=list)
    moving: list[torch.Tensor] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    complete: bool = True

    @property
    def size(self) -> int:
        """Bytes of an arena for them."""
        return size_of([*self.steady, *self.moving])

    @property
    def pointers(self) -> set[int]:
        """The memory that may still be copied while a step runs. Empty when an optimizer cannot be made to wait for it."""
        if not all(hasattr(o, "register_step_pre_hook") for o in self.optimizers):
            return set()
        found = {t.untyped_storage().data_ptr() if type(t) in PLAIN else pointer(t) for t in self.steady}
        return found - {pointer(t) for t in self.moving} - {0}


def live_of(payload: Any) -> Live | None:
    """What a payload says that can (``live() -> Live``). One that cannot is saved in the background all the same: its first copy
    meets cold memory, and nothing of it is left for later."""
    live = getattr(payload, "live", None)
    return live() if live is not None else None


def joined(parts: Iterable[Live | None]) -> Live:
    whole = Live()
    for part in parts:
        if part is None:
            continue
        whole.steady += part.steady
        whole.moving += part.moving
        whole.optimizers += part.optimizers
        whole.complete = whole.complete and part.complete
    return whole


def of_value(value: Any) -> Live:
    """Of a state dict, a module, an optimizer, or anything with ``state_dict``."""
    if isinstance(value, torch.nn.Module):
        return _of_module(value)
    if isinstance(value, torch.optim.Optimizer):
        return _of_optimizer(value)
    if isinstance(value, (Mapping, torch.Tensor)):
        return Live(steady=tensors_of(dict(value) if isinstance(value, Mapping) else value))
    return Live(moving=tensors_of(value.state_dict())) if hasattr(value, "state_dict") else Live()


def _of_module(module: torch.nn.Module) -> Live:
    """Where ``named_parameters`` finds them, without the names: it is asked in the call of every save that overlaps."""
    found = Live()
    modules, known = [module], {id(module)}
    for inner in modules:
        found.steady += [p if type(p) in PLAIN else _local(p) for p in inner._parameters.values() if p is not None]
        if inner._buffers:
            passing = inner._non_persistent_buffers_set
            found.moving += [_local(b) for name, b in inner._buffers.items() if b is not None and name not in passing]
        for child in inner._modules.values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                modules.append(child)
    return found


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Live:
    """An optimizer makes its state in its first step, and a few make none at all."""
    found: list[torch.Tensor] = []
    for one in optimizer.state.values():
        for value in one.values() if type(one) is dict else [one]:
            if type(value) in PLAIN:
                found.append(value)
            elif type(value) not in CONSTANT:
                found += tensors_of(value)
    return Live(steady=found, optimizers=[optimizer], complete=bool(optimizer.state))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local
