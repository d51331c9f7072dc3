"""A real SLURM cluster of two nodes on this machine: one that is up is used, else one is brought up where SLURM is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.frameworks.stage import ENVIRONMENT, EXTENSIONS

REPOSITORY = Path(__file__).parents[2]
SCRIPT = str(REPOSITORY / "scripts" / "slurm-cluster")
CONF = "/run/distckpt-slurm/slurm.conf"
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("slurm"))  # one cluster, one worker


class Job:
    """A job that was submitted. ``folder`` has its output and what its ranks leave."""

    def __init__(self, cluster: Cluster, number: str, folder: Path) -> None:
        self.cluster, self.number, self.folder = cluster, number, folder

    def field(self, name: str) -> str:
        text = self.cluster.run("scontrol", "show", "job", "--oneliner", self.number)
        return dict(item.partition("=")[::2] for item in text.split())[name]

    def cancel(self, *how: str) -> None:
        self.cluster.run("scancel", *how, self.number)

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.out")))

    def until(self, what: str, seen: Callable[[], bool], limit: float = 150.0) -> None:
        """Wait for ``seen``; AssertionError with all the job said when it is over before that, or the time is."""
        end = time.monotonic() + limit
        while not seen():
            state = self.field("JobState")
            if (state in OVER and not seen()) or time.monotonic() > end:
                said = f"{what}: not seen, job {self.number} is {state}\n{self.output()[-8000:]}"
                self.cluster.end(self)
                raise AssertionError(said)
            time.sleep(0.1)

    def files(self, stem: str, count: int) -> Callable[[], bool]:
        return lambda: len(list(self.folder.glob(f"{stem}.*"))) == count


class Cluster:
    """Commands of SLURM, and jobs, which are gone when the test is over."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def run(self, *command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        done = subprocess.run(command, env={**os.environ, "SLURM_CONF": CONF, **(env or {})}, cwd=cwd, capture_output=True,
                              text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, folder: Path, script: str, *options: str, **variables: str) -> Job:
        """``sbatch script`` as a user types it, from ``folder``."""
        bin = Path(sys.executable).parent
        env = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "PATH": f"{folder}/bin:{bin}:{os.environ['PATH']}",
               "PYTHON": sys.executable, "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", EXTENSIONS), **variables}
        number = self.run("sbatch", "--parsable", *options, script, env=env, cwd=folder).strip().partition(";")[0]
        self.jobs.append(Job(self, number, folder))
        return self.jobs[-1]

    def end(self, job: Job) -> None:
        self.run("scancel", job.number)
        end = time.monotonic() + 30
        while time.monotonic() < end and job.field("JobState") not in OVER:
            time.sleep(0.2)

    def end_all(self) -> None:
        for job in self.jobs:
            if job.field("JobState") not in OVER:
                self.end(job)
        self.jobs.clear()


@pytest.fixture(scope="session")
def running() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root: scripts/slurm-cluster makes nodes of namespaces")
    if os.environ.get("DISTCKPT_SLURM") == "none":
        pytest.skip("no cluster came up on this machine: `scripts/slurm-cluster up` says why")
    up = subprocess.run([SCRIPT, "status"], capture_output=True, timeout=60).returncode == 0
    if not up:
        if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
            pytest.skip("no SLURM here: `scripts/slurm-cluster up` installs it and brings a cluster up")
        done = subprocess.run([SCRIPT, "up", "2"], capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
    yield
    if not up:
        subprocess.run([SCRIPT, "down"], capture_output=True, timeout=120, check=True)


@pytest.fixture
def cluster(running: None) -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.end_all()
