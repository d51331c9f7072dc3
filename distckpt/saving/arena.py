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

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Tensors that are values and nothing else, by their exact class."""

ALIGN = 64
_PAGE = 4096
_PIECE = 64 << 20


class NoRoom(Exception):
    """What is to be staged does not fit."""


class _Cut:
    """A tensor over a part of the block, which is used up to ``end`` with it; ``ready``: the next that is given out of it."""

    __slots__ = ("dtype", "end", "ready", "room", "shape")

    def __init__(self, end: int, dtype: torch.dtype, shape: torch.Size, room: torch.Tensor) -> None:
        self.end, self.dtype, self.shape, self.room = end, dtype, shape, room
        self.ready: torch.Tensor | None = None

    def give(self) -> torch.Tensor:
        """Whoever asks for gradients of it, or sets something on it, does so with his own."""
        given, self.ready = self.ready, None
        return self.room.detach() if given is None else given


class Arena:
    """A block of host memory from which tensors are cut, in the order in which they are copied.

    ``pin``: for copies from a GPU. ``shared``: another process can map it, by the file descriptor ``handle``.
    """

    def __init__(self, pin: bool = False, shared: bool = False) -> None:
        self._pin, self._shared = pin, shared
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = self._count = 0
        self._cuts: list[_Cut] = []
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
        self._cuts = []
        self._block = torch.empty(0, dtype=torch.uint8)

    def rewind(self) -> None:
        """The next cut is the first. What was cut before is known again, as a state mostly looks as it did: to make a tensor over
        the block costs as much as all else that a save does for it."""
        self._used = self._count = 0

    def ready(self) -> None:
        """Make what the next cuts are likely to give out, on a thread that holds nobody up; between two saves' cuts only."""
        for cut in self._cuts:
            cut.ready = cut.room.detach()

    def cut(self, like: torch.Tensor) -> torch.Tensor:
        """Room for the values of ``like``, contiguous, of its dtype and shape, with a storage of its own: of a slice of the
        block, ``torch.save`` would write the whole block into every file."""
        count, begun, dtype, shape = self._count, self._used, like.dtype, like.shape
        self._count = count + 1
        if count < len(self._cuts):
            cut = self._cuts[count]
            if cut.dtype is dtype and cut.shape == shape:
                self._used = cut.end
                return cut.give()
            del self._cuts[count:]  # behind another one their memory may not be free: a cut is known by all those before it, too
        start, length = -(-begun // ALIGN) * ALIGN, like.nbytes
        self._used = start + length
        if self._used > self.size:
            raise NoRoom(f"the staging arena holds {self.size} bytes and {self._used} are needed")
        room = (torch.frombuffer(self._block.numpy(), dtype=dtype, offset=start, count=like.numel()).view(shape) if length
                else torch.empty(shape, dtype=dtype))
        self._cuts.append(_Cut(self._used, dtype, shape, room))
        return self._cuts[-1].give()

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
    """What two names of one tensor have in common: the same bytes, read in the same way (``z.conj()`` is a view of the bytes of
    ``z``, and so is the imaginary part of it, which is negated when it is read)."""
    where = tensor.untyped_storage().data_ptr()  # raises for what has no bytes of its own, such as a wrapper of other tensors
    if not where:
        return id(tensor)
    read = tensor.is_conj(), tensor.is_neg()
    return where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, read


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
