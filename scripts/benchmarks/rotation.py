"""Rotation: what the caller pays of it, what a training loop feels of it, and deletion beside ``shutil.rmtree``."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import distckpt
from distckpt.saving.committer import Committer
from scripts.benchmarks.report import Row

_PIECE = 1 << 20
_PATIENCE = 120.0


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    shapes = {"4,000 files": (400 if quick else 4000, 4096), "1 GB": (16, (4 << 20) if quick else (64 << 20))}
    for name, (count, size) in shapes.items():
        for what, scenario in (("caller", _caller), ("steps", _steps), ("deletion", _deletion)):
            if only in f"{what} {name}":
                folder = place / "rotation"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                yield from scenario(folder, name, count, size, 3 if quick else 9)
                shutil.rmtree(folder, ignore_errors=True)


def _write(folder: str, count: int, size: int) -> None:
    """``count`` files in 8 directories."""
    data = b"x" * min(size, _PIECE)
    for number in range(count):
        path = Path(folder, f"part-{number % 8}", f"{number}.bin")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            for _ in range(max(size // _PIECE, 1)):
                out.write(data)


def _victim(manager: distckpt.CheckpointManager, step: int, count: int, size: int) -> None:
    """A checkpoint of that shape, and the disk at rest."""
    with manager.saving(step) as files:
        _write(files.path, count, size)
    _at_rest(manager)


def _at_rest(manager: distckpt.CheckpointManager) -> None:
    assert manager._owned is not None
    manager.wait()
    assert manager._owned.janitor.wait(_PATIENCE)


def _timed(what: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun


def _caller(place: Path, name: str, count: int, size: int, turns: int) -> Iterator[Row]:
    """A save that rotates beside one that does not, of the same small state; and what of it is the rotation's."""
    part, whole, rotates, rests = [], [], [], []
    after = Committer.after_commit

    def timed(self: Committer, *args: Any) -> None:
        part.append(_timed(lambda: after(self, *args)))

    state = {"w": torch.zeros(1000)}
    with (distckpt.CheckpointManager(place / "ours", keep_last=1, digest=None) as ours,
          distckpt.CheckpointManager(place / "keeps", digest=None) as keeps):
        for turn in range(turns + 1):
            _victim(ours, 2 * turn, count, size)

            def rotating(step: int = 2 * turn + 1) -> None:
                with mock.patch.object(Committer, "after_commit", timed):
                    rotates.append(_timed(lambda: ours.save(step, state)))
                _at_rest(ours)

            def resting(step: int = turn) -> None:
                rests.append(_timed(lambda: keeps.save(step, state)))
                _at_rest(keeps)

            for job in (rotating, resting) if turn % 2 else (resting, rotating):
                begun = time.perf_counter()
                job()
                if job is rotating:
                    whole.append(time.perf_counter() - begun - rotates[-1])
    yield Row(f"rotation of {name}: the caller's part / until deleted", part[1:], whole[1:], case=10, limit=1e-3)
    yield Row(f"a small save that rotates {name} / that rotates nothing", rotates[1:], rests[1:], case=10)


def _steps(place: Path, name: str, count: int, size: int, turns: int) -> Iterator[Row]:
    """The longest of the steps that a training loop makes while a rotation and its deletion go on, beside one at rest."""
    torch.set_num_threads(1)
    left, right = torch.randn(256, 256), torch.randn(256, 256)

    def step() -> None:
        for _ in range(4):
            left @ right

    def longest(more: Callable[[], bool], least: int) -> tuple[float, int]:
        times: list[float] = []
        while len(times) < least or more():
            times.append(_timed(step))
        return max(times), len(times)

    beside, rest = [], []
    with distckpt.CheckpointManager(place / "root", keep_last=1, digest=None) as manager:
        assert manager._owned is not None
        after, janitor = manager._owned.afterwards, manager._owned.janitor
        for turn in range(turns + 1):
            _victim(manager, 2 * turn, count, size)
            manager.save(2 * turn + 1, {"w": left})
            worst, made = longest(lambda: not (after.done() and janitor.wait(0)), 20)
            beside.append(worst)
            _at_rest(manager)
            rest.append(longest(lambda: False, made)[0])
    yield Row(f"longest step beside the rotation of {name} / at rest", beside[1:], rest[1:], note="equally many steps", case=10)


def _deletion(place: Path, name: str, count: int, size: int, turns: int) -> Iterator[Row]:
    """The janitor beside ``shutil.rmtree``, on equal trees that were synced."""
    ours, theirs = [], []
    with distckpt.CheckpointManager(place / "root", digest=None) as manager:
        assert manager._owned is not None
        owned = manager._owned

        def janitor() -> None:
            _write(trash := owned.layout.trash(owned.generation, "a"), count, size)
            os.sync()
            ours.append(_timed(lambda: (owned.janitor.delete([trash]), owned.janitor.wait(_PATIENCE))))

        def rmtree() -> None:
            _write(folder := str(place / "a"), count, size)
            os.sync()
            theirs.append(_timed(lambda: shutil.rmtree(folder)))

        for turn in range(turns + 1):
            for job in (janitor, rmtree) if turn % 2 else (rmtree, janitor):
                job()
    yield Row(f"deletion of {name} in the background / shutil.rmtree", ours[1:], theirs[1:], target=1 / 1.6, case=10)
