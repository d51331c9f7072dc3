"""The shortest way through: save, rotate, fail on one rank, save again, resume."""

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
    times = []
    with distckpt.CheckpointManager(root, keep_last=2) as manager:
        assert manager.restore(state) is None
        for step in range(1, 4):
            manager.save(step, state)
        for bad in range(world):
            begun = time.monotonic()
            with pytest.raises(SaveError) as caught, manager.saving(4) as files:
                with open(files.mine("x.bin"), "wb") as out:
                    out.write(b"x" * 100)
                if rank == bad:
                    raise ValueError("boom")
            times.append(time.monotonic() - begun)
            assert list(caught.value.failures) == [bad]
            assert caught.value.failures[bad].type == "ValueError"
        assert (caught.value.__cause__ is None) == (rank != world - 1)
        manager.save(4, state)
        steps = manager.all_steps()
    fresh = {"w": torch.zeros(1000), "rank": -1}
    with distckpt.CheckpointManager(root, keep_last=2) as manager:
        assert manager.restore(fresh) == 4
    assert fresh["rank"] == rank and float(fresh["w"][0]) == rank
    return {"steps": steps, "slowest": max(times)}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_save_fail_save_resume(world: int, tmp_path: object) -> None:
    root = os.path.join(str(tmp_path), "root")
    for value in values(run(world, _cycle, root)):
        assert value["slowest"] < 2.0
    assert sorted(os.listdir(root)) == [".distckpt", "latest", "step-3", "step-4"]
    assert os.listdir(os.path.join(root, ".distckpt", "staging")) == ["2"]
