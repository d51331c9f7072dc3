"""The bytes of a durable save beside bare write + fsync, and what their digests cost: rows 1 and 16 of the issue."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import distckpt
from scripts.benchmarks.report import Row
from scripts.benchmarks.rounds import scenarios
from tests.harness import run as run_ranks
from tests.harness import values


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"bytes": _bytes, "digest": _digest})


def _plain(path: str, view: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:done + (8 << 20)])
    os.fsync(fd)
    os.close(fd)


def _write(rank: int, world: int, place: str, size: int, turns: int, variants: list[str]) -> dict[str, list[float]]:
    tensors = {f"layer.{i}": torch.randn(size // world // 16 // 4) for i in range(16)}
    flat = torch.cat(list(tensors.values()))
    view = memoryview(flat.numpy()).cast("B")
    found: dict[str, list[float]] = {v: [] for v in variants}
    managers = {v: distckpt.CheckpointManager(f"{place}/{v}", keep_last=1, digest=None if v == "no-digest" else "xxh3-128")
                for v in variants if v != "plain"}
    for turn in range(turns + 1):
        shift = turn % len(variants)
        for variant in variants[shift:] + variants[:shift]:
            if rank == 0:
                os.sync()
            dist.barrier()
            begun = time.perf_counter()
            if variant == "plain":
                path = f"{place}/plain-{rank}"
                _plain(path, view)
                dist.barrier()
                found[variant].append(time.perf_counter() - begun)
                os.unlink(path)
            else:
                managers[variant].save(turn, distckpt.Shards(tensors))
                dist.barrier()
                found[variant].append(time.perf_counter() - begun)
                if managers[variant]._owned is not None:
                    managers[variant].wait()
                    managers[variant]._owned.janitor.wait(60)
    for manager in managers.values():
        manager.close()
    return {v: times[1:] for v, times in found.items()}


def _bytes(place: Path, quick: bool) -> Iterator[Row]:
    size, turns = ((64 << 20), 3) if quick else ((1 << 30), 9)
    for world in (1, 2):
        folder = place / str(world)
        folder.mkdir()
        found = values(run_ranks(world, _write, str(folder), size, turns, ["ours", "plain"], timeout=1200))[0]
        yield Row(f"durable save of {size >> 20} MB, {world} rank(s) / write + fsync", found["ours"], found["plain"], 1.10,
                  "Shards, digested, committed, published")


def _digest(place: Path, quick: bool) -> Iterator[Row]:
    size, turns = ((64 << 20), 3) if quick else ((512 << 20), 9)
    found = values(run_ranks(2, _write, str(place), size, turns, ["ours", "no-digest"], timeout=1200))[0]
    yield Row(f"digest on / off, {size >> 20} MB, 2 ranks", found["ours"], found["no-digest"], 1.05)
