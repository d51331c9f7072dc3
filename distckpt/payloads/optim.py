"""The state of optimizers by parameter name, as it is.

torch's helpers fill an optimizer that made no step yet by a step over zeros. On a save that changes the training that is
being saved (Adam counts the step). On a load it makes the room to load into, and is left out where gradients are left
from before: then nothing would be loaded, silently. And a parameter that never got a gradient has no state to load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict


def state_of(model: Any, optimizers: Sequence[Any]) -> dict[str, Any]:
    """What is there to save; nothing is changed."""
    with _as_they_are(optimizers):
        return dict(get_optimizer_state_dict(model, list(optimizers)))


def room_for(model: Any, optimizers: Sequence[Any], stored: Collection[str], prefix: str) -> dict[str, Any]:
    """A state to load into: of the parameters that ``stored``, the keys of a checkpoint, has a state of."""
    with _gradients_aside(optimizers):
        found: dict[str, Any] = dict(get_optimizer_state_dict(model, list(optimizers)))
    found["state"] = {name: slots for name, slots in found["state"].items()
                      if any(f"{prefix}.state.{name}.{slot}" in stored for slot in slots)}
    return found


def put_back(model: Any, optimizers: Sequence[Any], state: dict[str, Any]) -> None:
    """The loaded ``state`` into ``optimizers``; one that was saved before its first step is as new."""
    if state["state"]:
        set_optimizer_state_dict(model, list(optimizers), state, options=StateDictOptions(strict=False))
        return
    for optimizer in optimizers:
        optimizer.state.clear()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, saved in zip(groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@contextmanager
def _as_they_are(optimizers: Sequence[Any]) -> Iterator[None]:
    """torch takes a single gradient for a sign that a missing state is meant."""
    lent = []
    for optimizer in optimizers:
        mine = _parameters(optimizer)
        if mine and not optimizer.state and all(p.grad is None for p in mine):
            lent.append(min(mine, key=lambda p: p.numel()))
    for parameter in lent:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter in lent:
            parameter.grad = None


@contextmanager
def _gradients_aside(optimizers: Sequence[Any]) -> Iterator[None]:
    aside = [(p, p.grad) for optimizer in optimizers if not optimizer.state for p in _parameters(optimizer)]
    for parameter, _ in aside:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient
