"""Python's garbage collector, while rank 0 deals with the reports of very many ranks, or their plans of very many tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 1024


@contextmanager
def held_off(many: int) -> Iterator[None]:
    """No collection inside, for as many ranks, or tensors, as make one: what is decoded here is enough to have the collector walk
    all that the process holds, torch included, with the interpreter held meanwhile (0.2 s each time; eight ninths of the time to
    decode DCP's metadata of 64,000 tensors).

    Only around what computes: a wait for a disk or a rank may be long, and the training goes on and makes garbage.
    Whoever has turned it off, as large jobs do, finds it off.
    """
    if many < _MANY or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
