"""What a save costs beside its bytes, on real ranks: rows 6 and 7 of the issue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distckpt
from scripts.benchmarks import simulated
from scripts.benchmarks.report import Row
from tests.harness import run as run_ranks
from tests.harness import values
from tests.onerank import quick_folder

_KINDS = ("ours", "rounds", "store", "collectives", "barrier")


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    for name, scenario in (("coordination", _coordination), ("block", _block), ("simulated", simulated.run)):
        if only in name:
            with quick_folder(place) as folder:  # coordination, and no disk: its fsyncs are in other rows
                yield from scenario(folder, quick)


def _collectives(rank: int, world: int) -> None:
    """The four object collectives of one ``dcp.save``, with plans as small as ours."""
    plan = {"rank": rank, "items": ["x" * 60]}
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(plan, gathered)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, gathered if rank == 0 else None)
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(plan, gathered)
    dist.broadcast_object_list([plan])


def _bare(raw: Any, rank: int, world: int, turn: int, text: str) -> None:
    """The calls that two rounds make, on the same store, with nothing around them: what no round can be quicker than."""
    for which in range(2):
        keys, verdict = [f"bare/{turn}/{which}/{r}" for r in range(world)], f"bare/{turn}/{which}"
        raw.compare_set(keys[rank], "", text)
        if rank == 0:
            raw.wait(keys, timedelta(seconds=600))
            raw.multi_get(keys)
            raw.set(verdict, text)
        else:
            raw.wait([verdict], timedelta(seconds=600))
            raw.multi_get([verdict])


def _coordinate(rank: int, world: int, root: str, turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    ack = {"files": [[f"x.rank-{rank:05d}-of-{world:05d}.pt", 1 << 20, "xxh3-128:" + "0" * 32]]}
    with distckpt.CheckpointManager(root, keep_last=2) as manager:
        for turn in range(turns + 1):
            shift = turn % len(_KINDS)
            for which in (_KINDS[shift:] + _KINDS[:shift])[::-1 if turn % 2 else 1]:
                dist.barrier()
                begun = time.perf_counter()
                if which == "ours":
                    with manager.saving(turn) as files:
                        if files.writes("x"):
                            with open(files.shared("x"), "wb") as out:
                                out.write(b"x")
                elif which == "rounds":
                    with manager._group.rounds.call("bench", turn) as call:
                        for _ in ("begin", "durable"):
                            call.round(ack, lambda reports: {"ranks": len(reports)}, 600.0)
                elif which == "store":
                    _bare(manager._group.rounds.client._raw, rank, world, turn, json.dumps(ack))
                elif which == "collectives":
                    _collectives(rank, world)
                else:
                    dist.barrier()
                times[which].append(time.perf_counter() - begun)
    return {kind: found[1:] for kind, found in times.items()}


def _coordination(place: Path, quick: bool) -> Iterator[Row]:
    turns = 5 if quick else 20
    for world in (2, 4, 8) if quick else (2, 4, 8, 64):
        found = values(run_ranks(world, _coordinate, str(place / f"w{world}"), turns, timeout=900))
        slowest = {kind: [max(times) for times in zip(*(f[kind] for f in found), strict=True)] for kind in _KINDS}
        yield Row(f"save without payload, {world} ranks / DCP's 4 object collectives", slowest["ours"], slowest["collectives"],
                  None, f"{turns} rounds, slowest rank, files in memory; the save also makes a file, "
                  "marker and rename", case=6)
        yield Row(f"the two rounds of a save alone, {world} ranks / DCP's 4 object collectives", slowest["rounds"],
                  slowest["collectives"], 1 / 30 if world == 64 else None, f"{turns} rounds, slowest rank", case=6)
        yield Row(f"the two rounds of a save alone, {world} ranks / one gloo barrier", slowest["rounds"], slowest["barrier"],
                  1.0 if world >= 4 else None, f"{turns} rounds, slowest rank", case=6)
        yield Row(f"the two rounds of a save alone, {world} ranks / the same calls of a bare TCPStore", slowest["rounds"],
                  slowest["store"], None, f"{turns} rounds, slowest rank", case=6)
        yield Row(f"those calls of a bare TCPStore, {world} ranks / DCP's 4 object collectives", slowest["store"],
                  slowest["collectives"], None, f"{turns} rounds, slowest rank", case=6)
        yield Row(f"save without payload, {world} ranks / one gloo barrier", slowest["ours"], slowest["barrier"],
                  None, f"{turns} rounds, slowest rank", case=6)


def _blocked(rank: int, world: int, root: str, turns: int) -> list[tuple[float, float]]:
    """Seconds of each call, and those of them that this thread had a core."""
    state, times = {"x": torch.ones(1)}, []
    with distckpt.CheckpointManager(root, keep_last=1) as manager:
        for turn in range(turns + 1):
            dist.barrier()
            begun, worked = time.perf_counter(), time.thread_time()
            manager.save(turn, state, background=True)
            times.append((time.perf_counter() - begun, time.thread_time() - worked))
            manager.wait()
    return times[1:]


def _block(place: Path, quick: bool) -> Iterator[Row]:
    world, turns = 2 if quick else 8, 5 if quick else 30
    found = values(run_ranks(world, _blocked, str(place / "blocked"), turns, timeout=300))
    times = [time for rank in range(1, world) for time in found[rank]]
    yield Row(f"a background save without payload blocks a rank other than 0, {world} ranks", [whole for whole, _ in times], [],
              note=f"{len(times)} calls", case=6, limit=0.2e-3)
    yield Row(f"of that on a core, {world} ranks", [worked for _, worked in times], [], case=6,
              note="the rest is waiting for one")
