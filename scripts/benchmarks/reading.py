"""Reading: which checkpoint to resume from, and loads and verification beside a plain read: rows 8 and 9 of the issue."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import distckpt
from distckpt import marker
from distckpt.cli.main import main as command
from distckpt.reader import Root
from scripts.benchmarks.report import Row
from scripts.benchmarks.rounds import scenarios
from tests.support import make_marker, record_root


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"resume": _resume, "load": _load})


# -- which one ---------------------------------------------------------------------------------------------------------


def _root(place: Path, count: int, files: int) -> str:
    """A root with ``count`` markers that name ``files`` files each."""
    root = str(place / f"{count}-{files}")
    layout = record_root(root)
    known = make_marker(0, payload={f"shard.rank-{i:05d}-of-{files:05d}.pt": b"x" for i in range(files)}).files
    for step in range(count):
        made = replace(make_marker(step, seq=step + 1), files=known)
        os.mkdir(layout.final(made.head.name))
        Path(layout.final(made.head.name), "commit.json").write_bytes(marker.build(made))
    return root


def _decide(root: str) -> distckpt.Checkpoint:
    """What rank 0 does to find where to go on: every head in order, the newest usable marker whole."""
    reader = Root(root)
    return reader.read(reader.candidates().usable[0])


def _resume(place: Path, quick: bool) -> Iterator[Row]:
    kinds = [(10, 9), (100, 9), (1000, 9)] if quick else [(10, 9), (100, 9), (1000, 9), (10_000, 9), (1000, 10_000)]
    for count, files in kinds:
        root = _root(place, count, files)
        heads, whole = [], []
        for turn in range(6 if quick else 21):
            for which in (0, 1) if turn % 2 else (1, 0):
                if which and (files > 9 or count > 1000):
                    continue  # minutes, and nobody waits for it
                begun = time.perf_counter()
                if which:
                    distckpt.open(root).checkpoints()
                    whole.append(time.perf_counter() - begun)
                else:
                    _decide(root)
                    heads.append(time.perf_counter() - begun)
        yield Row(f"resume decision, {count} checkpoints of {files} files / reading every marker", heads[1:], whole[1:],
                  case=9, limit=0.08 if count == 1000 else None)


# -- the bytes ---------------------------------------------------------------------------------------------------------


def _cold(folder: Path) -> None:
    """Take the files' pages out of memory."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _load(place: Path, quick: bool) -> Iterator[Row]:
    size, turns = (64 << 20, 3) if quick else (512 << 20, 9)
    state = {f"layer.{i}": torch.randn(size // 64 // 4) for i in range(64)}
    buffer = memoryview(bytearray(size + (1 << 20)))
    buffer[::4096] = bytes(len(buffer[::4096]))  # the first touch of memory is no part of a read
    dcp.save(state, checkpoint_id=str(place / "dcp"))
    root = str(place / "root")
    with distckpt.CheckpointManager(root, keep_last=1) as manager:
        manager.save(1, distckpt.Shards(state))
        found = Path(root, "step-1")
        shard = next(found.glob("shard*"))
        checkpoint = manager.resume().checkpoint
        assert checkpoint is not None
        payload, ranks = distckpt.Shards(state), manager._ranks()

        def read() -> None:
            with open(shard, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

        def verify() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                assert command(["verify", root, "--digest"]) == 0

        variants: dict[str, Callable[[], object]] = {
            "read": read, "load": lambda: payload.load(checkpoint, ranks), "verify": verify,
            "dcp": lambda: dcp.load(state, checkpoint_id=str(place / "dcp")),
            "torch.load": lambda: torch.load(shard, weights_only=True)}
        for cold in (True, False):
            times: dict[str, list[float]] = {name: [] for name in variants}
            for turn in range(turns + 1):
                names = list(variants)
                shift = turn % len(names)
                for name in (names[shift:] + names[:shift])[::-1 if turn % 2 else 1]:
                    if cold:
                        _cold(place)
                    begun = time.perf_counter()
                    variants[name]()
                    times[name].append(time.perf_counter() - begun)
            times = {name: found[1:] for name, found in times.items()}
            how = f"{'cold' if cold else 'warm'}, {size >> 20} MB, {turns} rounds"
            yield Row("verified load (Shards) / plain read into memory", times["load"], times["read"], 1.15 if cold else None,
                      how, case=8)
            yield Row("verified load (Shards) / dcp.load, which verifies nothing", times["load"], times["dcp"],
                      1 / 1.4 if cold else None, how, case=8)
            yield Row("verified load (Shards) / torch.load, which verifies nothing", times["load"], times["torch.load"],
                      note=how, case=8)
            yield Row("distckpt verify --digest / plain read into memory", times["verify"], times["read"], 1.1 if cold else None,
                      how, case=8)
