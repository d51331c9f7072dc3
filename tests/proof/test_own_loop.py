"""What README says of tests of one's own loop: the example of the power cut, and a loop with tensors in the simulation."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt.testing.simulation import Simulation
from distckpt.testing.told import contents_written
from distckpt.testing.trace import program

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"

# EARLY is said before the save is over: the mistake that a cut must show.
LOOP = """
import sys
import torch
import distckpt
from distckpt.testing.trace import mark

weights = torch.zeros(300)
with distckpt.CheckpointManager(sys.argv[1], keep_last=2) as manager:
    for step in (1, 2, 3):
        weights += 1
        mark(f"EARLY {step}")
        manager.save(step, distckpt.Shards({"w": weights}))
        mark(f"SAVED {step}")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_example_of_the_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parents[1]))
    import power_cut  # type: ignore[import-not-found]

    (tmp_path / "train.py").write_text(LOOP)
    folder = tmp_path / "work"
    run = power_cut.record(folder, program(sys.executable), str(tmp_path / "train.py"), f"{folder}/run")
    disks, wrong = power_cut.cut(run, f"{folder}/run")
    assert disks > 300 and wrong == []
    assert power_cut.cut(run, f"{folder}/run", "EARLY")[1]


def _loop(manager: Any, rank: int) -> None:
    weights = {"w": torch.zeros(8)}
    manager.restore(distckpt.Shards(weights))
    for step in (1, 2):
        weights["w"] += 1 + rank
        manager.save(step, distckpt.Shards(weights))
    manager.save(3, {"net": distckpt.Shards(weights), "loop": distckpt.Shards({"step": 3})})


def _others(payload: Any, rank: int, world: int) -> dict[str, bytes]:
    return contents_written(distckpt.Shards({"w": payload.tree()["w"] + 1}), rank, world)


def test_a_loop_with_tensors_runs_in_the_simulation() -> None:
    for seed, faults in enumerate([(), ("kill:1@60",), ("power@150",)]):
        run = Simulation(seed=seed, faults=faults).run(_loop)
        assert run.fired and run.violations == [], run.violations


def test_its_author_may_say_what_it_must_hold() -> None:
    assert any(line.startswith("I1:") for line in Simulation(contents=_others).run(_loop).violations)
