"""What begin refuses, on every rank alike and before anything is written."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt.errors import DiskFull, SaveError, StepAlreadyExists
from distckpt.layout import Layout
from distckpt.payloads.base import Ranks
from distckpt.saving.files import RankFiles
from distckpt.testing import checker, faults
from distckpt.testing.scheduler import Delays, Task
from distckpt.testing.simruntime import SimClient
from distckpt.testing.simulation import ROOT, Simulation, State, Told, tree_of
from tests.inprocess import Job, same_error, staged, tree, write

STATE = {"w": torch.arange(8.0)}


class _Bad(distckpt.Shards):
    def check(self) -> None:
        raise RuntimeError("no state today")


def test_a_rank_that_has_no_state_is_named_and_is_no_disagreement(tmp_path: Path) -> None:
    """Its report says nothing of the step nor of the series: the failure is judged before whether all ask for the same."""
    job = Job(tmp_path / "root")
    for error in same_error(job.run(lambda m: m.save(1, _Bad(STATE) if m.rank == 1 else STATE)), SaveError):
        assert list(error.failures) == [1] and "no state today" in str(error) and error.outcome == "aborted"
    assert tree(tmp_path / "root") == {} and staged(tmp_path / "root") == []


def test_a_replace_of_what_is_leased_is_refused_before_anybody_writes(tmp_path: Path) -> None:
    wrote: list[int] = []

    def replace(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1, on_exists="replace"):
            wrote.append(manager.rank)

    job = Job(tmp_path / "root")
    job.start()
    job.each(lambda m: write(m, 1))
    root = distckpt.open(tmp_path / "root")
    with root.lease(root.checkpoints()[0], reason="read", ttl=60.0):
        for error in same_error(job.each(replace), StepAlreadyExists):
            assert "in use" in str(error) and "read" in str(error)
    assert wrote == [] and staged(tmp_path / "root") == []
    job.finish()


def test_what_cannot_be_read_under_the_name_of_the_step_is_the_disks_fault_and_nothing_is_moved_away() -> None:
    armed = list[int]()

    def program(manager: Told, rank: int) -> None:
        manager.save(1, State(b"first"))
        armed.append(rank)
        with pytest.raises(SaveError, match="cannot tell what stands under the name of step 1") as caught:
            manager.save(1, State(b"again"), on_exists="replace")
        assert type(caught.value) is SaveError and "Input/output error" in str(caught.value)

    marker = f"{ROOT}/step-1/commit.json"
    fault = faults.fail(errno.EIO, op="read", path=lambda path: bool(armed) and path == marker, forever=True)
    simulation = Simulation(2)
    assert simulation.job(program, file_faults={0: [fault]}).errors == {}
    assert "step-1" in checker.standing(tree_of(simulation.files))


def test_a_staging_directory_that_could_not_be_made_leaves_nothing() -> None:
    simulation, left = Simulation(2), list[list[str]]()

    def program(manager: Told, rank: int) -> None:
        with pytest.raises(SaveError):
            manager.save(1, State(b"x"))
        left.append([i.name for i in simulation.files.scan(Layout.at(ROOT).staging(1)) if i.kind == "dir"])

    fault = faults.fail(errno.EIO, op="mkdir", path=lambda path: path.endswith("/step-1"))
    assert simulation.job(program, file_faults={0: [fault]}).errors == {} and left == [[], []]


class _AtOnce:
    """Who rotates goes on before anybody else."""

    def born(self, task: Task) -> None:
        return None

    def choose(self, ready: list[Task], current: Task | None) -> Task:
        return next((task for task in ready if task.name == "afterwards"), current or ready[0])


def test_P3_nothing_is_rotated_before_the_verdict_can_be_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank 0 that loses the store between the two has let nothing go for a save that nobody knows of."""
    real, order = SimClient.set, list[str]()

    def set_(client: SimClient, key: str, value: str | bytes) -> None:
        real(client, key, value)
        if "outcome" in key:
            order.append("told")

    def program(manager: Told, rank: int) -> None:
        for step in (1, 2):
            manager.save(step, State(b"x"))

    monkeypatch.setattr(SimClient, "set", set_)
    fault = faults.call(lambda operation: order.append("moved"), op="rename", path=lambda path: "/trash/1/step-1." in path)
    simulation = Simulation(2, keep=1, policy=lambda seed: _AtOnce())
    assert simulation.job(program, file_faults={0: [fault]}).errors == {} and order == ["told", "told", "moved"]


def test_the_room_of_an_attempt_that_found_the_disk_full_is_back_when_its_error_is_raised() -> None:
    """The caller's next move may be a smaller save, at once; and nobody but the caller runs until he waits."""
    simulation, left = Simulation(2, policy=lambda seed: Delays({})), list[list[str]]()
    layout = Layout.at(ROOT)

    def program(manager: Told, rank: int) -> None:
        with pytest.raises(DiskFull):
            manager.save(1, State(b"x"))
        if rank == 0:
            left.append([item.name for place in (layout.staging(1), layout.trash(1)) for item in simulation.files.scan(place)
                         if item.kind == "dir"])

    fault = faults.fail(errno.ENOSPC, op="write", path="/step-1/")
    assert simulation.job(program, file_faults={0: [fault]}).errors == {} and fault.fired and left == [[]]


@pytest.mark.parametrize("torn", [False, True])
def test_a_job_that_has_not_resumed_skips_what_the_one_before_has_saved_if_it_is_whole(torn: bool) -> None:
    simulation = Simulation(2)
    assert simulation.job(lambda manager, rank: manager.save(1, State(b"x")).skipped).values == {0: False, 1: False}
    if torn:
        marker = f"{ROOT}/step-1/commit.json"
        simulation.files.overwrite(marker, simulation.files.read(marker, 1 << 20)[:-9] + b"xxxxxxx\"}")
    again = simulation.job(lambda manager, rank: manager.save(1, State(b"y"), on_exists="skip").skipped)
    assert again.errors == {} and again.values == {0: not torn, 1: not torn}
    assert "step-1" in checker.standing(tree_of(simulation.files))


class _WithTool(State):
    def write(self, files: RankFiles, ranks: Ranks) -> None:
        super().write(files, ranks)
        if ranks.rank == 0:
            with files.writer("tool.py", exact=True) as out:
                out.write(b"a tool")
            files.beside("tool.py")


def test_a_tool_is_copied_into_the_root_after_the_commit() -> None:
    simulation = Simulation(2)
    assert simulation.job(lambda manager, rank: manager.save(1, _WithTool(b"x")).skipped).errors == {}
    assert simulation.files.read(f"{ROOT}/tool.py", 100) == b"a tool"


def test_what_rank_0_itself_cannot_save_is_noted_as_refused(tmp_path: Path) -> None:
    job = Job(tmp_path / "root")
    same_error(job.run(lambda m: m.save(1, _Bad(STATE) if m.rank == 0 else STATE)), SaveError)
    journal = (tmp_path / "root" / ".distckpt" / "journal" / "1.jsonl").read_text()
    assert [event["step"] for event in map(json.loads, journal.splitlines()) if event["event"] == "refused"] == [1]


def test_S11_a_root_whose_last_commit_cannot_be_read_is_not_written_to_and_gives_its_number_to_nobody() -> None:
    simulation = Simulation(2)
    assert simulation.job(lambda manager, rank: manager.save(1, State(b"x")).skipped).errors == {}
    fault = faults.fail(errno.EIO, op="read", path=lambda path: path == f"{ROOT}/step-1/commit.json", forever=True)
    run = simulation.job(lambda manager, rank: manager.save(2, State(b"y")).skipped, file_faults={0: [fault]})
    assert len(run.errors) == 2 and all("cannot tell its place in the order of commits" in str(e) for e in run.errors.values())
