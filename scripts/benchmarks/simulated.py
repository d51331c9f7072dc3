"""Rank 0's work for many ranks: the real manager, rounds, acks, marker and publish, with the other ranks played by its store.

What the played ranks do, their files included, is done while rank 0 waits and taken off its time. With a store in this process's
memory that is the CPU of its thread; with a TCPStore, into which another connection puts the reports, it is what the clock says.
"""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
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
from scripts.benchmarks.report import DISK, Row
from scripts.benchmarks.rounds import rotated

_REPORT = re.compile(r"(.*/)(report|ack)/(\d+)")
_SIZE = 1 << 12
_TENSORS = 500
_FEW, _PLANNED, _MOST = 512, 1024, 16_384


class Played:
    """A store in which every report that rank 0 waits for comes at once, through ``others``. ``spent``: seconds that the played
    ranks took; ``asked``: those that rank 0 waited for their reports and got them."""

    def __init__(self, raw: Any, others: Any, world: int, staged: Callable[[], Path], clock: Callable[[], float]) -> None:
        self._raw, self._others, self._world, self._staged, self._clock = raw, others, world, staged, clock
        self.spent = self.asked = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        found = _REPORT.fullmatch(keys[0])
        if found is not None and len(keys) == self._world:
            begun = self._clock()
            own = json.loads(self._others.get(keys[0]))
            texts = self._acks(own) if found[2] == "ack" else [_dumps(own)] * (self._world - 1)
            for key, text in zip(keys[1:], texts, strict=True):
                self._others.set(key, text)
            self.spent += self._clock() - begun
        begun = self._clock()
        self._raw.wait(keys, timeout)
        self.asked += self._clock() - begun

    def multi_get(self, keys: list[str]) -> list[bytes]:
        begun = self._clock()
        found: list[bytes] = self._raw.multi_get(keys)
        self.asked += self._clock() - begun
        return found

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


class Simulated:
    """The manager of rank 0 of ``world``; ``save`` gives the seconds that it needs for a save, one file of each rank, and those
    of them in which it asked the store for the reports."""

    def __init__(self, stack: ExitStack, place: Path, world: int, tcp: bool = False) -> None:
        root, connect = place / f"simulated-{world}-{'tcp' if tcp else 'memory'}", _server() if tcp else _memory()
        self._clock = time.perf_counter if tcp else time.thread_time  # in memory it waits for nobody: CPU, as nobody adds to that
        self._raw, self._world, self._turn = connect(), world, 0
        self._players = Played(connect(), self._raw, world, lambda: next((root / ".distckpt/staging").glob("*/*/step-*")),
                               self._clock)
        clients = iter([self._players])  # the first client is the rounds'; the pulse's and the listener's wait for nobody
        bootstrap = Bootstrap("simulated", 0, world, lambda: Client(next(clients, None) or connect(), "simulated/"))
        self._manager = stack.enter_context(distckpt.CheckpointManager(root, keep_last=1, seams=Seams(bootstrap=bootstrap)))
        stack.callback(self._leave)  # before the manager closes, which waits for them
        self.save()

    def save(self) -> tuple[float, float]:
        self._turn += 1
        players = self._players
        players.spent = players.asked = 0.0
        begun = self._clock()
        with self._manager.saving(self._turn) as files, files.writer("shard.pt") as out:
            out.write(b"x" * _SIZE)
        took, asked = self._clock() - begun - players.spent, players.asked
        self._manager.wait()
        assert self._manager._owned is not None
        self._manager._owned.janitor.wait(600)
        return took, asked

    def _leave(self) -> None:
        for rank in range(1, self._world):
            self._raw.set(f"simulated/{bye_key(rank)}", "{}")


def _memory() -> Callable[[], Any]:
    raw = dist.HashStore()  # type: ignore[attr-defined]
    return lambda: raw


def _server() -> Callable[[], Any]:
    """Connections to a server in this process, where rank 0's is as well."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connect = partial(dist.TCPStore, "127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    def another(server: Any = server) -> Any:  # which lives as long as this can be called
        return connect()

    return another


def _plan(rank: int, world: int) -> bytes:
    """What one rank sends to DCP's planner: a shard of each of 500 tensors."""
    items, names = [], [f"layers.{number}.weight" for number in range(_TENSORS)]
    for name in names:
        offset = torch.Size([4 * rank, 0])
        data = TensorWriteData(ChunkStorageMetadata(offset, torch.Size([4, 8])), TensorProperties(dtype=torch.float32),
                               torch.Size([4 * world, 8]))
        items.append(WriteItem(MetadataIndex(name, offset, rank), WriteItemType.SHARD, tensor_data=data))
    return pickle.dumps(SavePlan(items, planner_data={name: tuple(name.split(".")) for name in names}))


def planned(texts: list[bytes]) -> float:
    """Seconds of CPU that DCP's rank 0 needs for the plans of its ranks: unpickle, plan, pickle for the scatter."""
    begun = time.thread_time()
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([pickle.loads(text) for text in texts])
    for plan in [*plans, metadata]:
        pickle.dumps(plan)
    return time.thread_time() - begun


Work = dict[tuple[int, bool], list[tuple[float, float]]]
"""By ranks, and whether by a TCPStore: what each save took, and what of it the store."""


def run(place: Path, quick: bool) -> Iterator[Row]:
    worlds, share = ((64, 512), 16) if quick else ((64, 512, 4096, _MOST), 64)
    kinds = [(world, tcp) for world in (*worlds, _PLANNED) for tcp in (False, True)]
    plans = [_plan(rank, share) for rank in range(share)]
    work: Work = {kind: [] for kind in kinds}
    planning = []
    with ExitStack() as stack:
        simulated = {kind: Simulated(stack, place, *kind) for kind in kinds}
        for turn in range(2 if quick else DISK):
            for kind in rotated(kinds, turn):
                work[kind].append(simulated[kind].save())
            planning.append(planned(plans) * _PLANNED / share)
    yield from rows(work, planning, share)


def rows(work: Work, planning: list[float], share: int) -> Iterator[Row]:
    took = {kind: [time for time, _ in times] for kind, times in work.items()}
    for (world, tcp), times in took.items():
        how = "by the clock" if tcp else "CPU of its thread, its store in memory"
        yield Row(f"rank 0's work in a save of {world} ranks{' by a real TCPStore' if tcp else ''}", times, [], case=7,
                  limit=0.5 if world == _MOST else None, note=f"{min(times) / world * 1e6:.0f} µs a rank; {how}")
        if tcp:
            asked = [asked for _, asked in work[world, tcp]]
            yield Row(f"of that for the store's two wait and multi_get of {world} reports", asked, [], case=7)
    for tcp in (False, True):
        if (_MOST, tcp) in took:
            yield Row(f"linear: time per rank at {_MOST} ranks / at {_FEW}{', by a real TCPStore' if tcp else ''}",
                      [t / _MOST for t in took[_MOST, tcp]], [t / _FEW for t in took[_FEW, tcp]], 1.5, case=7)
    yield Row(f"rank 0's work / DCP's planner, {_PLANNED} ranks x {_TENSORS} tensors", took[_PLANNED, False], planning, 1 / 500,
              f"the planner ran for {share} ranks and is linear; it buys resharding, which these acks do not", case=7)
