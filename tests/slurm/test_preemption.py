"""The story "a preempted job on SLURM", with the job scripts as people copy them: signal, one step, commit, requeue, resume."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import harness, support
from tests.frameworks.stage import Stage
from tests.slurm.conftest import REPOSITORY, Cluster, Job
from tests.slurm.train import HELD, MORE, uninterrupted, without_mpi

WORLD = 4


def watched_scontrol(folder: Path) -> None:
    """A ``scontrol`` in front of the real one, which writes down who requeued, and what stood in the root at that moment."""
    (folder / "bin").mkdir()
    path = folder / "bin" / "scontrol"
    look = f"$(cat {folder}/root/latest) $(ls -d {folder}/root/step-*/commit.json)"
    path.write_text(f'#!/bin/sh\n[ "$1" = requeue ] && echo "$(hostname) {look}" >>{folder}/requeues\n'
                    f'exec {shutil.which("scontrol")} "$@"\n')
    path.chmod(0o755)


def reports(job: Job, run: int) -> list[dict[str, Any]]:
    return [json.loads((job.folder / f"run-{run}.rank-{rank}.json").read_text()) for rank in range(WORLD)]


def events(job: Job) -> list[dict[str, Any]]:
    paths = sorted((job.folder / "root/.distckpt/journal").glob("*.jsonl"), key=lambda p: int(p.stem))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def reference(kind: str, folder: Path, total: int) -> list[str]:
    """The numbers of a run that nobody stopped, rank by rank."""
    if kind == "mpi":
        return without_mpi(WORLD, total)
    if kind == "deepspeed":
        stage = Stage("deepspeed")
        try:
            return stage.values(WORLD, uninterrupted, kind, str(folder), total, limit=120)
        finally:
            stage.close()
    return harness.values(harness.run(WORLD, uninterrupted, kind, str(folder), total))


# --full signals the job script as well: without its trap it would die, and SLURM would end the ranks with it.
@pytest.mark.parametrize(("script", "kind", "launcher", "to"), [
    ("torchrun", "torch", "torchrun", ()), ("srun", "torch", "srun", ("--full",)), ("deepspeed", "deepspeed", "deepspeed", ()),
    ("mpi", "mpi", "srun", ("--full",)), ("mpi", "openmpi", "srun", ())])
def test_B117_B120_B121_a_preempted_job_saves_one_step_is_requeued_once_and_goes_on(
        script: str, kind: str, launcher: str, to: tuple[str, ...], cluster: Cluster, tmp_path: Path) -> None:
    more: dict[str, str] = {}
    if kind == "openmpi":
        kind, more = "mpi", {**support.openmpi(), "MPI": "pmix"}
        if not list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")):
            pytest.skip("srun --mpi=pmix needs Debian's libpmix-dev, installed before the cluster is brought up")
    elif kind == "mpi":
        more = {"MPIR_CVAR_CH4_NETMOD": "ofi"}  # UCX's addresses can be longer than SLURM reads: slurm/mpi.sbatch
    if kind in ("deepspeed", "mpi") and importlib.util.find_spec({"mpi": "mpi4py"}.get(kind, kind)) is None:
        pytest.skip(f"needs {kind}")
    watched_scontrol(tmp_path)
    job = cluster.submit(tmp_path, str(REPOSITORY / "slurm" / f"{script}.sbatch"),
                         SCRIPT=str(REPOSITORY / "tests/slurm/train.py"), ARGS=f"{kind} {tmp_path}", RANKS="2", **more)
    job.until("every rank in the middle of a step", job.files("at", WORLD))
    job.cancel(*to, "--signal=USR1")
    job.until("the signal on every rank", job.files("signalled", WORLD))
    job.cancel(*to, "--signal=USR1")  # an operator's, and then SLURM's own: the job script waits on
    (tmp_path / "go").touch()
    job.until("the end of every rank of the second run", job.files("run-1", WORLD))
    job.over()

    first, second = reports(job, 0), reports(job, 1)
    assert {(r["kind"], r["world"], r["job"]) for r in first + second} == {(launcher, WORLD, f"slurm:{job.number}")}
    assert {r["host"] for r in first} == {"n1", "n2"}
    assert {r["cpus"] for r in first + second} == {job.field("CPUs/Task")}, "what sbatch was asked for, srun is"
    stopped = first[0]["ended"]
    assert stopped > HELD and {(r["started"], r["ended"]) for r in first} == {(0, stopped)}, "all ranks left at the same step"
    assert len({r["stopped"] for r in first}) == 1 and "SIGUSR1 on rank" in first[0]["stopped"]
    assert {(r["started"], r["ended"], r["stopped"]) for r in second} == {(stopped, stopped + MORE, "")}
    assert job.field("Restarts") == "1"
    requeues = (tmp_path / "requeues").read_text().splitlines()
    committed = f"{tmp_path}/root/step-{stopped}/commit.json"
    assert [line.split()[1:] for line in requeues] == [[f"step-{stopped}", committed]], "by one rank, after the commit"
    assert [r["digest"] for r in second] == reference(kind, tmp_path / "reference", stopped + MORE), "bit for bit"

    told = events(job)
    assert [e["identity"]["restart"] for e in told if e["event"] == "claimed"] == [0, 1]
    assert [(e["step"], e["since_stop"] >= e["seconds"]) for e in told if "since_stop" in e] == [(stopped, True)]
    assert len([e for e in told if e["event"] == "released" and e["seconds"] >= 0]) == 2
    assert f"committed step-{stopped}: " in job.output() and " s after the word to stop" in job.output()
    assert [(e["step"], e["restart"]) for e in told if e["event"] == "begin"] == [(stopped, 0), (stopped + MORE, 1)]
