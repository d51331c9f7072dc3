"""What a save costs beside its bytes, on real ranks: rows 6 and 7 of the issue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distckpt
from scripts.benchmarks import simulated
from scripts.benchmarks.report import LATENCY, Row, percentile, shown
from scripts.benchmarks.rounds import Scenario, rotated, scenarios
from tests.harness import run as run_ranks
from tests.harness import values
from tests.onerank import quick_folder

_NEVER, _CALLS = 0.2e-3, 100
"""Seconds that no rank but 0 is blocked for, and how many calls each makes."""
_KINDS = ("ours", "rounds", "store", "collectives", "barrier")


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    known = {"coordination": _coordination, "block": _block, "simulated": simulated.run}
    yield from scenarios(place, quick, only, {name: partial(_in_memory, scenario) for name, scenario in known.items()})


def _in_memory(scenario: Scenario, place: Path, quick: bool) -> Iterator[Row]:
    """Coordination, and no disk: its fsyncs are in other rows."""
    with quick_folder(place) as folder:
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
            for which in rotated(list(_KINDS), turn):
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
    for world in (2, 4, 8) if quick else (2, 4, 8, 16, 32, 64):
        found = values(run_ranks(world, _coordinate, str(place / f"w{world}"), 5 if quick else LATENCY, timeout=900))
        yield from coordination_rows(world, {kind: [max(times) for times in zip(*(f[kind] for f in found), strict=True)]
                                             for kind in _KINDS})


def coordination_rows(world: int, slowest: dict[str, list[float]]) -> Iterator[Row]:
    """The issue asks for the coordination of an empty save beside DCP's collectives. Those make no file, marker or rename, and
    so what stands beside them, and has the targets, is the two rounds; the whole save is shown too."""
    save, rounds = f"save without payload, {world} ranks", f"the two rounds of a save alone, {world} ranks"
    theirs, store = "DCP's 4 object collectives", "of a bare TCPStore"

    def beside(name: str, ours: str, other: str, target: float | None = None, note: str = "slowest rank") -> Row:
        return Row(name, slowest[ours], slowest[other], target, note, case=6, least=LATENCY)

    yield beside(f"{save} / {theirs}", "ours", "collectives",
                 note="slowest rank, files in memory; the save also makes a file, marker and rename")
    yield beside(f"{rounds} / {theirs}", "rounds", "collectives", 1 / 30 if world == 64 else None)
    yield beside(f"{rounds} / one gloo barrier", "rounds", "barrier", 1.0 if world >= 4 else None)
    yield beside(f"{rounds} / the same calls {store}", "rounds", "store")
    yield beside(f"those calls {store}, {world} ranks / {theirs}", "store", "collectives")
    yield beside(f"{save} / one gloo barrier", "ours", "barrier")


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
    for world in (2,) if quick else (2, 8):  # on two cores: with one for each rank, and with four ranks for each
        found = values(run_ranks(world, _blocked, str(place / f"blocked-{world}"), 5 if quick else _CALLS, timeout=300))
        yield from block_rows(world, [time for rank in range(1, world) for time in found[rank]])


def block_rows(world: int, calls: list[tuple[float, float]]) -> Iterator[Row]:
    """``calls``: seconds, and those of them on a core. "Never" is the call that 99 of 100 are not above: on two cores the very
    longest is one whose core was taken from it, and says what the scheduler does; it is shown."""
    name = f"a background save without payload blocks a rank other than 0, {world} ranks"
    longest, working = max(calls)
    whole, worked = [whole for whole, _ in calls], [worked for _, worked in calls]
    yield Row(name, whole, [], note="each call", case=6, limit=_NEVER, least=LATENCY)
    yield Row(f"{name}: p99", [percentile(whole, 99)], [], case=6, limit=_NEVER, least=1,
              note=f"of {len(calls)} calls; the longest {shown(longest, 's')}, {shown(working, 's')} of it on a core")
    yield Row(f"of that on a core, {world} ranks", worked, [], case=6, note="the rest is waiting for one", least=LATENCY)
    yield Row(f"of that on a core, {world} ranks: p99", [percentile(worked, 99)], [], case=6, limit=_NEVER, least=1,
              note=f"of {len(calls)} calls")
