"""torchrun starts all ranks anew when one dies: the new generation goes on from the last checkpoint, and it is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.stage import ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.xdist_group("launchers")
def test_a_generation_of_torchrun_goes_on_where_the_one_before_died_in_a_save(tmp_path: Path) -> None:
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
               str(REPOSITORY / "tests/frameworks/elastic.py"), str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [json.loads((tmp_path / f"ended.{rank}").read_text()) for rank in (0, 1)] == [["torchrun", 1, 1, 4]] * 2
    journal = tmp_path / "root/.distckpt/journal"
    told = [json.loads(line) for path in sorted(journal.glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert [(e["step"], e["elastic"]) for e in told if e["event"] == "begin"] == [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1)]
    owners = [json.loads((tmp_path / f"root/.distckpt/owner/{g}.json").read_text())["identity"]["elastic"] for g in (1, 2)]
    assert owners == [0, 1]
