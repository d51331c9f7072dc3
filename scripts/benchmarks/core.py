"""The coordinator itself: what a save costs beside its bytes, and the bytes beside bare write + fsync."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distckpt
from distckpt import catalog
from distckpt.coordination.pulse import Pulse
from distckpt.coordination.rounds import Rounds
from distckpt.coordination.store import Client
from distckpt.durable import REAL, Files
from distckpt.layout import Layout, Naming
from distckpt.reader import Root
from distckpt.runtime import SYSTEM
from scripts.benchmarks.report import Row
from tests.harness import run as run_ranks
from tests.harness import values


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    for name, scenario in (("coordination", _coordination), ("simulated", _simulated), ("bytes", _bytes), ("digest", _digest),
                           ("heads", _heads), ("files", _many_files)):
        if only in name:
            folder = place / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield from scenario(folder, quick)
            shutil.rmtree(folder, ignore_errors=True)


# -- coordination ----------------------------------------------------------------------------------------------------


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


def _coordinate(rank: int, world: int, root: str, turns: int) -> tuple[list[float], list[float]]:
    ours, theirs = [], []
    with distckpt.CheckpointManager(root, keep_last=2, digest=None) as manager:
        for turn in range(turns + 1):
            for which in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
                dist.barrier()
                begun = time.perf_counter()
                if which == "ours":
                    with manager.saving(turn) as files:
                        if rank == 0:
                            with open(files.mine("x"), "wb") as out:
                                out.write(b"x")
                    ours.append(time.perf_counter() - begun)
                else:
                    _collectives(rank, world)
                    theirs.append(time.perf_counter() - begun)
    return ours[1:], theirs[1:]


def _coordination(place: Path, quick: bool) -> Iterator[Row]:
    for world in (2, 8) if quick else (2, 8, 64):
        turns = 5 if quick else 20
        found = values(run_ranks(world, _coordinate, str(place / f"w{world}"), turns, timeout=600))
        slowest = [max(v[0][i] for v in found) for i in range(turns)]
        beside = [max(v[1][i] for v in found) for i in range(turns)]
        yield Row(f"one save, no payload, {world} ranks / 4 object collectives", slowest, beside,
                  note="slowest rank; the save also makes 1 file, marker, rename and its fsyncs")


class _Quiet(Pulse):
    """A pulse without a thread, for ranks that only share this process."""

    def __init__(self) -> None:
        self.lost = None
        self.identities = {}
        self._watch = None

    def enter(self, call: int, op: str, step: int | None) -> None:
        return

    def leave(self, client: Client) -> None:
        return

    def watch(self, watch: object) -> None:
        return

    current_phase = "bench"  # type: ignore[assignment]


def _simulated(place: Path, quick: bool) -> Iterator[Row]:
    """512 ranks as threads, each with a client and rounds of its own, on one in-process store."""
    world, turns = (64, 5) if quick else (512, 10)
    raw: Any = dist.HashStore()  # type: ignore[attr-defined]
    times: list[float] = []

    def rank_main(rank: int) -> None:
        rounds = Rounds(Client(raw, "sim/"), rank, world, SYSTEM, _Quiet())
        for turn in range(turns + 1):
            begun = time.perf_counter()
            with rounds.call("save", turn) as call:
                for _ in ("begin", "durable"):
                    call.round({"files": [["x.rank-00000-of-00512.pt", 1 << 20, "xxh3-128:" + "0" * 32]]},
                               lambda reports: {"ranks": len(reports)}, 600.0)
            if rank == 0 and turn:
                times.append(time.perf_counter() - begun)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield Row(f"two rounds, {world} simulated ranks (threads)", times, [], note="rank 0; no peer: DCP cannot run so")


# -- bytes -----------------------------------------------------------------------------------------------------------


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


# -- reading ---------------------------------------------------------------------------------------------------------


class _Counting(Files):
    def __init__(self) -> None:
        self.bytes = 0

    def read(self, path: str, limit: int) -> bytes:
        data = super().read(path, limit)
        self.bytes += len(data)
        return data


def _make(root: str, count: int, files: int) -> None:
    from tests.support import make_checkpoint

    for step in range(count):
        make_checkpoint(root, step, seq=step + 1, payload={f"f{i}.bin": b"x" for i in range(files)}, durable=False)


def _heads(place: Path, quick: bool) -> Iterator[Row]:
    count = 100 if quick else 1000
    root = str(place / "root")
    _make(root, count, 9)
    layout, naming = Layout.at(root), Naming.parse("step-{step}")
    heads, whole = [], []
    for _ in range(5 if quick else 20):
        begun = time.perf_counter()
        entries = catalog.scan(REAL, layout, naming)
        catalog.read_marker(REAL, layout.final(entries[0].name))
        heads.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for entry in entries:
            catalog.read_marker(REAL, layout.final(entry.name))
        whole.append(time.perf_counter() - begun)
    counting = _Counting()
    catalog.scan(counting, layout, naming)
    yield Row(f"order {count} checkpoints by heads / read every marker whole", heads, whole,
              note=f"{counting.bytes / count:.0f} bytes read per head")


def _many_files(place: Path, quick: bool) -> Iterator[Row]:
    files = 1000 if quick else 10_000
    root = str(place / "root")
    _make(root, 1, files)
    listing, verify = [], []
    for _ in range(5):
        begun = time.perf_counter()
        reader = Root(root)
        entries = reader.entries()
        listing.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        assert not reader.verify(reader.read(entries[0]), digest=False)
        verify.append(time.perf_counter() - begun)
    yield Row(f"list a checkpoint of {files} files / verify its sizes", listing, verify)
