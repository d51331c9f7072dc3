"""Files that a framework wrote under names of its own (S20), and what may not stand in a checkpoint."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import distckpt
from distckpt import catalog
from distckpt.durable import REAL, Files, Stat
from distckpt.errors import ConfigError, SaveError
from distckpt.layout import Layout
from distckpt.testing.faults import FaultyFiles, Operation, call, fail
from tests.inprocess import Job, same_error, staged, tree, values, write

HOSTS = ["node-a", "node-a", "node-b", "node-b"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def framework(manager: distckpt.CheckpointManager, step: int) -> None:
    """Every rank writes below ``files.path``, as DeepSpeed does; nobody claims anything."""
    with manager.saving(step) as files:
        os.makedirs(f"{files.path}/deep/er", exist_ok=True)
        Path(files.path, f"shard_{manager.rank}.bin").write_bytes(b"%d" % manager.rank * 500)
        Path(files.path, "deep", "er", f"optim_{manager.rank}.bin").write_bytes(b"o" * 100)


def test_S20_each_hosts_leader_syncs_what_nobody_claimed_after_the_last_writer_returned(root: Path) -> None:
    """Rank 0 cannot flush another node: the first rank of each host fsyncs every such file, and only when all have returned."""
    returned: set[int] = set()
    too_early: list[str] = []
    last = threading.Event()

    def look(operation: Operation) -> None:
        if len(returned) < 4:
            too_early.append(str(operation))

    disks = {rank: FaultyFiles(REAL, call(look, op="fsync_file", path="/staging/", forever=True)) for rank in range(4)}
    job = Job(root, 4, files=disks, hosts=HOSTS)

    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as files:
            Path(files.path, f"shard_{manager.rank}.bin").write_bytes(b"%d" % manager.rank * 500)
            if manager.rank == 3:
                assert last.wait(10)  # the other three are done and wait for this one
                Path(files.path, "late.bin").write_bytes(b"late")
            returned.add(manager.rank)
            if len(returned) == 3:
                last.set()

    values(job.run(save))
    names = {f"shard_{rank}.bin" for rank in range(4)} | {"late.bin"}
    synced = {rank: {os.path.basename(o.path) for o in disk.operations("fsync_file", "/staging/")}
              for rank, disk in disks.items()}
    assert synced == {0: names, 1: set(), 2: names, 3: set()}
    assert too_early == []
    for leader in (0, 2):
        last_file = max(o.n for o in disks[leader].operations("fsync_file", "/staging/"))
        assert any(o.n > last_file for o in disks[leader].operations("fsync_dir", "step-1"))
    found = catalog.read_marker(REAL, Layout.at(root).final("step-1"))
    assert {e.path for e in found.files} == names and all(e.digest for e in found.files)
    assert catalog.check_files(REAL, str(root / "step-1"), found.files, digest=True) == []


def test_S20_the_sync_round_comes_before_the_marker_and_its_failure_aborts_everywhere(root: Path) -> None:
    """An fsync that fails on another host's leader ends the attempt with that rank's error; no marker is written."""
    disks = {0: FaultyFiles(REAL), 2: FaultyFiles(REAL)}
    job = Job(root, 4, files=disks, hosts=HOSTS)
    job.start()
    values(job.each(lambda m: write(m, 1)))
    before = tree(root)
    fault = fail(errno.EIO, op="fsync_file", path="optim_3.bin")
    disks[2].faults.append(fault)
    for error in same_error(job.each(lambda m: framework(m, 2)), SaveError):
        assert error.outcome == "aborted" and list(error.failures) == [2]
        assert (error.failures[2].host, error.failures[2].type) == ("node-b", "OSError")
    assert fault.fired and tree(root) == before and staged(root) == []
    assert disks[0].operations("open", "step-2/commit.json") == []
    values(job.each(lambda m: framework(m, 2)))
    assert len([name for name in tree(root) if name.startswith("step-2/")]) == 9
    job.finish()


def test_files_that_are_claimed_and_files_that_are_not_make_one_checkpoint(root: Path) -> None:
    """The claimed ones are synced by their writer alone; the others cost one more round."""
    disks = {rank: FaultyFiles(REAL) for rank in range(2)}

    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as files:
            Path(files.mine("mine.bin")).write_bytes(b"m")
            if files.writes("vocab.json"):
                Path(files.shared("vocab.json")).write_text("{}")
            else:
                with pytest.raises(ConfigError, match="written by rank 0 for all; rank 1 must not"):
                    files.shared("vocab.json")
            Path(files.path, f"theirs_{manager.rank}").write_bytes(b"t")

    values(Job(root, 2, files=disks).run(save))
    found = catalog.read_marker(REAL, str(root / "step-1"))
    assert [(e.path, e.rank) for e in found.files] == [
        ("mine.rank-00000-of-00002.bin", 0), ("mine.rank-00001-of-00002.bin", 1), ("theirs_0", 0), ("theirs_1", 0),
        ("vocab.json", 0)]
    synced = [os.path.basename(o.path) for o in disks[1].operations("fsync_file", "/staging/")]
    assert synced == ["mine.rank-00001-of-00002.bin"]


BAD_FILES: dict[str, Any] = {
    "a symlink": (lambda files: os.symlink("/etc/passwd", f"{files.path}/link"), "is a link, not a regular file"),
    "a symlink under a claimed name": (lambda files: os.symlink("/etc/passwd", files.mine("a")), "a link stands where a regular"),
    "a directory under a claimed name": (lambda files: os.mkdir(files.mine("a")), "a dir stands where a regular"),
    "a fifo": (lambda files: os.mkfifo(f"{files.path}/pipe"), "is a other, not a regular file"),
    "the marker": (lambda files: Path(files.path, "commit.json").write_text("{}"), "the marker's name"),
    "a newline": (lambda files: Path(files.path, "a\nb").write_text("x"), "control character"),
    "a claim never written": (lambda files: files.mine("never"), "claimed for this checkpoint and never written"),
    "an open writer": (lambda files: files.writer("open.bin"), "was never closed"),
    "an outside path": (lambda files: files.claim("../../x"), "'..' component"),
    "an absolute path": (lambda files: files.mine("/etc/x"), "it is absolute"),
    "an empty name": (lambda files: files.mine(""), "empty"),
    "a newline in a name": (lambda files: files.writer("a\nb"), "control character"),
    "too long": (lambda files: files.mine("a/" * 600 + "b"), "longer than 1024"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_may_not_stand_in_a_checkpoint_ends_the_save_on_every_rank_and_loses_nothing(name: str, root: Path) -> None:
    act, text = BAD_FILES[name]
    job = Job(root, 2)
    job.start()
    values(job.each(lambda m: write(m, 1)))
    before = tree(root)

    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(2) as files:
            Path(files.mine("good.bin")).write_bytes(b"x")
            if manager.rank == 1:
                act(files)

    for error in same_error(job.each(save), SaveError):
        assert text in str(error) and error.outcome == "aborted"
    assert tree(root) == before and staged(root) == []
    values(job.each(lambda m: write(m, 2)))
    job.finish()


def test_two_ranks_on_one_path_are_both_named(root: Path) -> None:
    written = threading.Barrier(3)

    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as files:
            path = Path(files.claim("same.bin"))
            if manager.rank == 0:
                path.write_bytes(b"x")
            written.wait(10)

    job = Job(root, 3)
    job.start()
    for error in same_error(job.each(save), SaveError):
        assert "ranks 0 and 1 both wrote 'same.bin': use files.mine" in str(error)
    job.finish()


@pytest.mark.parametrize("second", [0, 2])
@pytest.mark.parametrize("closed", [True, False])
def test_two_ranks_on_one_file_of_ours_are_both_named(closed: bool, second: int, root: Path) -> None:
    """Ours is made exclusively, so the second rank fails at once; the first has acked by then, or stops at the abort."""
    made = threading.Event()
    first = 2 - second

    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as files:
            if manager.rank == second:
                assert made.wait(10)
                files.writer("deep/same.bin", exact=True)
            elif manager.rank == first:
                out = files.writer("deep/same.bin", exact=True)
                out.write(b"x")
                if closed:
                    out.close()
                made.set()
                while not closed:
                    files.stop_if_aborted()

    job = Job(root, 3)
    job.start()
    for error in same_error(job.each(save), SaveError):
        assert error.outcome == "aborted" and list(error.failures) == [second], error
        assert "ranks 0 and 2 both wrote 'deep/same.bin': use files.mine" in str(error)
    values(job.each(lambda m: write(m, 1)))
    job.finish()


def test_an_empty_checkpoint_is_not_one(root: Path) -> None:
    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1):
            pass

    job = Job(root, 2)
    job.start()
    for error in same_error(job.each(save), SaveError):
        assert "no rank wrote anything; an empty checkpoint is not one" in str(error)
    assert tree(root) == {}
    job.finish()


def test_a_file_that_changes_after_its_ack_ends_the_attempt(root: Path) -> None:
    """The union of the acks must be exactly the listing, sizes included."""
    disk = FaultyFiles(REAL)
    job = Job(root, 2, files={0: disk})
    job.start()

    def grow(operation: Operation) -> None:
        with open(operation.path, "ab") as more:
            more.write(b"more")

    disk.faults.append(call(grow, op="stat", path=lambda path: "/staging/" in path and "data.rank-00001" in path))
    for error in same_error(job.each(lambda m: write(m, 1)), SaveError):
        assert list(error.failures) == [1] and "rank 1 on host-a wrote 840; something changed it after" in str(error)
    disk.faults[:] = [call(lambda o: os.unlink(f"{o.path}/data.rank-00001-of-00002.bin"), op="scan",
                           path=lambda path: "/staging/" in path and path.endswith("/step-1"))]
    for error in same_error(job.each(lambda m: write(m, 1)), SaveError):
        assert list(error.failures) == [1] and "is not seen by rank 0" in str(error)
    disk.faults.clear()
    values(job.each(lambda m: write(m, 1)))
    job.finish()


def test_S20_a_file_that_two_hosts_measure_differently_ends_the_attempt(root: Path) -> None:
    class Behind(Files):
        """Another client, whose view of one file is older."""

        def stat(self, path: str) -> Stat:
            seen = super().stat(path)
            return seen._replace(size=seen.size - 1) if path.endswith("a.bin") else seen

    job = Job(root, 4, files={2: Behind()}, hosts=HOSTS)

    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as files:
            if manager.rank == 0:
                for name in ("a.bin", "b.bin"):  # each is read on one host only, for its digest: the first on rank 0's
                    Path(files.path, name).write_bytes(b"x" * 100)

    for error in same_error(job.run(save), SaveError):
        assert error.outcome == "aborted" and "a.bin has 99 bytes on rank 2's host and 100" in str(error)
