"""A file of torch.save's, read straight into the tensors that wait for it: no second copy of the state in memory, and no first
touch of new memory, which costs more than the read.

The offsets are torch's own: a load in fake mode reads the description of the tensors and not their bytes, and says where in the
file each begins. Only for what is plainly the same on both sides; everything else is loaded as always.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Mapping
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from distckpt.durable import PIECE, Opened
from distckpt.payloads import loadable

log = logging.getLogger(__name__)

_WORTH = 256 << 10
"""Bytes of a tensor, on average, from which on it pays: to describe one in fake mode takes as long as to read so many."""

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def fill(target: dict[Any, Any], file: Opened, what: str) -> bool:
    """Put what torch.save wrote into ``file``, whose bytes were verified, into ``target``, as ``loadable.fill`` would; False, and
    nothing was touched, when it must be loaded as a whole."""
    tensors = [leaf for leaf in tree_leaves(target) if isinstance(leaf, torch.Tensor)]
    if not tensors or not all(_plain(tensor, torch.Tensor) and tensor.device.type == "cpu" for tensor in tensors):
        return False
    if sum(tensor.nbytes for tensor in tensors) < _WORTH * len(tensors) or not _as_in_memory(file):
        return False
    file.seek(0)
    try:
        with FakeTensorMode():
            described = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # fake mode does not know all that torch saves; a load as a whole says what is wrong with the rest
        log.debug("%s is loaded as a whole: %s", what, error)
        return False
    pairs: Pairs = []
    if not _match(target, described, pairs):
        return False
    for tensor, fake in pairs:
        storage: Any = fake.untyped_storage()
        _read(file, storage._checkpoint_offset + fake.storage_offset() * fake.element_size(), tensor)
    loadable.fill(target, described, what, lambda tensor, fake: None)
    return True


def _as_in_memory(file: Opened) -> bool:
    """Whether the bytes of its tensors stand in ``file`` as they would in this machine's memory. ``torch.load`` reads a zip that
    somebody compressed, and other byte orders, as well."""
    file.seek(0)
    try:
        if torch._C.PyTorchFileReader(file).get_record("byteorder") != sys.byteorder.encode():
            return False
        file.seek(0)
        with ZipFile(file) as archive:
            return all(entry.compress_type == ZIP_STORED for entry in archive.infolist())
    except (RuntimeError, BadZipFile):  # it names no order, or is of torch.save's format before the zip
        return False


def _match(target: Any, source: Any, pairs: Pairs) -> bool:
    """Whether every tensor of ``source`` has one like it in ``target``; they are added to ``pairs``."""
    if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
        pairs.append((target, source))
        return _plain(source, FakeTensor) and target.dtype == source.dtype and target.shape == source.shape
    if isinstance(target, dict) and isinstance(source, Mapping):
        return all(_match(target.get(key), item, pairs) for key, item in source.items())
    return all(type(leaf) in loadable.PLAIN for leaf in tree_leaves(source))  # a storage, say, was only described as well


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
