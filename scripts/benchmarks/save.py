"""The durable save: committed and digested, beside bare write + fsync and beside each framework's own save made durable.

1, 2 and 4 real ranks share out the state. "+ fsync" is the save and then an fsync of every file and directory of it, shared out
over the ranks; "as it returns" is the same save without any. DeepSpeed on 2 ranks is in ``frameworks``.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter  # type: ignore[attr-defined]

import distckpt
from scripts.benchmarks import frameworks
from scripts.benchmarks.place import at_rest
from scripts.benchmarks.report import DISK, Row
from scripts.benchmarks.rounds import Found, ranks, rotate, row, scenarios, sync_tree
from scripts.benchmarks.subjects import Ours, Times, sharded, share

_FULL, _QUICK = 512, 48  # MB
_PLAIN = {1: 0.85, 2: 1.05, 4: 1.05}
_DEEPSPEED = (1, 4)


def run(place: Path, quick: bool, only: str, size: int | None = None) -> Iterator[Row]:
    """``size``: MB of all ranks together."""
    size = size or (_QUICK if quick else _FULL)
    known = {f"save-{world}": partial(_saves, world, size) for world in _PLAIN if not quick or world < 4}
    known |= {f"save-deepspeed-{world}": partial(_deepspeed, world, size) for world in _DEEPSPEED if not quick or world < 4}
    yield from scenarios(place, quick, only, known)


# -- Shards and DCP ----------------------------------------------------------------------------------------------------


def _save_rank(rank: int, world: int, place: str, size: int, turns: int) -> Found:
    tensors = share(size, world)
    state = sharded(tensors) if world > 1 else tensors
    planner = DefaultSavePlanner(enable_plan_caching=True)
    with ExitStack() as stack:
        own: dict[str, Callable[[str], Any]] = {
            "write": partial(_write, rank, tensors), "write, unsynced": partial(_write, rank, tensors, sync=False),
            "torch.save": partial(_torch_save, rank, tensors),
            "dcp.save": partial(_dcp_save, state), "dcp.save, plan cache": partial(_dcp_save, state, planner=planner),
            "dcp.save, unsynced": partial(_dcp_save, state, sync=False)}
        variants: dict[str, Callable[[int], Times]] = {
            "Shards": Ours(stack, f"{place}/shards", distckpt.Shards(tensors)).synchronous,
            "DCP": Ours(stack, f"{place}/dcp", distckpt.DCP(state=state)).synchronous,
            **{name: partial(_theirs, f"{place}/own-{index}", save, name != "write")
               for index, (name, save) in enumerate(own.items())}}
        return rotate({name: partial(_at_rest, rank, place, once) for name, once in variants.items()}, turns)


def _at_rest(rank: int, place: str, once: Callable[[int], Times], turn: int) -> Times:
    if rank == 0:
        at_rest(place)
    dist.barrier()
    return once(turn)


def _theirs(folder: str, save: Callable[[str], Any], synced: bool, turn: int) -> Times:
    """(seconds as it returns, until durable)"""
    path = f"{folder}/{turn}"
    if dist.get_rank() == 0:
        os.makedirs(path)
    dist.barrier()
    begun = time.perf_counter()
    save(path)
    returned = time.perf_counter() - begun
    if synced:
        sync_tree(path)
    else:
        dist.barrier()
    durable = time.perf_counter() - begun
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    return returned, durable


def _write(rank: int, tensors: dict[str, torch.Tensor], path: str, sync: bool = True) -> None:
    """The least that anybody could do: the bytes of every tensor, then one fsync."""
    with open(f"{path}/{rank}", "xb", buffering=0) as out:
        for tensor in tensors.values():
            view = memoryview(tensor.numpy()).cast("B")
            while len(view):
                view = view[out.write(view):]
        if sync:
            os.fsync(out.fileno())


def _torch_save(rank: int, tensors: dict[str, torch.Tensor], path: str) -> None:
    torch.save(tensors, f"{path}/{rank}.pt")


def _dcp_save(state: dict[str, Any], path: str, planner: Any = None, sync: bool = True) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(path, sync_files=sync), planner=planner)


def _saves(world: int, size: int, place: Path, quick: bool) -> Iterator[Row]:
    found = ranks(_save_rank, str(place), size << 20, 1 if quick else DISK, world=world)
    where = f"{size} MB, {world} rank{'s' if world > 1 else ''}"

    def beside(ours: str, theirs: str, target: float | None, called: str, returns: bool = False) -> Row:
        return row(f"Durable {ours}, {where} / {called}", found, ours, theirs, 1, target, beside=0 if returns else None, case=1)

    yield beside("Shards", "write", _PLAIN[world], "write + fsync")
    yield beside("Shards", "write, unsynced", None, "write as it returns", returns=True)
    yield beside("Shards", "torch.save", 1.0, "torch.save + fsync")
    yield beside("Shards", "torch.save", None, "torch.save as it returns", returns=True)
    yield beside("DCP", "write", None, "write + fsync")
    yield beside("DCP", "dcp.save", 1 / 1.25, "dcp.save + fsync")
    yield beside("DCP", "dcp.save, plan cache", 1.0, "dcp.save, plan cache, + fsync")
    yield beside("DCP", "dcp.save, unsynced", None, "dcp.save, sync_files=False, as it returns", returns=True)


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def _deepspeed(world: int, size: int, place: Path, quick: bool) -> Iterator[Row]:
    if absent := frameworks.absent("deepspeed"):
        yield absent
        return
    found = frameworks.measure("deepspeed", place, size, 1 if quick else DISK, world)
    where = f"{size} MB, {world} rank{'s' if world > 1 else ''}"
    own = next(name for name in found if name not in ("sync", "background", "overlap"))
    yield row(f"Durable DeepSpeed, {where} / {own} + fsync", found, "sync", own, 1, 1.0, case=1)
    yield row(f"Durable DeepSpeed, {where} / {own} as it returns", found, "sync", own, 1, beside=0, case=1)
