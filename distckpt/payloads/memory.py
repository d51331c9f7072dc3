"""Copies of what a framework gives to its writers, made when it gives it: a hook may put other weights in, save, and put the
training's back, all within one save. The memory is kept for the next save.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distckpt.runtime import SYSTEM
from distckpt.saving.arena import Arena, identity, size_of
from distckpt.saving.staging import Copy, Device, tensors_of

log = logging.getLogger(__name__)

LARGE = 1 << 20
"""Bytes of tensors from which on a state is copied; a smaller one is written as fast."""


class Memory:
    """An arena for each state of a save, in the order in which they come, which is the same in each save of a training."""

    def __init__(self) -> None:
        self._arenas: list[Arena] = []
        self._used = 0
        self._device = Device()

    @property
    def size(self) -> int:
        return sum(arena.size for arena in self._arenas)

    def begin(self) -> None:
        """The copies of the save before are not needed any more."""
        self._used = 0

    def end(self) -> None:
        """No more copies in this save: memory that it did not need goes."""
        del self._arenas[self._used:]

    def copy(self, value: Any) -> Any:
        """``value`` as it is now; None for one that is better written at once: small, or not fit to be copied."""
        if not _is_plain(value):
            return None
        tensors = tensors_of(value)
        if size_of(tensors) < LARGE or _overlap(tensors):
            return None
        if self._used == len(self._arenas):
            self._arenas.append(Arena(pin=torch.cuda.is_available()))
        try:
            copied = Copy(SYSTEM, self._device, check=False).begin(value, self._arenas[self._used], set())
        except (TypeError, AttributeError, NotImplementedError) as error:  # something in it refuses to be copied
            log.debug("written at once, as it cannot be copied: %s", error)
            return None
        self._used += 1
        for before, after in zip(tensors, tensors_of(copied), strict=True):
            if before.requires_grad:  # it is written, too
                after.requires_grad_()
        return copied


def _is_plain(value: Any) -> bool:
    """Whether a copy would be written as ``value`` is: no tensors but those that are values and nothing else, and no containers
    that staging does not look into."""
    if isinstance(value, torch.Tensor):
        local = value._local_tensor if type(value) is DTensor else value
        return (type(local) is torch.Tensor and local.layout is torch.strided
                and not (local.is_quantized or local.is_conj() or local.is_neg())
                and (local is value or not value.requires_grad)
                and _extent(local) >= local.nbytes)
    if type(value) in (dict, OrderedDict):
        return all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return not isinstance(value, (dict, list, tuple)) or isinstance(value, torch.Size)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last value; less than all of them together where some are one (``expand``)."""
    if not tensor.numel():
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def _overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether two of them are different views of one piece of memory, which copies would part."""
    spans: dict[Hashable, tuple[int, int]] = {
        identity(t): (t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors if t.numel()}
    end = 0
    for start, stop in sorted(spans.values()):
        if start < end:
            return True
        end = stop
    return False
