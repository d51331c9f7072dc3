"""The owner's record of its last attempts: always whole, whatever stood there or failed before."""

from __future__ import annotations

import errno
import json
from pathlib import Path

from distckpt.layout import Layout
from distckpt.runtime import SYSTEM
from distckpt.status import Status
from distckpt.testing.faults import FaultyFiles, fail


def test_what_a_failed_write_left_does_not_stand_in_the_next(tmp_path: Path) -> None:
    """A record is overwritten in place before it is renamed: of a longer one before it the end would stay."""
    layout = Layout(str(tmp_path))
    left = Path(layout.staging(1, "status.tmp"))
    left.parent.mkdir(parents=True)
    files = FaultyFiles()
    status = Status(files, layout, 1, SYSTEM)
    files.faults = [fail(errno.EIO, op="rename"), fail(errno.EIO, at=2, op="unlink", path="status.tmp")]
    status.note("a" * 16, "failed", error="x" * 1000)
    files.faults = []
    assert left.exists() and not Path(layout.home("status.json")).exists()
    status.note("a" * 16, "committed", error="")
    found = json.loads(Path(layout.home("status.json")).read_text())
    assert [a["state"] for a in found["attempts"]] == ["committed"] and found["failures_in_a_row"] == 0 and not left.exists()


def test_a_record_that_could_not_be_written_leaves_nothing_and_is_written_again(tmp_path: Path) -> None:
    """On a full disk what it takes is given back at once, with what the attempt took."""
    layout = Layout(str(tmp_path))
    left = Path(layout.staging(1, "status.tmp"))
    left.parent.mkdir(parents=True)
    files = FaultyFiles()
    files.faults = [fail(errno.ENOSPC, op="rename")]
    status = Status(files, layout, 1, SYSTEM)
    status.note("a" * 16, "failed")
    assert files.fired and not left.exists() and not Path(layout.home("status.json")).exists()
    status.again()
    assert json.loads(Path(layout.home("status.json")).read_text())["failures_in_a_row"] == 1
