"""Rotation: what the caller pays of it, what a training loop feels of it, and deletion beside ``shutil.rmtree``."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import distckpt
from distckpt.saving.committer import Committer
from scripts.benchmarks.report import DISK, LATENCY, Row, percentile
from scripts.benchmarks.rounds import Scenario, rotated, scenarios

_PIECE = 1 << 20
_PATIENCE = 120.0
_STALLED = 2.0
_steps_made = itertools.count(1)


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    shapes = {"4,000 files": (400 if quick else 4000, 4096), "1 GB": (16, (4 << 20) if quick else (64 << 20))}
    known: dict[str, Scenario] = {}
    for name, (count, size) in shapes.items():
        for what, scenario, rounds in (("caller", _caller, LATENCY), ("steps", _steps, LATENCY), ("deletion", _deletion, DISK)):
            known[f"{what} {name}"] = partial(scenario, name, count, size, 3 if quick else rounds)
    yield from scenarios(place, quick, only, known)


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


def _caller(name: str, count: int, size: int, turns: int, place: Path, quick: bool) -> Iterator[Row]:
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
    yield from caller_rows(name, part[1:], whole[1:], rotates[1:], rests[1:])


def caller_rows(name: str, part: list[float], whole: list[float], rotates: list[float], rests: list[float]) -> Iterator[Row]:
    yield Row(f"rotation of {name}: the caller's part / until deleted", part, whole, case=10, limit=1e-3, least=LATENCY)
    yield Row(f"a small save that rotates {name} / that rotates nothing", rotates, rests, case=10, least=LATENCY)


def _steps(name: str, count: int, size: int, turns: int, place: Path, quick: bool) -> Iterator[Row]:
    """The steps that a training loop makes while a rotation and its deletion go on, beside equally many at rest."""
    torch.set_num_threads(1)
    left, right = torch.randn(256, 256), torch.randn(256, 256)

    def step() -> None:
        for _ in range(4):
            left @ right

    def steps(more: Callable[[], bool], least: int) -> list[float]:
        times: list[float] = []
        while len(times) < least or more():
            times.append(_timed(step))
        return times

    beside, rest, least = [], [], 20
    with distckpt.CheckpointManager(place / "root", keep_last=1, digest=None) as manager:
        assert manager._owned is not None
        after, janitor = manager._owned.afterwards, manager._owned.janitor

        def resting() -> None:
            rest.append(steps(lambda: False, least))

        for turn in range(turns + 1):
            _victim(manager, 2 * turn, count, size)
            if turn % 2:
                resting()  # as many as there were beside the rotation before
            manager.save(2 * turn + 1, {"w": left})
            beside.append(steps(lambda: not (after.done() and janitor.wait(0)), 20))
            _at_rest(manager)
            if not turn % 2:
                least = len(beside[-1])
                resting()
    yield from step_rows(name, beside[1:], rest[1:])


def step_rows(name: str, beside: list[list[float]], rest: list[list[float]]) -> Iterator[Row]:
    """A step counts as stalled that takes over twice as long as the longest of equally many at rest: less is what the longest at
    rest differs by from round to round. The longest, since "no stalled step" is said of each: one in twenty may stall with a p95
    as it was, and a deletion lasts for some tens of steps. The p95 is shown beside it."""
    yield Row(f"longest step beside the rotation of {name} / at rest", [max(times) for times in beside],
              [max(times) for times in rest], _STALLED, "equally many steps", case=10, least=LATENCY)
    yield Row(f"p95 of the steps beside the rotation of {name} / at rest", [percentile(times, 95) for times in beside],
              [percentile(times, 95) for times in rest], case=10, least=LATENCY)


def _plain(place: Path, count: int, size: int) -> str:
    _write(folder := str(place / "plain"), count, size)
    return folder


def _deletion(name: str, count: int, size: int, turns: int, place: Path, quick: bool) -> Iterator[Row]:
    """The janitor beside ``shutil.rmtree``, on equal trees that were synced: written plainly and, where files are large, by our
    own writer, which leaves less of them in the page cache."""
    with ExitStack() as stack:
        manager = stack.enter_context(distckpt.CheckpointManager(place / "root", digest=None))
        makers: dict[str, Callable[[], str]] = {"plain writes": partial(_plain, place, count, size)}
        if size > _PIECE:
            maker = stack.enter_context(distckpt.CheckpointManager(place / "made"))
            makers["our own writer's"] = partial(_ours, maker, count, size)
        found: dict[str, tuple[list[float], list[float]]] = {how: ([], []) for how in makers}
        for turn in range(turns + 1):
            for how in rotated(list(makers), turn):
                for job, which in ((_janitor, 0), (_rmtree, 1))[::1 if turn % 2 else -1]:
                    found[how][which].append(job(manager, place, makers[how]()))
    yield from deletion_rows(name, {how: (ours[1:], theirs[1:]) for how, (ours, theirs) in found.items()})


def deletion_rows(name: str, found: dict[str, tuple[list[float], list[float]]]) -> Iterator[Row]:
    for how, (ours, theirs) in found.items():
        yield Row(f"deletion of {name}, {how}, in the background / shutil.rmtree", ours, theirs, 1 / 1.6, case=10)


def _ours(maker: distckpt.CheckpointManager, count: int, size: int) -> str:
    data, step = b"x" * _PIECE, next(_steps_made)
    with maker.saving(step) as files:
        for number in range(count):
            with files.writer(f"part-{number % 8}/{number}.bin") as out:
                for _ in range(size // _PIECE):
                    out.write(data)
    return os.path.join(maker.root, f"step-{step}")


def _janitor(manager: distckpt.CheckpointManager, place: Path, tree: str) -> float:
    assert manager._owned is not None
    owned = manager._owned
    trash = owned.layout.trash(owned.generation, "a")
    os.makedirs(os.path.dirname(trash), exist_ok=True)
    os.rename(tree, trash)
    os.sync()
    return _timed(lambda: (owned.janitor.delete([trash]), owned.janitor.wait(_PATIENCE)))


def _rmtree(manager: distckpt.CheckpointManager, place: Path, tree: str) -> float:
    os.sync()
    return _timed(lambda: shutil.rmtree(tree))
