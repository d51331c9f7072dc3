"""``dedup="link"`` beside a full save of ours and beside ``dcp.save`` made durable: a tenth of the bytes changed.

Two real ranks with gloo. The changed layers are the last ones of each rank, as a head on a backbone. Growth is what the disk
has more after a save that was linked, beside the bytes that changed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, save  # type: ignore[attr-defined]

import distckpt
from scripts.benchmarks.report import DISK, Row
from scripts.benchmarks.rounds import Found, column, ranks, rotate, row, scenarios, sync_tree
from scripts.benchmarks.subjects import WORLD, Dcp, Ours, Times, share

_FULL, _QUICK = 512 << 20, 96 << 20
_CHANGED = 0.1


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"link": _linked})


def _linked(place: Path, quick: bool) -> Iterator[Row]:
    size = _QUICK if quick else _FULL
    shown = f"{size >> 20} MB, {WORLD} ranks"
    found = ranks(_rank, str(place), size, 2 if quick else DISK)
    yield from rows(found, shown)


def rows(found: Found, shown: str) -> Iterator[Row]:
    yield row(f"linked save, {shown} / dcp.save + fsync", found, "linked", "dcp", 0, 0.25, case=11)
    yield row(f"linked save, {shown} / dcp.save, sync_files=False, as it returns", found, "linked", "unsynced", case=11)
    yield row("linked save / a full save of ours", found, "linked", "full")
    yield row("linked save of a DCP payload / dcp.save + fsync", found, "linked dcp", "dcp", 0, 0.5, case=11)
    yield row("a save with dedup in which all has changed / without", found, "all changed", "full")
    for name in ("linked", "linked dcp"):
        yield Row(f"disk growth / bytes changed, {name}", [n * 1e9 for n in column(found, name, 1)],
                  [n * 1e9 for n in column(found, name, 2)], 1.1, case=11, unit="B")


def _rank(rank: int, world: int, place: str, size: int, turns: int) -> Found:
    tensors, changing = share(size), share(size)
    frozen = list(tensors)[:int(len(tensors) * (1 - _CHANGED) + 0.5)]
    head = [t for name, t in tensors.items() if name not in frozen]
    changed = float(sum(t.nbytes for t in head)) * world

    with ExitStack() as stack:
        linked = Ours(stack, f"{place}/linked", distckpt.Shards(tensors), dedup="link")
        every = Ours(stack, f"{place}/every", distckpt.Shards(changing), dedup="link")
        full = Ours(stack, f"{place}/full", distckpt.Shards(tensors))
        dcp = Dcp(rank, place, tensors)
        through = Ours(stack, f"{place}/through", distckpt.DCP(state={"net": dcp._state}), dedup="link")

        def train(what: list[torch.Tensor]) -> None:
            for tensor in what:
                tensor.add_(1)
            dist.barrier()

        def save_linked(turn: int, ours: Ours) -> Times:
            if turn == 0:
                ours.synchronous(turn)  # something to link
            before = _files(ours.manager.root)
            train(head)
            took, *_ = ours.synchronous(turn)
            dist.barrier()
            grown = sum(size for inode, size in _files(ours.manager.root).items() if inode not in before)
            return took, grown / 1e9, changed / 1e9

        def save_every(turn: int) -> Times:
            train(list(changing.values()))
            return every.synchronous(turn)

        def save_full(turn: int) -> Times:
            train(head)
            return full.synchronous(turn)

        def save_dcp(turn: int) -> Times:
            train(head)
            begun = time.perf_counter()
            dcp.begin()
            sync_tree(f"{place}/{dcp._turn}")
            took = time.perf_counter() - begun
            dcp.end()
            return took, took, took

        def save_unsynced(turn: int) -> Times:
            train(head)
            begun = time.perf_counter()
            save(dcp._state, storage_writer=FileSystemWriter(f"{place}/unsynced", sync_files=False))
            took = time.perf_counter() - begun
            dist.barrier()
            if rank == 0:
                shutil.rmtree(f"{place}/unsynced")
            return took, took, took

        return rotate({"linked": partial(save_linked, ours=linked), "full": save_full, "dcp": save_dcp,
                       "unsynced": save_unsynced, "all changed": save_every,
                       "linked dcp": partial(save_linked, ours=through)}, turns)


def _files(root: str) -> dict[int, int]:
    """{inode: bytes on disk} of the checkpoint that stands in ``root``; the one before is deleted by now."""
    newest = next(entry for entry in os.scandir(root) if entry.name.startswith("step-"))
    return {seen.st_ino: seen.st_blocks * 512 for seen in (entry.stat() for entry in os.scandir(newest.path))}
