"""``scripts/bench frameworks`` runs a framework's scenario to its ratios; ``scripts/bench-gpu`` runs, where there is no GPU."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.stage import ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.xdist_group("accelerate")
def test_quick_rounds_of_one_framework_end_in_ratios(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    place, rows = tmp_path / "place", tmp_path / "rows.json"
    command = [sys.executable, "-m", "scripts.benchmarks", "frameworks", "--quick", "--only", "accelerate", "--size", "12"]
    done = subprocess.run([*command, "--dir", str(place), "--json", str(rows)], cwd=REPOSITORY, env={**os.environ, **ENVIRONMENT},
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {row["name"]: row for row in json.loads(rows.read_text())["groups"]["frameworks"]}
    assert list(found) == ["accelerate: durable save / save_state + fsync", "accelerate: save returns / save_state",
                           "the same in CPU time of the training thread"]
    lines = done.stdout.splitlines()
    for name, row in found.items():
        assert len(row["ratios"]) == 3 and min(row["ratios"]) > 0, row
        assert any(line.startswith(name) and f"{statistics.median(row['ratios']):.3g} [" in line for line in lines), done.stdout
    durable, returns = found["accelerate: durable save / save_state + fsync"], found["accelerate: save returns / save_state"]
    assert durable["target"] == 1.0
    assert all(own < synced for own, synced in zip(returns["theirs"], durable["theirs"], strict=True)), "fsync is in the one only"
    assert "load" in lines[0] and "load" in lines[-1]
    assert not list(place.iterdir()), "what was written is gone"


def test_the_gpus_benchmark_runs_on_a_mocked_one_and_says_so_where_there_is_none(tmp_path: Path) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DISTCKPT_PYTHON": sys.executable}
    command = [str(REPOSITORY / "scripts/bench-gpu"), "--size", "1", "--rounds", "1", "--dir", str(tmp_path)]
    none = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert none.returncode == 3 and "sees no GPU" in none.stderr and not none.stdout, none
    done = subprocess.run([*command, "--mocked"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, _, *rows = done.stdout.splitlines()
    assert "the figures say nothing" in first and len(rows) == 16 and all("1 rounds" in row for row in rows), done.stdout
    assert not list(tmp_path.iterdir()), "what was written is gone"
