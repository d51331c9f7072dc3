"""The host memory that background saves are copied into: made and touched once, used again by every save.

The first touch of memory costs ten times a warm copy. One set is enough: a save waits for the one in flight before it copies.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Hashable, Iterable
from typing import Any

import torch

log = logging.getLogger(__name__)

ALIGN = 64
_PAGE = 4096
_PIECE = 64 << 20


class NoRoom(Exception):
    """What is to be staged does not fit."""


class Arena:
    """A block of host memory from which tensors are cut, in the order in which they are copied.

    ``pin``: for copies from a GPU. ``shared``: another process can map it, by the file descriptor ``handle``.
    """

    def __init__(self, pin: bool = False, shared: bool = False) -> None:
        self._pin, self._shared = pin, shared
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._cuts: dict[int, torch.Tensor] = {}
        self._cuts_before: dict[int, torch.Tensor] = {}
        self._release: Any = None
        self.handle = -1
        self.version = 0

    @property
    def size(self) -> int:
        return self._block.numel()

    def reserve(self, size: int) -> None:
        """Make room for ``size`` bytes and touch every page of it, so that the next copy meets no fault."""
        if size <= self._block.numel():
            return
        self.close()  # the old block goes before the new one comes
        if self._shared:
            self.handle = os.memfd_create("distckpt-arena", os.MFD_CLOEXEC)
            os.ftruncate(self.handle, size)
            self._block = torch.frombuffer(mmap.mmap(self.handle, size), dtype=torch.uint8)
        else:
            self._block = torch.empty(size, dtype=torch.uint8)
        self.version += 1
        pages = self._block.numpy()
        for start in range(0, size, _PIECE):  # one thread, and without the interpreter's lock
            pages[start:start + _PIECE:_PAGE] = 0
        pinned = self._pin and _register(self._block)
        self._release = weakref.finalize(self, _drop, self._block.data_ptr() if pinned else 0, self.handle)

    def close(self) -> None:
        """Give the memory back."""
        if self._release is not None:
            self._release()
        self._release, self.handle = None, -1
        self._cuts, self._cuts_before = {}, {}
        self._block = torch.empty(0, dtype=torch.uint8)

    def rewind(self) -> None:
        """The next cut is the first. What was cut since the last time is known again, as a state mostly looks as it did: to make
        a tensor over the block takes a third of what a save costs training for each."""
        self._used = 0
        self._cuts, self._cuts_before = {}, self._cuts

    def cut(self, like: torch.Tensor) -> torch.Tensor:
        """Room for the values of ``like``, contiguous, of its dtype and shape, with a storage of its own: of a slice of the
        block, ``torch.save`` would write the whole block into every file."""
        length = like.numel() * like.element_size()
        start = -(-self._used // ALIGN) * ALIGN
        self._used = start + length
        if self._used > self._block.numel():
            raise NoRoom(f"the staging arena holds {self._block.numel()} bytes and {self._used} are needed")
        if not length:
            return torch.empty(like.shape, dtype=like.dtype)
        room = self._cuts_before.get(start)
        if room is None or room.dtype != like.dtype or room.shape != like.shape:
            room = torch.frombuffer(self._block.numpy(), dtype=like.dtype, offset=start, count=like.numel()).view(like.shape)
        self._cuts[start] = room
        return room.detach()  # whoever asks for gradients of it, or sets something on it, does so with his own

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Where in the block ``tensor`` stands; None when it does not."""
        start = tensor.data_ptr() - self._block.data_ptr()
        return start if tensor.numel() and 0 <= start < self.size else None


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of an arena that holds ``tensors``, one that comes up twice (tied weights) once."""
    total = 0
    for tensor in {identity(t): t for t in tensors}.values():
        total = -(-total // ALIGN) * ALIGN + tensor.numel() * tensor.element_size()
    return total


def identity(tensor: torch.Tensor) -> Hashable:
    """What two names of one tensor have in common."""
    where = tensor.untyped_storage().data_ptr()
    return (where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype) if where else id(tensor)


def _register(block: torch.Tensor) -> bool:
    """Pin memory that is there: torch's own pinned memory is rounded up to a power of two."""
    code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0))  # type: ignore[no-untyped-call]
    if code:
        log.warning("the staging memory (%d bytes) could not be pinned (CUDA error %d): copies from the GPU are slower; check "
                    "'ulimit -l'", block.numel(), code)
    return code == 0


def _drop(pinned: int, handle: int) -> None:
    if pinned:
        torch.cuda.cudart().cudaHostUnregister(pinned)  # type: ignore[no-untyped-call]
    if handle >= 0:
        os.close(handle)
