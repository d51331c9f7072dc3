"""``scripts/slurm-cluster``: what it brings up is gone after ``down``. On a cluster of its own beside that of the other tests."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import RUN, SCRIPT

NUMBER = 1 + os.getpid() % 254  # of another one for each session of tests on this machine
OWN = Path(f"/run/distckpt-test{NUMBER}")


def own(*command: str) -> str:
    """``slurm-cluster`` or a SLURM command, on our own cluster."""
    env = {**os.environ, "DISTCKPT_SLURM_RUN": str(OWN), "SLURM_CONF": f"{OWN}/slurm.conf"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def processes() -> set[str]:
    """Those of our own cluster, its jobs' included: they all name its directory, in their arguments or in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "comm").read_text().strip()
            told = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is not root's to look at
        if f"{OWN}".encode() in told:
            found.add(f"process {name} {path.name}")
    return found


def traces() -> set[str]:
    """What a cluster can leave on this machine. Mounts and processes: those that name it, as other tests make some meanwhile."""
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    mounts = [line.split()[:2] for line in Path("/proc/mounts").read_text().splitlines() if "distckpt" in line]
    files = [path for path in (*Path("/run").iterdir(), Path("/node-local")) if path.exists()]
    return {*(f"link {name}" for name in links), *(f"mount {what} {where}" for what, where in mounts), *map(str, files),
            *processes()}


@pytest.fixture
def untouched(slurm: None) -> Iterator[None]:
    """The cluster of the other tests, if it is up, lives on; our own one is gone, whatever happens."""
    pids = [path.read_text().strip() for pattern in ("*.pid", "n*/pid") for path in RUN.glob(pattern)]
    yield
    subprocess.run([SCRIPT, "down"], env={**os.environ, "DISTCKPT_SLURM_RUN": str(OWN)}, check=True, timeout=100)
    assert [pid for pid in pids if not Path("/proc", pid).exists()] == []


@pytest.mark.parametrize("state", ["idle", "at work", "without its node"])
def test_down_leaves_nothing_behind(state: str, untouched: None) -> None:
    before = traces()
    own(SCRIPT, "up", "1")
    if state != "idle":
        # as a rank that ignores TERM, and has started something in a session of its own
        text = "trap '' TERM; setsid sleep 1000 & echo >/node-local/written; touch $SLURM_CONF.started; sleep 1000"
        own("sbatch", "--output=/dev/null", f"--wrap={text}")
        end = time.monotonic() + 60
        while not (OWN / "slurm.conf.started").exists():
            assert time.monotonic() < end, own("squeue")
            time.sleep(0.1)
    there = traces() - before
    assert {f"link distckpt{NUMBER}", f"link dck{NUMBER}-n1", f"mount node-local-n1 {OWN}/n1/disk", f"{OWN}"} <= there
    node = {"unshare", "slurmd"} if state == "idle" else {"unshare", "slurmd", "slurmstepd", "sleep"}
    assert {"munged", "slurmctld", *node} <= {line.split()[1] for line in processes()}
    if state == "without its node":
        own(SCRIPT, "kill", "n1")
        assert "slurmctld" in (names := {line.split()[1] for line in processes()}) and not node & names
    own(SCRIPT, "down")
    assert traces() == before


def test_a_number_that_no_network_has_is_refused(slurm: None) -> None:
    for path in ("/run/distckpt-slurm255", "run/distckpt7", "/run/a b7", "/run/7"):
        done = subprocess.run([SCRIPT, "status"], env={**os.environ, "DISTCKPT_SLURM_RUN": path}, capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 2 and f"DISTCKPT_SLURM_RUN is '{path}'" in done.stderr


def test_addresses_stay_when_a_node_dies_and_boots_again(untouched: None) -> None:
    """Those who have learned them send to them for up to a minute; a bridge would take the lowest one of the ports it has."""
    own(SCRIPT, "up", "1")

    def addresses() -> list[str]:
        shown = own(SCRIPT, "exec", "n1", "sh", "-c", "until ip -brief link show eth0 2>/dev/null; do sleep 0.1; done")
        return [Path(f"/sys/class/net/distckpt{NUMBER}/address").read_text(), shown.split()[2]]

    before = addresses()
    own(SCRIPT, "kill", "n1")
    own(SCRIPT, "start", "n1")
    assert addresses() == before
