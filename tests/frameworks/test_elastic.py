"""torchrun starts all ranks anew when one dies: the new generation goes on from the last checkpoint, and it is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.stage import ENVIRONMENT

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.xdist_group("launchers")


def torchrun(folder: Path, *command: str, **variables: str) -> list[dict[str, Any]]:
    """Two ranks, started anew once; the events in the journal."""
    # torch 2.13 gives all generations one store, in which gloo of a new one may meet the addresses of the old one
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
           "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*launcher, *command], env=env, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [json.loads((folder / f"ended.{rank}").read_text()) for rank in (0, 1)] == [["torchrun", 1, 1, 4]] * 2
    paths = sorted((folder / "root/.distckpt/journal").glob("*.jsonl"))
    told = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    assert [(e["step"], e["elastic"]) for e in told if e["event"] == "begin"] == [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1)]
    owners = [json.loads((folder / f"root/.distckpt/owner/{g}.json").read_text())["identity"]["elastic"] for g in (1, 2)]
    assert owners == [0, 1]
    return told


def test_a_generation_of_torchrun_goes_on_where_the_one_before_died_in_a_save(tmp_path: Path) -> None:
    torchrun(tmp_path, str(REPOSITORY / "tests/frameworks/elastic.py"), str(tmp_path))


def test_s5_a_zombie_of_an_old_generation_that_wakes_publishes_nothing(tmp_path: Path) -> None:
    """What torchrun starts is a shell, which it kills; the rank below it has a session of its own, ignores TERM, and stands in
    the middle of a save. In a job the new generation knows that it was started in the old one's place, and does not wait."""
    wrapper = f'exec 1>&2; setsid {sys.executable} {REPOSITORY}/tests/frameworks/elastic.py {tmp_path} zombie & wait $!'
    told = torchrun(tmp_path, "--no-python", "bash", "-c", wrapper, SLURM_JOB_ID="7", SLURM_STEP_ID="0")
    error = (tmp_path / "zombie").read_text()
    assert "save of step 2" in error and "this process lost the root to generation 2" in error and "job slurm:7" in error, error
    assert [e["step"] for e in told if e["event"] == "committed"] == [1, 2, 3, 4]
    for rank in (0, 1):
        assert (tmp_path / f"root/step-2/x.rank-0000{rank}-of-00002").read_text() == "2 of generation 1"
