"""Bad input gets one clear error on every rank, before anything is touched, and loses nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import distckpt
from distckpt import Timeouts
from distckpt.durable import REAL, Files, Item
from distckpt.errors import ConfigError, DiskFull, SaveError
from distckpt.retention import KeepLast
from distckpt.testing.faults import FaultyFiles, fail
from tests.inprocess import Job, holds, same_error, staged, tree, values, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def refused(job: Job) -> str:
    """What every rank of ``job`` is told when it opens its manager."""
    return str(same_error(job.threads.run(job.open), ConfigError)[0])


# -- the root ----------------------------------------------------------------------------------------------------------


def test_a_root_that_is_a_file_or_below_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for bad in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        text = refused(Job(bad))
        assert "is there and is not a directory" in text and str(tmp_path / "file") in text
    assert (tmp_path / "file").read_text() == "precious" and len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    where = tmp_path / "ro"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(where)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.root_only
def test_a_root_on_a_read_only_mount(read_only: Path) -> None:
    text = refused(Job(read_only / "root"))
    assert "is not writable" in text and "Read-only file system" in text and "choose another root" in text


@pytest.mark.parametrize(("op", "rank"), [("mkdir", 1), ("rename", 2), ("fsync_dir", 1), ("open", 2), ("unlink", 0)])
def test_a_root_that_one_rank_cannot_use_is_found_out_before_step_1(op: str, rank: int, root: Path) -> None:
    """mkdir, write, rename, fsync and unlink are tried by every rank; the error names the rank and its host."""
    disk = FaultyFiles(REAL, fail(errno.EACCES, op=op, path=f"/rank-{rank}", forever=True))
    text = refused(Job(root, 3, files={rank: disk}, hosts=["a", "b", "c"]))
    assert f"rank {rank} on {'abc'[rank]} cannot mkdir, write, fsync, rename and unlink there" in text
    assert "Permission denied" in text and "Fine on: " + ", ".join(h for h in "abc" if h != "abc"[rank]) in text
    assert values(Job(root, 3).run(lambda m: write(m, 1))) == [None] * 3, "and no owner is left behind"


def test_a_root_that_ranks_do_not_share(root: Path, tmp_path: Path) -> None:
    """Rank 1 sees another directory under the same path, as on node-local disks."""
    class Elsewhere(Files):
        def scan(self, path: str) -> list[Item]:
            return super().scan(path.replace(str(root), str(tmp_path / "other")))

    (tmp_path / "other" / ".distckpt" / "staging" / "1").mkdir(parents=True)
    job = Job(root, 2, files={1: Elsewhere()}, hosts=["a", "b"], timeouts=Timeouts(arrive=10, visible=0.3))
    text = refused(job)
    assert "rank 1 on b does not see what rank 0 wrote there: the root is not on storage that all hosts share" in text
    assert "Fine on: a" in text


@pytest.mark.parametrize("bad", ["", "s3://bucket/run", "a\0b", b"bytes", 3])
def test_a_root_that_is_no_directory_path(bad: Any) -> None:
    with pytest.raises((ConfigError, TypeError)):
        distckpt.CheckpointManager(bad)


# -- options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "text"), [
    ({"keep_last": -1}, "keep_last"), ({"keep_every": -5}, "keep_every"), ({"keep_best": -1}, "keep_best"),
    ({"keep_last": 1.5}, "keep_last"), ({"keep_last": True}, "keep_last"), ({"keep_best": 1, "best_mode": "least"}, "mode"),
    ({"keep_last": 2, "retention": KeepLast(3)}, "not both"), ({"retention": 3}, "must be a policy"),
    ({"naming": "steps"}, "{step} exactly once"), ({"naming": "{step}{step}"}, "exactly once"),
    ({"naming": "a/{step}"}, "plain directory"), ({"naming": ".{step}"}, "dot"), ({"naming": "v2{step}"}, "digit"),
    ({"naming": 3}, "naming must be text"),
    ({"on_exists": "overwrite"}, "on_exists must be one of 'error', 'skip', 'replace'"), ({"digest": "md5"}, "digest must be"),
])
def test_options_are_checked_before_anything_is_touched(options: Any, text: str, root: Path) -> None:
    for error in same_error(Job(root, 2, **options).threads.run(Job(root, 2, **options).open), ConfigError):
        assert text in str(error)
    assert not root.exists()


@pytest.mark.parametrize("step", [True, 1.5, "3", -1, 10**18, None, [1], torch.tensor(1.5)])
@pytest.mark.parametrize("how", ["save", "saving"])
def test_a_step_that_is_no_whole_number(step: Any, how: str, root: Path) -> None:
    job = Job(root)
    job.start()
    values(job.each(lambda m: write(m, 1)))
    before = tree(root)

    def save(manager: Any) -> None:
        if how == "save":
            manager.save(step, {"w": 1})
        else:
            with manager.saving(step):
                raise AssertionError("the block was entered")

    for error in same_error(job.each(save), ConfigError):
        assert "step must be" in str(error)
    assert tree(root) == before and staged(root) == []
    values(job.each(lambda m: write(m, 2)))
    job.finish()


def test_whole_numbers_of_other_types_are_steps(root: Path) -> None:
    job = Job(root)
    job.start()
    for step in (numpy.int64(3), torch.tensor(4), 0):
        handles = values(job.each(lambda m, s=step: m.save(s, {"w": 1})))
        assert all(type(h.step) is int and h.step == int(step) for h in handles)
        assert handles[1].result().step == int(step) and handles[0].done() and "step" in repr(handles[0])
    job.finish()
    assert sorted(p.name for p in root.glob("step-*")) == ["step-0", "step-3", "step-4"]


@pytest.mark.parametrize(("options", "text"), [
    ({"metrics": {"loss": "low"}}, "'loss' is str"), ({"metrics": {"loss": None}}, "'loss' is NoneType"),
    ({"metrics": {3: 1.0}}, "3 is float"), ({"metrics": {"ok": True}}, "'ok' is bool"), ({"metrics": {"a\nb": 1}}, "printable"),
    ({"meta": {"x": object()}}, "meta must be a dict of JSON values"), ({"meta": {"x": float("nan")}}, "JSON values"),
    ({"meta": {"x": "\ud800"}}, "JSON values"), ({"on_exists": "maybe"}, "on_exists must be"),
])
def test_metrics_meta_and_rules_of_one_save(options: Any, text: str, root: Path) -> None:
    job = Job(root)
    job.start()
    for error in same_error(job.each(lambda m: m.save(1, {"w": 1}, **options)), ConfigError):
        assert text in str(error) and "rank 0 cannot take part" in str(error)
    assert tree(root) == {} and staged(root) == []
    metrics = {"loss": torch.tensor(0.5), "nan": float("nan")}
    values(job.each(lambda m: m.save(1, {"w": 1}, metrics=metrics, meta={"é": [1, None]})))
    job.finish()


def test_a_closed_manager_says_so(root: Path) -> None:
    job = Job(root)
    job.start()
    job.finish()
    for act in (lambda m: m.save(1, {"w": 1}), lambda m: m.resume(), lambda m: m.restore({"w": 1}), lambda m: m.series("x")):
        for outcome in job.each(act):
            assert isinstance(outcome.error, ConfigError) and "is closed" in str(outcome.error)
    values(job.each(lambda m: m.close()))


@pytest.mark.parametrize("bad", [0, -1, None, "5", True, float("nan")])
@pytest.mark.parametrize("name", ["arrive", "progress", "visible", "close"])
def test_a_timeout_that_is_none(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=f"timeout {name} must be a positive number of seconds"):
        Timeouts(**{name: bad})


# -- the disk ------------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_full_is_said_before_anything_is_written(root: Path) -> None:
    """By the size of the last checkpoint, with the rank that has least room."""
    class Full(Files):
        def free(self, path: str) -> int:
            return 100

    job = Job(root, 3, files={2: Full()}, hosts=["a", "b", "c"])
    job.start()
    values(job.each(lambda m: write(m, 1)))
    for error in same_error(job.each(lambda m: write(m, 2)), DiskFull):
        assert error.free == 100 and error.needed == sum(len(data) for name, data in tree(root).items() if name.endswith(".bin"))
        assert "rank 2 (c)" in str(error) and "100 bytes are free" in str(error)
    assert holds(root, 1, 3) and staged(root) == []
    job.finish()


def test_a_disk_that_fills_up_while_rank_0_commits_is_disk_full_everywhere(root: Path) -> None:
    disk = FaultyFiles(REAL)
    job = Job(root, 2, files={0: disk})
    job.start()
    values(job.each(lambda m: write(m, 1)))
    before = tree(root)
    disk.faults.append(fail(errno.ENOSPC, op="write", path="step-2/commit.json"))
    for error in same_error(job.each(lambda m: write(m, 2)), DiskFull):
        assert error.outcome == "aborted" and list(error.failures) == [0] and error.path.endswith("commit.json")
        assert error.needed and error.free is not None
    assert disk.fired and tree(root) == before and staged(root) == []
    values(job.each(lambda m: write(m, 2)))
    job.finish()


def test_an_error_in_the_block_that_is_a_config_error_is_a_save_error_on_every_rank(root: Path) -> None:
    job = Job(root)
    job.start()

    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as files:
            files.mine("a/../b")

    begun = time.monotonic()
    for error in same_error(job.each(save), SaveError):
        assert {f.type for f in error.failures.values()} == {"ConfigError"} and "'..'" in str(error)
    assert time.monotonic() - begun < 2
    job.finish()
