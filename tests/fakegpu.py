"""A mocked GPU: copies from it finish late, and until their event has been waited for the destination reads as poison.

Every tensor counts as one on the device. A copy takes its values at the moment of ``copy`` if the source is left alone until
the event; a source that is changed before that shows through, as it does with a real side stream.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from distckpt.saving.staging import Device

POISON = 0xA5


class FakeGpu(Device):
    """Take the place of ``Device`` in a manager: ``manager._behind.device = FakeGpu()``."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.begun = self.events = self.waits = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def begin(self, sources: Iterable[torch.Tensor]) -> None:
        self.begun += 1

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.begun, "the side stream was never ordered after the training's"
        if target.numel():
            target.reshape(-1).view(torch.uint8).fill_(POISON)
        self.under_way.append((target, source))

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self, len(self.under_way))


class FakeEvent:
    def __init__(self, gpu: FakeGpu, upto: int) -> None:
        self._gpu, self._upto = gpu, upto

    def wait(self) -> None:
        """The copies before this event, and no others, are done."""
        self._gpu.waits += 1
        for target, source in self._gpu.under_way[:self._upto]:
            target.copy_(source)
        del self._gpu.under_way[:self._upto]


def poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor.reshape(-1).view(torch.uint8) == POISON).all())
