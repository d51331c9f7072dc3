"""One state in several files, so that those whose tensors did not change can be linked (``dedup="link"``).

Each file is one of its format: a nested dict of some of the state's tensors, under the names that they have in the whole. Who
reads them without us loads each and merges the dicts.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from distckpt.checkpoint import Checkpoint
from distckpt.layout import check_member_path

_LEAST = 1 << 20
_FILES = 128
_DICTS = (dict, OrderedDict)

Path = tuple[Any, ...]
T = TypeVar("T")


def name(file: str, index: int) -> str:
    """What the piece ``index`` of ``file`` is called: ``model.pt``, ``model.part-00001.pt`` ..."""
    stem, suffix = os.path.splitext(file)
    return check_member_path(f"{stem}.part-{index:05d}{suffix}") if index else file


def names(checkpoint: Checkpoint, file: str, rank: int | None = None) -> Iterator[str]:
    """The manifest's names of all pieces of what this rank, or ``rank``, wrote as ``file``."""
    index, found = 0, checkpoint.name_of(file, rank)
    while index == 0 or checkpoint.has(found):
        yield found
        index += 1
        found = checkpoint.name_of(name(file, index), rank)


def split(state: Any) -> list[Any]:
    """``state`` in pieces that ``merge`` joins: a large tensor by itself, small ones together in the order in which they come.
    The first piece holds what is left, and all that is no plain tensor. Equal shapes give equal pieces."""
    units: dict[Hashable, list[tuple[Path, torch.Tensor]]] = {}
    for path, tensor in _tensors(state, ()):
        # names of one memory stay in one file, where their format stores it once
        units.setdefault(tensor.untyped_storage().data_ptr() or path, []).append((path, tensor))
    _, groups = grouped([(unit, unit[0][1].untyped_storage().nbytes()) for unit in units.values()])
    if not groups:
        return [state]
    full = [[named for unit in group for named in unit] for group in groups]
    return [_without(state, {path for group in full for path, _ in group}, ()), *map(_nested, full)]


def grouped(items: Sequence[tuple[T, int]]) -> tuple[list[T], list[list[T]]]:
    """What is left, and what goes into a file each, of ``items`` with their bytes: enough files that a change costs about what
    changed, and not so many that to sync them costs more."""
    limit = max(_LEAST, sum(size for _, size in items) // _FILES)
    groups: list[list[T]] = []
    small: list[T] = []
    filled = 0
    for item, size in items:
        if size >= limit:
            groups.append([item])
            continue
        small.append(item)
        filled += size
        if filled >= limit:
            groups.append(small)
            small, filled = [], 0
    return small, groups


def merge(into: Any, piece: Any) -> Any:
    """``into``, with what ``piece`` holds put into its dicts."""
    for key, value in piece.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), Mapping):
            merge(into[key], value)
        else:
            into[key] = value
    return into


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if path and value.layout is torch.strided:
            yield path, value
    elif type(value) in _DICTS:
        for key, item in value.items():
            yield from _tensors(item, (*path, key))


def _without(value: Any, gone: set[Path], path: Path) -> Any:
    if type(value) not in _DICTS:
        return value
    found = type(value)((key, _without(item, gone, (*path, key))) for key, item in value.items() if (*path, key) not in gone)
    if type(value) is OrderedDict:  # a module's state dict carries the versions of its parts there (_metadata)
        vars(found).update(vars(value))
    return found


def _nested(group: list[tuple[Path, torch.Tensor]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for path, tensor in group:
        here = found
        for key in path[:-1]:
            here = here.setdefault(key, {})
        here[path[-1]] = tensor
    return found
