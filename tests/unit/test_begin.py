"""What begin refuses, on every rank alike and before anything is written."""

from __future__ import annotations

from pathlib import Path

import torch

import distckpt
from distckpt.errors import SaveError, StepAlreadyExists
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
