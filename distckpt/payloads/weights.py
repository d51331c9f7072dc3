"""The weights of a checkpoint, whole, in one process: what ``distckpt export`` writes.

Each format is read by its own framework's code: DCP's converter, ``torch.load``, safetensors, DeepSpeed's ``zero_to_fp32``.
What is read is compared with its digest first.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from distckpt.checkpoint import Checkpoint
from distckpt.errors import ConfigError, DistckptError, ExportError
from distckpt.payloads import pieces, torchfile
from distckpt.payloads.dcpread import METADATA, Planner, Reader, metadata_of
from distckpt.payloads.lightning import NAME as LIGHTNING

_RANKS = re.compile(r"(?P<stem>.+)\.rank-(?P<rank>\d{5})-of-(?P<world>\d{5})(?P<suffix>\.pt|\.safetensors)")
_FILES = re.compile(r"(?P<stem>(pytorch_|adapter_)?model(_fsdp)?(_\d+)?)(-\d{5}-of-\d{5})?(?P<suffix>\.safetensors|\.bin)")
_OPTIMIZER = re.compile(r"optimizer([-_]\d+)?|members")
_PASSED_OVER = re.compile(rf"{_OPTIMIZER.pattern}|.+\.part-\d{{5}}")
_PIECES = re.compile(r"layer_\d+.*model_states\.pt")


@dataclass(frozen=True)
class Part:
    """Something in a checkpoint that may hold weights. ``name``: what it was saved as, ``folder``: where its files are."""

    name: str
    kind: str
    folder: str
    key: str


@dataclass
class Weights:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Names of values that are no tensors."""


def parts(checkpoint: Checkpoint) -> list[Part]:
    """What may be exported; the state of optimizers and what is of each rank by its nature are not."""
    found: list[Part] = []
    paths = [entry.path for entry in checkpoint.marker.files]
    engines = {os.path.dirname(path) for path in paths if path.endswith("model_states.pt")}
    for path in paths:
        folder, file = os.path.split(path)
        match, whole = _RANKS.fullmatch(file), _FILES.fullmatch(file)
        if file == METADATA:
            stored = metadata_of(_at(checkpoint, folder))
            keys = sorted({str((stored.planner_data or {}).get(name, (name,))[0]) for name in stored.state_dict_metadata})
            found += [Part(_joined(folder, key), "DCP", folder, key) for key in keys if not _OPTIMIZER.fullmatch(key)]
        elif match is not None and int(match["rank"]) == 0 and not _PASSED_OVER.fullmatch(match["stem"]):
            found.append(Part(_joined(folder, match["stem"]), "Shards", folder, match["stem"] + match["suffix"]))
        elif whole is not None:
            found.append(Part(_joined(folder, whole["stem"]), "Hugging Face", folder, whole["stem"]))
        elif file == LIGHTNING:
            found.append(Part(_joined(path, "state_dict"), "Lightning", folder, "state_dict"))
    found = list(dict.fromkeys(found))  # of several files one part
    return found + [Part(_joined(folder, "module"), "DeepSpeed", folder, "") for folder in sorted(engines)]


def choose(checkpoint: Checkpoint, name: str | None) -> Part:
    """The part ``name``, or the only one, or the only one called ``model``; ExportError or ConfigError naming those there are."""
    found = parts(checkpoint)
    if not found:
        raise ExportError(f"{checkpoint.name}: nothing in it is known to hold weights: export reads what TrainState, DCP, "
                          "Shards, DeepSpeed, Accelerate, Transformers and Lightning wrote; its files are "
                          f"{', '.join(e.path for e in checkpoint.marker.files[:5])}")
    wanted = [part for part in found if part.name == name] if name is not None else found
    if len(wanted) > 1:
        wanted = [part for part in found if part.name.rpartition("/")[2] == "model"]
    if len(wanted) == 1:
        return wanted[0]
    said = "no part " + repr(name) if name is not None else "several parts"
    raise ConfigError(f"{checkpoint.name} has {said}: say --part with one of {', '.join(repr(part.name) for part in found)}")


def read(checkpoint: Checkpoint, part: Part, rank: int | None = None) -> Weights:
    """Every tensor of ``part``, whole. ``rank``: of this rank's file alone. ExportError when there is no whole to be had."""
    if rank is not None and part.kind != "Shards":
        raise ConfigError(f"{part.name!r} of {checkpoint.name} was written by {part.kind}, not rank by rank: leave --rank out")
    here = _at(checkpoint, part.folder)
    try:
        if part.kind == "DCP":
            return _of_dcp(here, part)
        if part.kind == "Shards":
            return _of_shards(here, part, rank)
        if part.kind == "Lightning":
            return _of_lightning(here, part)
        return _of_files(here, part) if part.kind == "Hugging Face" else _of_deepspeed(here, part)
    except (DistckptError, OSError):
        raise
    except Exception as error:  # the framework's own readers raise whatever they meet
        raise ExportError(f"{checkpoint.name}: {part.kind}'s reader cannot make a whole of {part.name!r}: "
                          f"{type(error).__name__}: {error}") from error


class _Whole(_EmptyStateDictLoadPlanner):
    """That of DCP's converter, which makes the room from the metadata; values that are no tensors run nothing."""

    load_bytes = Planner.load_bytes


def _of_dcp(checkpoint: Checkpoint, part: Part) -> Weights:
    state: dict[str, Any] = {}
    reader = Reader(checkpoint, metadata_of(checkpoint), None, digest=True)
    planner = _Whole(keys={part.key})  # type: ignore[no-untyped-call]
    try:
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException, around what was raised here
        raise error.failures[0][0] from error
    found = Weights()
    value = state[part.key]
    _gather(found, value if isinstance(value, Mapping) else {part.key: value}, part, None, {})
    return found


def _of_shards(checkpoint: Checkpoint, part: Part, rank: int | None) -> Weights:
    if rank is not None and not 0 <= rank < checkpoint.world:
        raise ConfigError(f"--rank {rank}: {checkpoint.name} was saved by {checkpoint.world} ranks")
    found, owner = Weights(), dict[str, int]()
    for writer in range(checkpoint.world) if rank is None else [rank]:
        for name in pieces.names(checkpoint, part.key, writer):
            _gather(found, _state_of(checkpoint, name), part, writer, owner)
    return found


def _of_files(checkpoint: Checkpoint, part: Part) -> Weights:
    """What Transformers and Accelerate write of a whole model, in one file or in several."""
    found = Weights()
    for path in checkpoint.names:
        match = _FILES.fullmatch(path)
        if match is not None and match["stem"] == part.key:
            _gather(found, _state_of(checkpoint, path), part, None, {})
    return found


def _of_lightning(checkpoint: Checkpoint, part: Part) -> Weights:
    """The model's state in the one file that Lightning writes on rank 0."""
    found = Weights()
    _gather(found, _state_of(checkpoint, LIGHTNING)[part.key], part, None, {})
    return found


def _state_of(checkpoint: Checkpoint, name: str) -> Mapping[Any, Any]:
    if name.endswith(".safetensors"):
        from safetensors.torch import load  # an extra

        with checkpoint.open(name) as file:
            value: Any = load(file.read(checkpoint.entry(name).size))  # without a size it would be put together from pieces
    else:
        value = torchfile.read(checkpoint, name)
    if not isinstance(value, Mapping):
        raise ExportError(f"{checkpoint.name}: {name} holds a {type(value).__name__}, not a state dict")
    return value


def _gather(found: Weights, state: Mapping[Any, Any], part: Part, rank: int | None, owner: dict[str, int]) -> None:
    """The tensors of a nested state under dotted names. One that two ranks have must be the same in both."""
    for name, value in _flat(state, ""):
        if not isinstance(value, torch.Tensor):
            if name not in found.left_out:
                found.left_out.append(name)
            continue
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise ExportError(f"{part.name!r}: {name!r} of rank {rank} is a {type(value).__name__}, a piece of a tensor: "
                              "only its framework can join the pieces; save it by DCP to export it")
        there = found.tensors.get(name)
        if there is None:
            found.tensors[name] = value.detach()
            if rank is not None:
                owner[name] = rank
        elif not _same(there, value):
            raise ExportError(f"{part.name!r}: {name!r} differs between ranks {owner[name]} and {rank}, so there is no whole of "
                              "it; --rank N exports what one rank wrote")


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else None
    if items is None:
        yield name, value
        return
    for key, item in items:
        yield from _flat(item, f"{name}.{key}" if name else str(key))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: a NaN is like itself."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _of_deepspeed(checkpoint: Checkpoint, part: Part) -> Weights:
    folder = f"{part.folder}/" if part.folder else ""
    names = [name for name in checkpoint.names if name.endswith("_states.pt") and "/" not in name]
    for name in names:
        if _PIECES.fullmatch(name):
            raise ExportError(f"{checkpoint.name}: {folder}{name} is of a pipeline or of experts, which zero_to_fp32 cannot "
                              "join; DeepSpeed's ds_to_universal.py converts it")
        checkpoint.check(name)
    found = Weights()
    if any(name.endswith("optim_states.pt") for name in names):
        parent, tag = os.path.split(checkpoint.directory)
        with redirect_stdout(sys.stderr):  # it tells its progress there, from the import on, where the command's answer belongs
            try:
                from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # an extra
            except ImportError as error:
                raise ExportError(f"{checkpoint.name} was written by DeepSpeed's ZeRO and is joined by DeepSpeed's own "
                                  f"zero_to_fp32: install it (pip install 'distckpt[deepspeed]'): {error}") from error
            state = get_fp32_state_dict_from_zero_checkpoint(parent, tag)
    elif len(names) == 1:
        state = torchfile.read(checkpoint, names[0])["module"]
    else:
        raise ExportError(f"{checkpoint.name}: {len(names)} model files of tensor parallel ranks, which cannot be joined here")
    _gather(found, state, part, None, {})
    return found


def _at(checkpoint: Checkpoint, folder: str) -> Checkpoint:
    return checkpoint.below(folder) if folder else checkpoint


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
