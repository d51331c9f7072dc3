"""Background saves: the copy, the finaliser, one step for all."""

from __future__ import annotations

import os
import time

import pytest
import torch

import distckpt
from distckpt.errors import SaveError
from tests.harness import run, values


def _cycle(rank: int, world: int, root: str) -> dict[str, object]:
    state = {"w": torch.full((1000,), float(rank)), "rank": rank}
    polls = []
    with distckpt.CheckpointManager(root, keep_last=2, save_every=2) as manager:
        step = manager.restore(state) or 0
        while step < 9:
            todo = manager.poll(step)
            polls.append(tuple(todo))
            if todo.save:
                handle = manager.save(step, state, background=True)
                state["w"] += 100
            if todo.stop:
                break
            step += 1
    fresh = {"w": torch.zeros(1000), "rank": -1}
    with distckpt.CheckpointManager(root, keep_last=2) as manager:
        assert manager.restore(fresh) == 8
    assert float(fresh["w"][0]) == rank + 300 and handle.result().step == 8
    return {"polls": polls}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_cycle(world: int, tmp_path: object) -> None:
    root = os.path.join(str(tmp_path), "root")
    found = values(run(world, _cycle, root))
    assert all(v == found[0] for v in found)
    assert sorted(os.listdir(root)) == [".distckpt", "latest", "step-6", "step-8"]


class _Bad:
    """A payload whose writer fails on one rank."""

    collective = False
    members: list[str] = []

    def __init__(self, rank: int, bad: int) -> None:
        self.rank, self.bad = rank, bad

    def check(self) -> None: ...

    def tree(self) -> object:
        return {"x": torch.ones(10)}

    def of(self, tree: object) -> _Bad:
        return self

    def write(self, files, ranks) -> None:  # type: ignore[no-untyped-def]
        with files.writer("x.bin") as out:
            out.write(b"x")
            if self.rank == self.bad:
                raise OSError(5, "the disk is on fire", "/x")

    def load(self, checkpoint, ranks) -> None: ...  # type: ignore[no-untyped-def]


def _fails(rank: int, world: int, root: str, bad: int) -> object:
    with distckpt.CheckpointManager(root) as manager:
        seen = None
        for step in range(20_000):
            try:
                manager.poll(step)
            except SaveError as error:
                seen = (step, error.failures[bad].message, error.background, repr(error.__cause__) if rank == bad else None)
                break
            if step == 3:
                manager.save(step, _Bad(rank, bad), background=True)
            time.sleep(0.002 * (rank + 1))
        manager.save(300_000, {"a": 1})
        manager.poll(300_000)
    return seen


@pytest.mark.parametrize("bad", [0, 1])
def test_failure_is_raised_at_one_step(bad: int, tmp_path: object) -> None:
    root = os.path.join(str(tmp_path), "root")
    found = values(run(3, _fails, root, bad))
    print(found)
    assert len({v[:3] for v in found}) == 1 and found[bad][3]
