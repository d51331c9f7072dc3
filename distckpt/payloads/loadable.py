"""What ``torch.load(weights_only=True)`` will take back, checked at save and named by key.

A state that cannot be loaded is found out when it is too late; so it is refused when it is still in memory.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping
from pickle import PickleError
from typing import Any

import torch

from distckpt.errors import ConfigError

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def check(value: Any, what: str) -> None:
    """ConfigError naming the first key under ``what`` whose value could not be loaded again. Local."""
    bad = _first_bad(value, what)
    if bad is not None:
        where, found = bad
        kind = f"{type(found).__module__}.{type(found).__qualname__}"
        raise ConfigError(f"{where} is a {kind}, which torch.load(weights_only=True) refuses at resume: store tensors, "
                          "numbers, text, lists and dicts (numpy arrays by torch.from_numpy, objects by their state_dict)")


def _first_bad(value: Any, where: str) -> tuple[str, Any] | None:
    kind = type(value)
    if kind in PLAIN or kind in _TENSORS:
        return None
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            bad = _first_bad(key, f"{where}, key {key!r}") or _first_bad(item, f"{where}[{key!r}]")
            if bad is not None:
                return bad
        return None
    if kind in (list, tuple, set):
        for index, item in enumerate(value):
            bad = _first_bad(item, f"{where}[{index}]")
            if bad is not None:
                return bad
        return None
    return None if _survives(value) else (where, value)


def _survives(value: Any) -> bool:
    """Whether one value of a rare type (a DTensor, say) makes the trip; tried, since torch's list of types grows."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (PickleError, RuntimeError, TypeError, AttributeError, ValueError, ImportError, LookupError):
        return False  # whatever the reason, this value would not come back
    return True


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target is source:  # it was read in place
        return
    with torch.no_grad():
        target.copy_(source)


def fill(target: Any, source: Any, what: str) -> Any:
    """Put ``source`` into ``target`` where that can be done in place (tensors, dicts), and give what stands there then."""
    if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
        if target.shape != source.shape:
            raise ConfigError(f"{what} has shape {tuple(target.shape)} here and {tuple(source.shape)} in the checkpoint")
        _copy(target, source)
        return target
    if isinstance(target, dict) and isinstance(source, Mapping):
        for key in [k for k in target if k not in source]:
            del target[key]
        for key, item in source.items():
            target[key] = fill(target[key], item, f"{what}[{key!r}]") if key in target else item
        return target
    return source
