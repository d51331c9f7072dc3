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
from tests.harness import free_port

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.xdist_group("launchers")


def environment(**variables: str) -> dict[str, str]:
    # torch 2.13 gives all generations one store, in which gloo of a new one may meet the addresses of the old one
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
           "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env


def torchrun(folder: Path, *command: str, **variables: str) -> list[dict[str, Any]]:
    """Two ranks, started anew once; the events in the journal."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*launcher, *command], env=environment(**variables), cwd=folder, capture_output=True, text=True,
                          timeout=150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert ended(folder) == [1, 1]
    found = events(folder)
    owners = [json.loads((folder / f"root/.distckpt/owner/{g}.json").read_text())["identity"]["elastic"] for g in (1, 2)]
    assert counted(found) == [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1)] and owners == [0, 1]
    return found


def ended(folder: Path) -> list[int]:
    """How many restarts each rank was told of; both went on after step 1."""
    said = [json.loads((folder / f"ended.{rank}").read_text()) for rank in (0, 1)]
    assert [(kind, *steps) for kind, _, *steps in said] == [("torchrun", 1, 4)] * 2
    return [count for _, count, *_ in said]


def events(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "root/.distckpt/journal").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def counted(found: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Each attempt's step, and the restarts by torchrun before it."""
    return [(e["step"], e["elastic"]) for e in found if e["event"] == "begin"]


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


@pytest.fixture(scope="module")
def two_agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torchrun for each of two ranks, as on two nodes: what they left."""
    folder = tmp_path_factory.mktemp("agents")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1",
                "--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    agents = []
    try:
        for name in ("one", "other"):
            with (folder / name).open("wb") as out:
                command = [*launcher, str(REPOSITORY / "tests/frameworks/elastic.py"), str(folder)]
                agents.append(subprocess.Popen(command, env=environment(DISTCKPT_HOST=name), cwd=folder, stdout=out,
                                               stderr=subprocess.STDOUT))
        codes = [agent.wait(150) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # which it passes on
            agent.wait(60)
    assert codes == [0, 0], "".join((folder / name).read_text()[-3000:] for name in ("one", "other"))
    return folder


def test_of_two_agents_both_start_their_ranks_anew_when_a_rank_of_one_dies(two_agents: Path) -> None:
    """TORCHELASTIC_RESTART_COUNT is each agent's own: the agent whose rank died counts, and the other one only when it saw its
    own rank fail of that, and did not hear of it by the rendezvous first."""
    counts = sum(ended(two_agents))
    assert counts in (1, 2)
    found = events(two_agents)
    assert counted(found) == [(1, 0), (2, 0), (2, counts), (3, counts), (4, counts)]
    assert [e["step"] for e in found if e["event"] == "committed"] == [1, 2, 3, 4]
