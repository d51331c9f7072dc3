"""Files of tensors, read straight into the tensors that wait for them: no second copy of the state in memory, and no first touch
of new memory, which costs more than the read.

A file is described first: what it holds, each tensor as one on the device "meta", whose storage says where in the file it
begins. Only for what is plainly the same on both sides; everything else is loaded as always.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from distckpt.durable import PIECE, Opened, read_at
from distckpt.payloads import loadable
from distckpt.reread import Reread
from distckpt.runtime import SYSTEM
from distckpt.together import together

_WORTH = 16 << 10
"""Bytes of a tensor, on average, from which on it pays: to describe one takes as long as to read so many."""
_READERS = 4
_SCRATCH = 8 << 20

Describe = Callable[[Opened], Any]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Rooms = list[tuple[int, Bytes]]


def read(target: Mapping[Any, Any], files: Sequence[Opened], describe: Describe) -> list[Any] | None:
    """What each of ``files`` holds, with tensors of ``target``, which have the values of the file by then, in the place of its
    own. None, and nothing was touched, when they must be loaded as a whole.

    The digests of all files were found right before this is called, so that one that is damaged leaves the state as it was.
    """
    tensors = _tensors(target)
    if not tensors or sum(tensor.numel() * tensor.element_size() for tensor in tensors) < _WORTH * len(tensors):
        return None
    found: list[Any] = []
    rooms: list[Rooms] = []
    for file in files:
        pairs: Pairs = []
        value = describe(file)
        if value is None or not _match(target, value, pairs):
            return None
        found.append(_placed(target, value))
        rooms.append([room_of(tensor, fake) for tensor, fake in pairs])
    if overlap(rooms):
        return None
    for file, of_file in zip(files, rooms, strict=True):
        pour(file, of_file)
    return found


def beginning(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """``tensor``, on the device "meta", as one whose bytes begin at ``offset`` of its file."""
    storage: Any = tensor.untyped_storage()
    storage._checkpoint_offset = offset
    return tensor


def alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the bytes of ``source``, a tensor described, are those of ``target`` when it has the same values."""
    return (_plain(target) and type(target) is not FakeTensor and target.device.type == "cpu" and _plain(source)
            and hasattr(source.untyped_storage(), "_checkpoint_offset")
            and target.dtype == source.dtype and target.shape == source.shape)


def room_of(target: torch.Tensor, source: torch.Tensor) -> tuple[int, Bytes]:
    """Where in its file ``source``, which is ``alike``, begins, and the memory of ``target``."""
    storage: Any = source.untyped_storage()  # its offset is torch's own to say
    begins = int(storage._checkpoint_offset) + int(source.storage_offset()) * source.element_size()
    return begins, target.detach().reshape(-1).view(torch.uint8).numpy()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _match(target: Any, source: Any, pairs: Pairs) -> bool:
    """Whether every tensor of ``source`` has one like it in ``target``; they are added to ``pairs``."""
    if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
        pairs.append((target, source))
        return alike(target, source)
    if isinstance(target, Mapping) and isinstance(source, dict):
        return all(_match(target.get(key), item, pairs) for key, item in source.items())
    return all(type(leaf) in loadable.PLAIN for leaf in tree_leaves(source))  # a storage, say, was only described as well


def _plain(tensor: torch.Tensor) -> bool:
    """Whether its values stand in memory, or in the file, one after the other and as they are."""
    return (type(tensor) in (torch.Tensor, torch.nn.Parameter, FakeTensor) and tensor.layout is torch.strided
            and not tensor.is_quantized and not tensor.is_conj() and not tensor.is_neg() and tensor.is_contiguous())


def _placed(target: Any, source: Any) -> Any:
    """``source``, which matches, with the tensors of ``target`` for its own."""
    if isinstance(source, torch.Tensor):
        return target
    if isinstance(target, Mapping) and isinstance(source, dict):
        for key, item in source.items():  # in place, because a module's state dict carries the versions of its parts (_metadata)
            source[key] = _placed(target.get(key), item)
    return source


def overlap(rooms: Sequence[Rooms]) -> bool:
    """Whether two tensors share memory and not the bytes that go there: which of them comes last would be luck."""
    spans = sorted({(room.ctypes.data, len(room), number, offset)
                    for number, of_file in enumerate(rooms) for offset, room in of_file if len(room)})
    return any(one[0] + one[1] > other[0] for one, other in pairwise(spans))


# -- the bytes -----------------------------------------------------------------------------------------------------------


def pour(file: Opened, rooms: Rooms) -> None:
    """Read the bytes of ``file`` from each offset on into its room.

    Several threads read what is in memory, as the file is where its digest was just compared. From the first piece on that is
    not, one reads the rest: it waits for the disk, which is slower for several readers of one file.
    """
    again = getattr(file, "raw", None)
    source = again if isinstance(again, Reread) else None
    piece = source.piece if source is not None else PIECE
    wanted: dict[int, Rooms] = {}
    for offset, room in rooms:
        done = 0
        while done < len(room):
            index, skip = divmod(offset + done, piece)
            part = room[done:done + piece - skip]
            wanted.setdefault(index, []).append((skip, part))
            done += len(part)
    spare: list[bytearray] = []
    missed: list[int] = []

    def take(index: int, wait: bool) -> bool:
        if source is None:
            return all(_straight(file, index * piece + skip, part, wait) for skip, part in wanted[index])
        scratch = spare.pop() if spare else bytearray(piece)
        try:
            view = source.take(index, memoryview(scratch), wait)
            if view is None:
                return False
            whole = np.frombuffer(view, np.uint8)
            for skip, part in wanted[index]:
                np.copyto(part, whole[skip:skip + len(part)])  # it is compared by now; and the interpreter is not held
            return True
        finally:
            spare.append(scratch)

    def in_memory(index: int) -> bool:
        if missed:
            return False
        if take(index, False):
            return True
        missed.append(index)
        return False

    order = sorted(wanted)
    readers = min(_READERS, torch.get_num_threads(), max(1, _SCRATCH // piece))
    if readers > 1 and not isinstance(file, io.BytesIO):
        order = [index for index, done in zip(order, together(SYSTEM, in_memory, order, readers), strict=True) if not done]
    for index in order:
        take(index, True)


def _straight(file: Opened, offset: int, room: Bytes, wait: bool) -> bool:
    count = read_at(file, room.data, offset, wait)
    if count < len(room) and wait:
        raise OSError(errno.EIO, f"it ends {len(room) - count} bytes before a tensor does")
    return count == len(room)
