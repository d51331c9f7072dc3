"""A real SLURM cluster of two nodes on this machine: one that is up is used, else one is brought up where SLURM is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.frameworks.stage import ENVIRONMENT, EXTENSIONS

REPOSITORY = Path(__file__).parents[2]
SCRIPT = str(REPOSITORY / "scripts" / "slurm-cluster")
RUN = Path(os.environ.get("DISTCKPT_SLURM_RUN", "/run/distckpt-slurm"))
CONF = str(RUN / "slurm.conf")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")

LIMIT = 150.0
NOISE = re.compile(r"SLURM_RLIMIT|: init: |task_p_|INFO|_get_fed|dump_part|select_p_job_test|io_init_msg|_try_sched")
LATE = 90.0  # a wait that takes longer than that shows what SLURM was at, as a warning when it was not in vain


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which reads the groups
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

    def until(self, what: str, seen: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait for ``seen``; AssertionError with all the job said, and what SLURM is at, when it is over before that, or the time
        is."""
        begun, late = time.monotonic(), ""
        while not seen():
            state, now = self.field("JobState"), time.monotonic()
            if (state in OVER and not seen()) or now > begun + limit:
                said = f"{what}: not seen, job {self.number} is {state}\n{self.output()[-8000:]}\n{late}{self.cluster.at(self)}"
                self.cluster.end(self)
                raise AssertionError(said)
            if now > begun + LATE and not late:
                late = f"--- {LATE:g} s before that, or less\n{self.cluster.at(self)}\n"
            time.sleep(0.1)
        if late:
            warnings.warn(f"job {self.number}: {what}: seen after {time.monotonic() - begun:.0f} s\n{late}", stacklevel=2)

    def over(self, state: str = "COMPLETED") -> None:
        """Wait until SLURM says that the job has ended, so."""
        self.until(f"the end, {state}", lambda: self.field("JobState") == state)

    def files(self, stem: str, count: int) -> Callable[[], bool]:
        return lambda: len(list(self.folder.glob(f"{stem}.*"))) == count


def user(folder: Path) -> dict[str, str]:
    """The environment of one who has activated ours; commands in ``folder/bin`` stand before the real ones."""
    path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "PATH": path,
            "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", EXTENSIONS)}


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
        env = {**user(folder), "PYTHON": sys.executable, **variables}
        return self.job(self.run("sbatch", "--parsable", *options, script, env=env, cwd=folder).strip().partition(";")[0], folder)

    def job(self, number: str, folder: Path) -> Job:
        """One that was submitted from ``folder``."""
        self.jobs.append(Job(self, number, folder))
        return self.jobs[-1]

    def at(self, job: Job) -> str:
        """What SLURM is at, for one who has to find out why a job does not go on: its words on it, logs, and processes."""
        def show(*command: str) -> str:
            done = subprocess.run(command, env={**os.environ, "SLURM_CONF": CONF}, capture_output=True, text=True, timeout=60)
            return f"--- {' '.join(command)}\n{done.stdout}{done.stderr}"

        def words(path: Path) -> str:
            """The last ones, and the last ones on this job."""
            lines = [line for line in path.read_text(errors="replace").splitlines() if not NOISE.search(line)]
            named = re.compile(rf"(\b(JobId=|StepId=|[Jj]ob(id)? )|\[){job.number}\b")
            kept = {n for n, line in enumerate(lines) if named.search(line)}
            wanted = sorted({*sorted(kept)[-60:], *range(max(0, len(lines) - 15), len(lines))})
            return "\n".join([f"--- {path}", *(lines[n][:220] for n in wanted)])

        nodes = sorted(path.parent.name for path in RUN.glob("n*/boot.log"))
        shown = [show("squeue"), show("sinfo", "--Node", "--long"), show("scontrol", "show", "job", job.number)]
        shown += [words(path) for path in (RUN / "slurmctld.log", *sorted(RUN.glob("n*/slurmd.log")))]
        for look in (("ps", "-eo", "pid,ppid,stat,etime,wchan:20,args", "--forest"), ("ss", "-tanp", "exclude", "time-wait")):
            shown += [show(SCRIPT, "exec", node, *look) for node in nodes]
        return "\n".join(shown)

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
def slurm() -> None:
    """Clusters can be brought up here."""
    if os.geteuid() != 0:
        pytest.skip("needs root: scripts/slurm-cluster makes nodes of namespaces")
    if os.environ.get("DISTCKPT_SLURM") == "none":
        pytest.skip("no cluster came up on this machine: `scripts/slurm-cluster up` says why")
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("no SLURM here: `scripts/slurm-cluster up` installs it and brings a cluster up")


@pytest.fixture(scope="session")
def running(slurm: None) -> Iterator[None]:
    up = subprocess.run([SCRIPT, "status"], capture_output=True, timeout=60).returncode == 0
    if not up:
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
