"""Reading: which checkpoint to resume from, and loads and verification beside a plain read: rows 8 and 9 of the issue."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import distckpt
from distckpt import marker
from distckpt.cli.main import main as command
from distckpt.reader import Root
from scripts.benchmarks.report import DISK, LATENCY, Row
from scripts.benchmarks.rounds import rotated, scenarios
from tests.support import make_marker, record_root

_FILES, _READERS = 4, 4


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"resume": _resume, "load": partial(_load, 1),
                                              "load-files": partial(_load, _FILES)})


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
        for turn in range(6 if quick else LATENCY + 1):
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
        yield resume_row(count, files, heads[1:], whole[1:])


def resume_row(count: int, files: int, heads: list[float], whole: list[float]) -> Row:
    return Row(f"resume decision, {count} checkpoints of {files} files / reading every marker", heads, whole, case=9,
               limit=0.08 if count == 1000 else None, least=LATENCY)


# -- the bytes ---------------------------------------------------------------------------------------------------------


def _cold(folder: Path) -> None:
    """Take the files' pages out of memory."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Jobs = dict[str, Callable[[], object]]
Found = dict[str, list[float]]


def _load(parts: int, place: Path, quick: bool) -> Iterator[Row]:
    """``parts``: how many files the checkpoint has."""
    size = (64 if quick else 512) << 20
    states = {f"part{part}": {f"layer.{i}": torch.randn(size // 64 // 4) for i in range(64 // parts)} for part in range(parts)}
    dcp.save(states, checkpoint_id=str(place / "dcp"))
    root, buffer = str(place / "root"), memoryview(bytearray(size // parts + (1 << 20)))
    buffer[::4096] = bytes(len(buffer[::4096]))  # the first touch of memory is no part of a read
    with distckpt.CheckpointManager(root, keep_last=1) as manager:
        payload = {name: distckpt.Shards(state, name) for name, state in states.items()}
        manager.save(1, payload if parts > 1 else payload["part0"])
        files = sorted(Path(root, "step-1").rglob("*.pt"))
        assert len(files) == parts
        checkpoint = manager.resume().checkpoint
        assert checkpoint is not None
        ranks = manager._ranks()

        def read() -> None:
            for path in files:
                with open(path, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass

        def verify() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                assert command(["verify", root, "--digest"]) == 0

        def load() -> None:
            if parts > 1:
                manager.restore(payload)
            else:
                payload["part0"].load(checkpoint, ranks)

        jobs: Jobs = {"read": read, "load": load, "verify": verify,
                      "dcp": lambda: dcp.load(states, checkpoint_id=str(place / "dcp")),
                      "torch.load": lambda: [torch.load(path, weights_only=True) for path in files]}
        if parts == 1:
            jobs["readers"] = partial(_by_threads, files[0], buffer)
        for cold in (True, False):
            found = _in_turns(place, jobs, cold, 3 if quick else DISK if cold else LATENCY)
            yield from load_rows(found, cold, f"{size >> 20} MB{f' in {parts} files' if parts > 1 else ''}")


def _by_threads(path: Path, buffer: memoryview) -> None:
    """The quickest read there is of what stands in memory; of a disk it is a slow one."""
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(_READERS) as pool:
        share = -(-len(buffer) // _READERS)
        list(pool.map(lambda start: os.preadv(file.fileno(), [buffer[start:start + share]], start), range(0, len(buffer), share)))


def _in_turns(place: Path, jobs: Jobs, cold: bool, turns: int) -> Found:
    times: Found = {name: [] for name in jobs}
    for turn in range(turns + 1):
        for name in rotated(list(jobs), turn):
            if cold:
                _cold(place)
            begun = time.perf_counter()
            jobs[name]()
            times[name].append(time.perf_counter() - begun)
    return {name: found[1:] for name, found in times.items()}


def load_rows(found: Found, cold: bool, what: str) -> Iterator[Row]:
    """Warm, one reader is no measure: several threads copy what memory holds, and the issue bounds the cold read only. That
    ``dcp.load`` is slower is asked of both."""
    load = f"verified load (Shards), {'cold' if cold else 'warm'}, {what}"
    verify = f"distckpt verify --digest, {'cold' if cold else 'warm'}, {what}"

    def beside(name: str, ours: str, theirs: str, target: float | None = None) -> Row:
        return Row(name, found[ours], found[theirs], target, case=8, least=DISK if cold else LATENCY)

    yield beside(f"{load} / plain read into memory", "load", "read", 1.15 if cold else None)
    if "readers" in found and not cold:
        yield beside(f"{load} / plain read by {_READERS} threads", "load", "readers")
    yield beside(f"{load} / dcp.load, which verifies nothing", "load", "dcp", 1 / 1.4)
    yield beside(f"{load} / torch.load, which verifies nothing", "load", "torch.load")
    yield beside(f"{verify} / plain read into memory", "verify", "read", 1.1 if cold else None)
