"""A file of torch.save's, read straight into the tensors that wait for it: no second copy of the state in memory, and no first
touch of new memory, which costs more than the read.

The offsets are torch's own: a load in fake mode reads the description of the tensors and not their bytes, and says where in the
file each begins. Only for what is plainly the same on both sides; everything else is loaded as always.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from distckpt.durable import PIECE, Opened
from distckpt.payloads import loadable

_WORTH = 256 << 10
"""Bytes of a tensor, on average, from which on it pays: to describe one in fake mode takes as long as to read so many."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def fill(target: dict[Any, Any], file: Opened, what: str) -> bool:
    """Put what torch.save wrote into ``file``, whose bytes were verified, into ``target``, as ``loadable.fill`` would; False, and
    nothing was touched, when it must be loaded as a whole."""
    tensors = [leaf for leaf in tree_leaves(target) if isinstance(leaf, torch.Tensor)]
    if not tensors or sum(tensor.nbytes for tensor in tensors) < _WORTH * len(tensors) or not _same_byte_order(file):
        return False
    file.seek(0)
    with FakeTensorMode():
        described = torch.load(file, weights_only=True, map_location="cpu")
    pairs: Pairs = []
    if not _match(target, described, pairs):
        return False
    for tensor, fake in pairs:
        storage: Any = fake.untyped_storage()
        _read(file, storage._checkpoint_offset + fake.storage_offset() * fake.element_size(), tensor)
    loadable.fill(target, described, what, lambda tensor, fake: None)
    return True


def _same_byte_order(file: Opened) -> bool:
    file.seek(0)
    try:
        return torch._C.PyTorchFileReader(file).get_record("byteorder") == sys.byteorder.encode()
    except RuntimeError:  # it names none, or is of torch.save's format before the zip
        return False


def _match(target: Any, source: Any, pairs: Pairs) -> bool:
    """Whether every tensor of ``source`` has one like it in ``target``; they are added to ``pairs``."""
    if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
        pairs.append((target, source))
        return (_plain(target, torch.Tensor) and target.device.type == "cpu" and _plain(source, FakeTensor)
                and target.dtype == source.dtype and target.shape == source.shape)
    if isinstance(target, dict) and isinstance(source, Mapping):
        return all(_match(target.get(key), item, pairs) for key, item in source.items())
    return not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(source))


def _plain(tensor: torch.Tensor, kind: type[torch.Tensor]) -> bool:
    """Whether its values stand in memory, or in the file, one after the other and as they are."""
    return (type(tensor) in (kind, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
            and not tensor.is_conj() and not tensor.is_neg() and tensor.is_contiguous())


def _read(file: Opened, offset: int, tensor: torch.Tensor) -> None:
    room = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    file.seek(offset)
    done = 0
    while done < len(room):
        count = file.readinto(room[done:done + PIECE])
        if not count:
            raise OSError(errno.EIO, f"it ends {len(room) - done} bytes before a tensor does")
        done += count
