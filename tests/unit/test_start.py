"""What a manager does on the disk before its first save: rank 0's nonce, and what a save needs tried out."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import owned
from distckpt.durable import REAL
from distckpt.errors import ConfigError
from distckpt.options import Seams
from distckpt.testing.faults import FaultyFiles, fail


def test_S10_the_nonce_is_durable_before_anybody_hears_of_it_and_then_all_that_a_save_needs_is_tried(tmp_path: Path) -> None:
    """In this order: a name that is looked up too early is remembered as absent, and each trial needs the one before."""
    files = FaultyFiles()
    distckpt.CheckpointManager(tmp_path / "r", seams=Seams(files=files)).close()
    probes = [o for o in (*files.log, *files.reads) if "/probe-" in o.path]
    top = min((o.path for o in probes), key=len)
    done = [(o.op, o.path[len(top):].lstrip("/"), o.other[len(top):].lstrip("/")) for o in files.log if o.path.startswith(top)]
    written = ["open", "write", "fsync", "close"]
    assert done == [
        ("mkdir", "", ""), *((op, "nonce", "") for op in written), ("fsync_dir", "", ""),
        ("mkdir", "rank-0", ""), *((op, "rank-0/a", "") for op in written), ("rename", "rank-0/a", "rank-0/b"),
        ("fsync_dir", "rank-0", ""), ("unlink", "rank-0/b", ""), ("rmdir", "rank-0", ""),
        ("unlink", "nonce", ""), ("rmdir", "", "")]


@pytest.mark.parametrize("op", ["mkdir", "fsync", "rename", "fsync_dir", "unlink", "rmdir"])
def test_what_a_rank_cannot_do_in_the_root_is_said_at_once_and_the_root_is_given_back(op: str, tmp_path: Path) -> None:
    files = FaultyFiles(REAL, fail(errno.EACCES, op=op, path="/rank-0", forever=True))
    with pytest.raises(ConfigError, match="cannot mkdir, write, fsync, rename and unlink there"):
        distckpt.CheckpointManager(tmp_path / "r", seams=Seams(files=files))
    assert files.fired and not owned._open
    distckpt.CheckpointManager(tmp_path / "r").close()


def test_a_root_that_a_rank_may_not_read_is_said_at_once_and_what_passes_is_looked_at_again(tmp_path: Path) -> None:
    files = FaultyFiles(REAL, fail(errno.EACCES, op="read", path="/nonce", forever=True))
    with pytest.raises(ConfigError, match="cannot read it"):
        distckpt.CheckpointManager(tmp_path / "r", seams=Seams(files=files))
    files.faults[:] = [fail(errno.ESTALE, op="read", path="/nonce")]
    distckpt.CheckpointManager(tmp_path / "r", seams=Seams(files=files)).close()
    assert files.fired


def test_S8_what_a_run_goes_on_from_is_made_durable_by_the_run_itself(tmp_path: Path) -> None:
    """It was perhaps copied here, or its last fsync failed: what is trained from now on rests on it."""
    with distckpt.CheckpointManager(tmp_path / "r") as manager:
        manager.save(1, {"a": torch.zeros(3)})
    files = FaultyFiles()
    with distckpt.CheckpointManager(tmp_path / "r", seams=Seams(files=files)) as manager:
        assert manager.resume().step == 1
        synced = {o.path for op in ("fsync_file", "fsync_dir") for o in files.operations(op)}
    directory = tmp_path / "r" / "step-1"
    standing = {str(path) for path in (directory, *directory.rglob("*"))}
    assert standing <= synced and len(standing) == 3
