"""Storage that fails altogether: nothing can be read any more, and still every rank hears one and the same error."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from distckpt.durable import REAL
from distckpt.errors import SaveError, StepAlreadyExists
from distckpt.testing.faults import FaultyFiles, fail
from tests.inprocess import Job, holds, same_error, values, write


def test_a_begin_on_storage_that_is_gone_is_one_SaveError_on_every_rank(tmp_path: Path) -> None:
    """Found by the layer l3-shutdown: rank 0 got the OSError of its look at the owner's record, the others another error."""
    files = FaultyFiles(REAL)
    job = Job(tmp_path / "run", files={0: files})
    job.start()
    values(job.each(lambda manager: write(manager, 1)))
    files.faults.append(fail(errno.EIO, op=("mkdir", "scan"), forever=True))
    errors = same_error(job.each(lambda manager: write(manager, 2)), SaveError)
    assert files.faults[0].fired > 1, "the owner's record could not be looked at either"
    for error in errors:
        assert sorted(error.failures) == [0] and error.outcome == "aborted"
    files.faults.clear()
    values(job.each(lambda manager: write(manager, 2)))
    job.finish()
    assert holds(tmp_path / "run", 2, 2)


@pytest.mark.parametrize("rule", ["error", "skip", "replace"])
def test_a_marker_that_cannot_be_read_is_not_taken_for_one_that_is_bad(tmp_path: Path, rule: str) -> None:
    """Found by the layer l3-shutdown: "adopt it or move it away" was the advice about a checkpoint behind a failing disk."""
    files = FaultyFiles(REAL)
    job = Job(tmp_path / "run", files={0: files})
    job.start()
    values(job.each(lambda manager: write(manager, 1, "old")))
    files.faults.append(fail(errno.EIO, op="read", path="/step-1/commit.json", forever=True))
    for error in same_error(job.each(lambda manager: write(manager, 1, "new", on_exists=rule)), SaveError):
        assert not isinstance(error, StepAlreadyExists) and "cannot tell" in str(error)
    assert files.fired
    files.faults.clear()
    values(job.each(lambda manager: write(manager, 1, "new", on_exists="replace")))
    job.finish()
    assert holds(tmp_path / "run", 1, 2, "new")
