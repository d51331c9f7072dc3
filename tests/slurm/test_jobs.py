"""What happens to jobs on a real cluster: killed in a save, a lost node, two on one root, arrays, the end of the allocation."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from distckpt.launch.nodelist import expand
from tests.slurm.conftest import REPOSITORY, Cluster, Job
from tests.slurm.steps import HELD

TOTAL = 4


def submit(cluster: Cluster, folder: Path, *options: str, total: int = TOTAL, by: str = "srun", **variables: str) -> Job:
    script = str(REPOSITORY / "tests/slurm/steps.py")
    return cluster.submit(folder, str(REPOSITORY / f"slurm/{by}.sbatch"), *options, SCRIPT=script,
                          ARGS=f"{folder} {total}", **variables)


def report(folder: Path, run: int, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"run-{run}.rank-{rank}.json").read_text())
    return found


def folder_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_tasks_of_an_array_side_by_side_and_only_the_stopped_one_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """The number of an array's last task is the array's: requeued by that, all of its tasks would start again."""
    tasks = [tmp_path / f"task-{n}" for n in (0, 1)]
    for folder in tasks:
        folder.mkdir()
    array = submit(cluster, tmp_path, "--nodes=1", "--nodelist=n1", "--array=0-1", total=TOTAL + 60)
    jobs = [Job(cluster, f"{array.number}_{n}", tmp_path) for n in (0, 1)]
    for job, folder in zip(jobs, tasks, strict=True):
        job.until("every rank in the middle of a step", lambda f=folder: len(list(f.glob("at.*"))) == 2)  # type: ignore[misc]
    numbers = [job.field("JobId") for job in jobs]
    stopped = numbers.index(array.number)
    jobs[stopped].cancel("--signal=USR1")
    for folder in tasks:
        (folder / "go").touch()
    for job in jobs:
        job.over()
    assert [job.field("Restarts") for job in jobs] == ["1" if n == stopped else "0" for n in (0, 1)]
    assert report(tasks[1 - stopped], 0)["ended"] == TOTAL + 60
    first, second = report(tasks[stopped], 0), report(tasks[stopped], 1)
    assert first["target"] == f"{array.number}_{stopped}" and first["ended"] == second["started"] < second["ended"] == TOTAL + 60
    assert report(tasks[0], 0)["port"] != report(tasks[1], 0)["port"]


def test_requeued_in_the_middle_of_a_save_it_goes_on_from_the_one_before(cluster: Cluster, tmp_path: Path) -> None:
    """TERM, and KILL after KillWait, while every rank writes; nobody has to clean up. Under srun, and under torchrun."""
    jobs = {by: submit(cluster, folder_of(tmp_path, by), by=by, HOLD="save", RANKS="2") for by in ("srun", "torchrun")}
    for job in jobs.values():
        job.until("every rank in the middle of a save", job.files("at", 4))
        cluster.run("scontrol", "requeue", job.number)
    for by, job in jobs.items():
        job.over()
        assert job.field("Restarts") == "1" and not (job.folder / "run-0.rank-0.json").exists()
        again = [report(job.folder, 1, rank) for rank in range(4)]
        assert [(r["launcher"], r["started"], r["ended"]) for r in again] == [(by, HELD, TOTAL)] * 4
        assert list((job.folder / "root/.distckpt/staging").glob("*/*/step-*")) == []


def test_jobs_of_three_launchers_side_by_side_on_one_node_and_finishs_code_has_one_started_again_however_often(
        cluster: Cluster, tmp_path: Path) -> None:
    """Neither their ports nor their names meet. No RETRIES: what ends with 75 has not failed; srun passes that on, and torchrun
    makes a 1 of it."""
    names = {"srun": "srun", "torchrun": "torchrun", "beside": "torchrun"}
    if importlib.util.find_spec("deepspeed") is not None:
        names["deepspeed"] = "deepspeed"
    jobs = {name: submit(cluster, folder_of(tmp_path, name), "--nodes=1", "--nodelist=n1", by=by, total=TOTAL + 60, POLICY="exit",
                         RETRIES="0") for name, by in names.items()}
    for job in jobs.values():
        job.until("every rank in the middle of a step", job.files("at", 2))
    stopped = {"srun", "torchrun"}
    for name in stopped:
        jobs[name].cancel("--signal=USR1")
        jobs[name].until("the signal on every rank", jobs[name].files("signalled", 2))
    for job in jobs.values():
        (job.folder / "go").touch()
    for name, job in jobs.items():
        job.over()
        first = report(job.folder, 0)
        assert (first["launcher"], first["started"], job.field("Restarts")) == (names[name], 0, "1" if name in stopped else "0")
        if name not in stopped:
            assert first["ended"] == TOTAL + 60 and not job.files("signalled", 2)()
            continue
        second = report(job.folder, 1)
        assert f"job {job.number}: failed with 75, and is started again" in job.output()
        assert first["stopped"] and first["ended"] == second["started"] < second["ended"] == TOTAL + 60 and not second["stopped"]
        assert not list(job.folder.glob("*.stopped"))
    assert len({report(job.folder, 0)["port"] for job in jobs.values()}) == len(jobs)


def test_a_cancelled_job_does_not_come_back(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM tells every rank and the job script, as before a requeue. Ranks that can, save, and rank 0 leaves it; where they
    die of it, the job script does."""
    saving, dying = tmp_path / "saving", tmp_path / "dying"
    for folder in (saving, dying):
        folder.mkdir()
    able = submit(cluster, saving, "--nodes=1", total=TOTAL + 60)
    unable = submit(cluster, dying, "--nodes=1", START=f"{dying}/never")
    able.until("every rank in the middle of a step", able.files("at", 2))
    unable.until("every rank before its manager", unable.files("ready", 2))
    for job in (able, unable):
        job.cancel()
    (saving / "go").touch()
    for job in (able, unable):
        job.over("CANCELLED")
        assert "told to stop" in job.output() and "is started again" not in job.output() and job.field("Restarts") == "0"
    first = report(saving, 0)
    assert "SIGTERM on rank" in first["stopped"] and (saving / f"root/step-{first['ended']}/commit.json").exists()
    assert "so it is not requeued" in able.output()


def test_B122_slurms_own_signal_before_the_time_limit_or_what_the_controller_says_of_it_stops_the_run(
        cluster: Cluster, tmp_path: Path) -> None:
    """SLURM 22.05 sets no SLURM_JOB_END_TIME. A job of one minute is told to stop at once: a minute is the least margin. One of
    three minutes gets SLURM's signal, which may come up to a minute early, before that."""
    asked, told = folder_of(tmp_path, "asked"), folder_of(tmp_path, "told")
    for folder in (asked, told):
        (folder / "go").touch()
    slow = submit(cluster, told, "--nodes=1", "--time=3", "--signal=USR1@110", total=100_000, STEP_SECONDS="0.5")
    job = submit(cluster, asked, "--nodes=1", "--time=1", "--signal=USR1@1", total=100_000)
    job.until("the first run's end", lambda: (asked / "run-0.rank-1.json").exists())
    job.until("requeued", lambda: job.field("Restarts") == "1")
    cluster.end(job)
    assert report(asked, 0)["stopped"] == report(asked, 0, 1)["stopped"] == "the allocation ends soon"
    assert (asked / f"root/step-{report(asked, 0)['ended']}/commit.json").exists()
    assert "and 60 s are kept for the stop: the least is 60 s" in job.output()
    assert "60 s are kept for the stop; every restart costs that again, so ask for a longer allocation" in job.output()

    slow.until("the first run's end", lambda: (told / "run-0.rank-1.json").exists())
    slow.until("requeued", lambda: slow.field("Restarts") == "1")
    cluster.end(slow)
    assert report(told, 0)["stopped"] == report(told, 0, 1)["stopped"] and "SIGUSR1 on rank" in report(told, 0)["stopped"]
    assert slow.files("signalled", 2)() and (told / f"root/step-{report(told, 0)['ended']}/commit.json").exists()


def test_a_step_longer_than_the_grace_is_told_in_the_jobs_output_and_the_next_time_at_the_start(cluster: Cluster,
                                                                                               tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    alone = ("--nodes=1", "--ntasks-per-node=1")
    job = submit(cluster, tmp_path, *alone, total=16, STOP_GRACE="2", STEP_SECONDS="1.2")
    job.over()
    warning = "this job is killed 2 s after a stop signal, and a stop takes up to"
    assert job.output().count(warning) == 1 and "twice a step of" in job.output()
    (tmp_path / "again").mkdir()
    again = submit(cluster, tmp_path / "again", *alone, total=16, STOP_GRACE="2", ROOT=f"{tmp_path}/root")
    again.over()
    assert again.output().count(warning) == 1 and "twice a step of" in again.output(), "without a step"


def test_a_heterogeneous_job_of_one_step_is_requeued_as_one(cluster: Cluster, tmp_path: Path) -> None:
    """Two components, and the first one on the node that comes second in the list: rank 0 is there."""
    text = (REPOSITORY / "slurm/srun.sbatch").read_text()
    (tmp_path / "het.sbatch").write_text(text.replace("srun --kill", "srun --het-group=0,1 --kill"))
    options = ["--nodes=1", "--nodelist=n2", "--ntasks-per-node=2", ":", "--nodes=1", "--nodelist=n1", "--ntasks-per-node=1",
               "--cpus-per-task=2"]
    script = str(REPOSITORY / "tests/slurm/steps.py")
    job = cluster.submit(tmp_path, str(tmp_path / "het.sbatch"), *options, SCRIPT=script, ARGS=f"{tmp_path} {TOTAL + 60}")
    job.until("every rank in the middle of a step", job.files("at", 3))
    job.cancel("--signal=USR1")
    (tmp_path / "go").touch()
    job.over()
    assert job.field("Restarts") == "1"
    for rank in range(3):
        first, second = report(tmp_path, 0, rank), report(tmp_path, 1, rank)
        assert first["stopped"] and first["ended"] == second["started"] < second["ended"] == TOTAL + 60
        assert (first["world"], first["kind"], first["target"]) == (3, "slurm", job.number)


def test_lists_of_nodes_are_read_as_scontrol_reads_them(cluster: Cluster) -> None:
    for text in ("n1", "n[1-3,7],m2", "n[003-010,12],m1", "r[1-2]n[1-2]", "a-b.c.d"):
        assert list(expand(text)) == cluster.run("scontrol", "show", "hostnames", text).split()
