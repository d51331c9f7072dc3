"""Who a process is, by what launchers set: the variables here are those that the real ones set (tests/slurm shows it)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distckpt
from distckpt.errors import ConfigError
from distckpt.launch.environment import RENDEZVOUS, STORE, Launch, detect
from distckpt.launch.nodelist import expand, first
from distckpt.launch.slurm import end_as_set, end_as_told
from distckpt.runtime import Identity

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "2", "SLURM_NTASKS": "4", "SLURM_PROCID": "0",
       "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29400",
         "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "3"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
# a step over both components of ``sbatch --nodelist=n2 : --nodelist=n1,n3``: rank 1 of 4 on n2, rank 3 on n3
HET = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
       "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1,3]", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-3]",
       "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1,2,1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
       "SLURM_NODEID": "0", "SLURMD_NODENAME": "n2"}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2",
             "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


def brief(found: Launch) -> tuple[str, int, int, int, int]:
    return found.kind, found.rank, found.world, found.local_rank, found.local_world


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, ("single", 0, 1, 0, 1)),
    (JOB, ("single", 0, 1, 0, 1)),  # the batch script itself: SLURM_NTASKS is what it may start, not what it is
    (STEP, ("srun", 2, 3, 0, 1)),
    ({**STEP, "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, ("srun", 1, 3, 1, 2)),
    (TORCH, ("torchrun", 1, 2, 1, 2)),
    ({**STEP, **TORCH}, ("torchrun", 1, 2, 1, 2)),
    (DEEPSPEED, ("deepspeed", 3, 4, 1, 2)),
    ({**STEP, **DEEPSPEED}, ("deepspeed", 3, 4, 1, 2)),
    ({"RANK": "0", "WORLD_SIZE": "2"}, ("environment", 0, 2, -1, 0)),
    (HYDRA, ("mpiexec", 1, 4, 1, 2)),
    (OPENMPI, ("mpiexec", 1, 4, 1, 2)),
    ({**STEP, **HYDRA}, ("mpiexec", 1, 4, 1, 2)),
    ({**STEP, **OPENMPI}, ("mpiexec", 1, 4, 1, 2)),
    ({**STEP, "PMI_RANK": "2", "PMI_SIZE": "3"}, ("srun", 2, 3, 0, 1)),  # srun --mpi=pmi2
    ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("srun", 0, 1, 0, 1)),
    (HET, ("srun", 1, 4, 1, 2)),
    ({**HET, "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURMD_NODENAME": "n3"}, ("srun", 3, 4, 0, 1)),
    ({"WORLD_SIZE": "many", "PMI_SIZE": "-1", "SLURM_JOB_ID": "٣"}, ("single", 0, 1, 0, 1)),
])
def test_who_and_how(environ: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert brief(detect(environ)) == expected


@pytest.mark.parametrize(("text", "node", "here"), [
    ("2(x3),1", "2", 2), ("2(x3),1", "3", 1), ("4", "0", 4), ("4", "1", 0), ("", "0", 0), ("2(y)", "0", 0)])
def test_how_many_tasks_run_here(text: str, node: str, here: int) -> None:
    assert detect({**STEP, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}).local_world == here


def test_the_job_its_restarts_and_torchruns_and_the_name_that_slurm_knows_it_by() -> None:
    found = detect({**STEP, **TORCH})
    assert (found.job, found.target, found.step, found.restart, found.elastic) == ("slurm:7", "7", "0", 2, 3)
    assert str(found) == "started by torchrun, job slurm:7, requeued 2 times, restarted 3 times by torchrun"
    task = detect({**JOB, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "5"})
    assert (task.job, task.target) == ("slurm:7[5]", "7_5"), "scontrol requeue 7 would requeue the whole array"
    for text in ("0", "none", ""):
        assert detect({"SLURM_JOB_ID": text}).job is None
    assert str(detect({})) == "started by no launcher" and str(detect({"WORLD_SIZE": "1"})) == "ranks set in the environment"


def test_where_rank_0_is_when_nothing_else_says_it() -> None:
    assert detect(STEP).host == "n1" and detect({**STEP, "MASTER_ADDR": "n9"}).host == "n9" and detect({}).host is None
    assert detect({**STEP, "SLURM_STEP_NODELIST": "m[7-8]"}).host == "m7", "a step may run on a part of the job's nodes"
    assert detect(JOB).host == "n1"
    assert detect(HET).host == "n2", "SLURM sorts the list, and rank 0 is in the first component"
    assert detect({**HET, "SLURM_STEP_NODELIST": "n[1,3]"}).host == "n1", "a step of the second component alone"
    assert detect({**HET, "SLURM_JOB_NODELIST_HET_GROUP_0": "n["}).host == "n1"
    with pytest.raises(ConfigError, match="is no list of nodes"):
        detect({**STEP, "SLURM_STEP_NODELIST": "n["}).host


def test_jobs_steps_tasks_of_an_array_and_purposes_have_ports_of_their_own() -> None:
    first_job = detect(STEP)
    ports = [replace(first_job, job_id=job, step=str(step)).port(purpose)
             for job in range(41_000, 43_500) for step in range(4) for purpose in (RENDEZVOUS, STORE)]
    assert len(set(ports)) == len(ports) and min(ports) >= 12_000 and max(ports) < 32_000
    assert replace(first_job, step=None).port(STORE) == replace(first_job, step="0").port(STORE)


def test_what_torch_reads_is_set_for_ranks_of_srun() -> None:
    environ = {"LOCAL_RANK": "5"}
    detect(STEP).export(environ)
    assert environ == {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n1",
                       "MASTER_PORT": str(detect(STEP).port(RENDEZVOUS))}
    alone: dict[str, str] = {}
    detect({}).export(alone)
    assert (alone["WORLD_SIZE"], alone["MASTER_ADDR"], alone["MASTER_PORT"]) == ("1", "127.0.0.1", "0")
    under_slurm: dict[str, str] = {}
    detect({**STEP, **HYDRA}).export(under_slurm)
    assert (under_slurm["RANK"], under_slurm["MASTER_ADDR"]) == ("1", "n1")
    with pytest.raises(ConfigError, match="says where rank 0 of 4 listens; set MASTER_ADDR and MASTER_PORT"):
        detect(HYDRA).export({})
    with pytest.raises(ConfigError, match="does not say which of 4 ranks this process is"):
        detect({"PMI_SIZE": "4"}).export({})


def test_what_each_launcher_waits_before_it_kills() -> None:
    assert detect(TORCH).grace == 30 and detect({**TORCH, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "240"}).grace == 240
    assert detect(DEEPSPEED).grace == 30 and detect(STEP).grace is None and detect(HYDRA).grace is None


@pytest.mark.parametrize(("text", "names"), [
    ("localhost", "localhost"), ("n1,n2", "n1 n2"), ("n[1-3,7],m2", "n1 n2 n3 n7 m2"), ("n[003-005]", "n003 n004 n005"),
    ("n[8-11]", "n8 n9 n10 n11"), ("gpu-[01-02]-ib,x", "gpu-01-ib gpu-02-ib x"), ("a-b.c.d", "a-b.c.d"), (" n9 ", "n9"),
    ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2")])
def test_slurms_compressed_list_of_nodes(text: str, names: str) -> None:
    assert list(expand(text)) == names.split() and first(text) == names.split()[0]


@pytest.mark.parametrize("text", ["", " ", ",", "n1,", "n[", "n]", "n[1-3", "n[]", "n[a-b]", "n[3-1]", "n[1,]", "n[1-2-3]",
                                  "n[[1]]"])
def test_what_is_no_list_of_nodes_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is no list of nodes as SLURM writes it; set MASTER_ADDR"):
        list(expand(text))


@given(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r1n"]), st.integers(0, 120), st.integers(1, 4)), min_size=1))
def test_names_written_one_by_one_or_in_brackets_are_the_same(parts: list[tuple[str, int, int]]) -> None:
    names = [f"{stem}{number:0{width}d}" for stem, number, width in parts]
    assert list(expand(",".join(names))) == names
    assert list(expand(",".join(f"{stem}[{number:0{width}d}]" for stem, number, width in parts))) == names


def test_a_rank_that_was_started_in_place_of_another_succeeds_it() -> None:
    old = Identity("n1", 1, "b", "p", "1", "slurm:7", restart=0, step="0", elastic=1)
    assert replace(old, restart=1, elastic=0, step="3").succeeds(old) and replace(old, elastic=2).succeeds(old)
    for other in (old, replace(old, elastic=0), replace(old, elastic=2, step="1"), replace(old, job="slurm:8", restart=1),
                  replace(old, restart=0, elastic=0)):
        assert not other.succeeds(old)
    assert not replace(old, job=None, restart=5).succeeds(replace(old, job=None))
    assert Identity.of_record(old.to_json()) == old
    for wrong in ({"elastic": "x"}, {"step": 1}, {"job": 3}):
        assert Identity.of_record({**old.to_json(), **wrong}) is None
    record = {k: v for k, v in old.to_json().items() if k not in ("elastic", "step")}
    assert Identity.of_record(record) == replace(old, elastic=0, step=None), "a record from before these were kept"


# -- SLURM's commands, and the end of a run ----------------------------------------------------------------------------------


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``scontrol`` and ``squeue`` that write down how they were called and answer with the files beside them."""
    for name in ("scontrol", "squeue"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\ncd {tmp_path}\necho "{name} $*" >>calls\n[ -f fail-$1 ] && {{ cat fail-$1 >&2; exit 1; }}\n'
                        f'[ -f {name}.out ] && cat {name}.out\nexit 0\n')
        path.chmod(0o755)
    for variable in [v for v in os.environ if v.startswith(("SLURM", "PMI", "WORLD_SIZE", "RANK"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def calls(commands: Path) -> list[str]:
    path = commands / "calls"
    return path.read_text().splitlines() if path.exists() else []


class Ended:
    """A manager, as far as ``finish`` looks at one."""

    def __init__(self, stopped: str = "SIGUSR1 on rank 0", rank: int = 0) -> None:
        self.stopped, self.rank, self.closed = stopped, rank, False

    def close(self) -> None:
        self.closed = True


def finish(manager: Ended, policy: str = "auto", code: int = 75) -> int:
    return distckpt.launch.finish(manager, policy, code)


def test_one_rank_requeues_a_stopped_job_once_and_after_close(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    (commands / "scontrol.out").write_text("JobId=7 JobName=a b=c Restarts=2 JobState=RUNNING Reason=None\n")
    others = [Ended(rank=rank) for rank in (1, 2)]
    assert [finish(m) for m in others] == [0, 0] and all(m.closed for m in others) and calls(commands) == []
    manager = Ended()
    manager.close = lambda: (commands / "calls").write_text("close\n")  # type: ignore[assignment]
    assert finish(manager) == 0
    assert calls(commands) == ["close", "scontrol show job --oneliner 7", "scontrol requeue 7"]


def test_a_task_of_an_array_is_asked_for_and_requeued_by_its_own_name(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a job to which a signal is on its way runs."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "5"}.items():
        monkeypatch.setenv(name, value)
    (commands / "scontrol.out").write_text("JobId=7 ArrayTaskId=5 Restarts=0 JobState=SIGNALING\n")
    assert finish(Ended()) == 0
    assert calls(commands) == ["scontrol show job --oneliner 7_5", "scontrol requeue 7_5"]


def test_a_scontrol_that_hangs_does_not_hold_up_the_end(commands: Path, monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("distckpt.launch.slurm._PATIENCE", 0.2)
    (commands / "scontrol").write_text("#!/bin/sh\nexec sleep 50\n")
    assert finish(Ended()) == 75 and "could not be requeued: scontrol show job --oneliner 7: " in caplog.text


def test_a_heterogeneous_job_is_what_its_leader_is(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scontrol and squeue have a line for each component."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for lines, requeued in ((("RUNNING", "PENDING"), True), (("COMPLETING", "RUNNING"), False)):
        text = "".join(f"JobId={7 + n} HetJobId=7 HetJobOffset={n} JobState={state} Restarts={n} Power=\n"
                       for n, state in enumerate(lines))
        (commands / "scontrol.out").write_text(text)
        assert finish(Ended()) == 0
        assert calls(commands) == ["scontrol show job --oneliner 7"] + ["scontrol requeue 7"] * requeued
        (commands / "calls").unlink()
    (commands / "squeue.out").write_text("1800000005\n1800000009\n")
    assert end_as_told() == 1_800_000_005


@pytest.mark.parametrize("said", ["Restarts=2 JobState=COMPLETING", "Restarts=3 JobState=RUNNING", "Restarts=3 JobState=PENDING",
                                  "Restarts=2 JobState=CANCELLED", ""])
def test_a_job_that_slurm_ends_or_has_started_again_is_left_alone(said: str, commands: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  caplog: pytest.LogCaptureFixture) -> None:
    """A cancelled job must not come back, and a zombie must not requeue the run that took its place."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    (commands / "scontrol.out").write_text(f"JobId=7 {said}\n")
    assert finish(Ended()) == 0 and calls(commands) == ["scontrol show job --oneliner 7"]
    assert "so it is not requeued" in caplog.text


def test_a_run_that_is_complete_is_not_started_again(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for policy in ("auto", "requeue", "exit"):
        manager = Ended("")
        assert finish(manager, policy) == 0 and manager.closed
    assert calls(commands) == []


def test_a_code_for_whoever_starts_it_again(commands: Path, monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    assert finish(Ended()) == 75 and finish(Ended(rank=1)) == 75 and finish(Ended(), code=3) == 3
    with pytest.raises(ConfigError, match="needs a SLURM job"):
        finish(Ended(), "requeue")
    with pytest.raises(ConfigError, match="policy must be one of"):
        finish(Ended(), "maybe")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert finish(Ended(), "exit") == 75 and calls(commands) == []
    (commands / "scontrol.out").write_text("JobId=7 Restarts=0 JobState=RUNNING\n")
    (commands / "fail-requeue").write_text("Requested operation is presently disabled\n")
    assert finish(Ended()) == 75 and "could not be requeued: scontrol requeue 7: Requested operation is presently" in caplog.text
    monkeypatch.setenv("PATH", "/nowhere")
    assert finish(Ended()) == 75 and "No such file or directory: 'scontrol'" in caplog.text


def test_an_error_of_close_is_raised_and_nothing_is_requeued(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    class Failing(Ended):
        def close(self) -> None:
            raise distckpt.CoordinationError("the last save failed")

    with pytest.raises(distckpt.CoordinationError):
        finish(Failing())
    assert calls(commands) == []


def test_B122_the_end_of_the_allocation_is_the_schedulers(commands: Path, monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    """SLURM sets SLURM_JOB_END_TIME since 23.02; before that only the controller knows it."""
    caplog.set_level(logging.INFO)
    assert end_as_set() is None and end_as_told() is None and calls(commands) == []
    for text, expected in (("1800000000", 1_800_000_000), ("soon", None), ("0", None), ("", None)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", text)
        assert end_as_set() == expected
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for text, expected in (("1800000005", 1_800_000_005), ("N/A", None), ("0", None), ("", None), ("NOT_SET", None)):
        (commands / "squeue.out").write_text(text + "\n")
        assert end_as_told() == expected
    assert set(calls(commands)) == {"squeue --noheader --jobs=7 --format=%e"}
    (commands / "fail---noheader").write_text("slurm_load_jobs error: Invalid job id specified")
    assert end_as_told() is None and "when this job ends is unknown (squeue" in caplog.text


def test_no_torch_is_needed_to_know_who_one_is() -> None:
    subprocess.run([sys.executable, "-c", "import sys, distckpt; distckpt.launch.detect(); sys.exit('torch' in sys.modules)"],
                   check=True, timeout=60)
