"""Rank 0's work for many ranks: the real manager, rounds, acks, marker and publish, with the other ranks played by its store.

What the played ranks do, their files included, is done while rank 0 waits and taken off its time.
"""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import distckpt
from distckpt.coordination.bootstrap import Bootstrap
from distckpt.coordination.pulse import bye_key
from distckpt.coordination.store import Client
from distckpt.options import Seams
from scripts.benchmarks.report import Row

_REPORT = re.compile(r"(.*/)(report|ack)/(\d+)")
_SIZE = 1 << 12
_TENSORS = 500


class Played:
    """A store in which every report that rank 0 waits for comes at once. ``spent``: seconds that the played ranks took."""

    def __init__(self, raw: Any, world: int, staged: Callable[[], Path]) -> None:
        self._raw, self._world, self._staged = raw, world, staged
        self.spent = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        found = _REPORT.fullmatch(keys[0])
        if found is not None and len(keys) == self._world:
            begun = time.thread_time()
            own = json.loads(self._raw.get(keys[0]))
            texts = self._acks(own) if found[2] == "ack" else [_dumps(own)] * (self._world - 1)
            for key, text in zip(keys[1:], texts, strict=True):
                self._raw.set(key, text)
            self.spent += time.thread_time() - begun
        self._raw.wait(keys, timeout)

    def _acks(self, own: dict[str, Any]) -> list[str]:
        texts, staged = [], self._staged()
        for rank in range(1, self._world):
            name = f"shard.rank-{rank:05d}-of-{self._world:05d}.pt"
            with open(staged / name, "xb") as out:
                out.truncate(_SIZE)
            texts.append(_dumps({**own, "files": [[name, _SIZE, f"xxh3-128:{rank:032x}"]], "rank": rank}))
        return texts


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def saves(place: Path, world: int, turns: int) -> list[float]:
    """Seconds of CPU that rank 0's thread needs for each of ``turns`` saves of ``world`` ranks, one file each; one more warms
    up. CPU, since it waits for nobody here, and a busy machine adds to the wall clock only."""
    root, raw = place / f"simulated-{world}", dist.HashStore()  # type: ignore[attr-defined]
    players = Played(raw, world, lambda: next((root / ".distckpt/staging").glob("*/*/step-*")))
    clients = iter([players])  # the first client is the rounds'; the pulse's and the listener's wait for nobody
    bootstrap = Bootstrap("simulated", 0, world, lambda: Client(next(clients, raw), "simulated/"))
    times = []
    with distckpt.CheckpointManager(root, keep_last=1, seams=Seams(bootstrap=bootstrap)) as manager:
        for turn in range(turns + 1):
            players.spent, begun = 0.0, time.thread_time()
            with manager.saving(turn) as files, files.writer("shard.pt") as out:
                out.write(b"x" * _SIZE)
            times.append(time.thread_time() - begun - players.spent)
            assert manager._owned is not None
            manager._owned.janitor.wait(600)
        for rank in range(1, world):
            raw.set(f"simulated/{bye_key(rank)}", "{}")
    return times[1:]


def _plan(rank: int, world: int) -> bytes:
    """What one rank sends to DCP's planner: a shard of each of 500 tensors."""
    items, names = [], [f"layers.{number}.weight" for number in range(_TENSORS)]
    for name in names:
        offset = torch.Size([4 * rank, 0])
        data = TensorWriteData(ChunkStorageMetadata(offset, torch.Size([4, 8])), TensorProperties(dtype=torch.float32),
                               torch.Size([4 * world, 8]))
        items.append(WriteItem(MetadataIndex(name, offset, rank), WriteItemType.SHARD, tensor_data=data))
    return pickle.dumps(SavePlan(items, planner_data={name: tuple(name.split(".")) for name in names}))


def planned(world: int, turns: int) -> list[float]:
    """Seconds of CPU that DCP's rank 0 needs for the plans of ``world`` ranks: unpickle, plan, pickle for the scatter."""
    texts, times = [_plan(rank, world) for rank in range(world)], []
    for _ in range(turns):
        begun = time.thread_time()
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        plans, metadata = planner.create_global_plan([pickle.loads(text) for text in texts])
        for plan in [*plans, metadata]:
            pickle.dumps(plan)
        times.append(time.thread_time() - begun)
    return times


def run(place: Path, quick: bool) -> Iterator[Row]:
    turns = 3 if quick else 5
    for world in (64, 512) if quick else (64, 512, 4096, 16384):
        times = saves(place, world, turns)
        yield Row(f"rank 0's work in a save of {world} ranks", times, [], case=7, limit=0.5 if world == 16384 else None,
                  note=f"{min(times) / world * 1e6:.0f} µs a rank; CPU of its thread")
    world, share = 1024, 32 if quick else 128
    ours, theirs = saves(place, world, 3), [t * world / share for t in planned(share, 3)]
    yield Row(f"the same / DCP's planner, {world} ranks x {_TENSORS} tensors", ours, theirs, 1 / 500,
              f"the planner ran for {share} ranks and is linear; it buys resharding, which these acks do not", case=7)
