"""Files that are closed one after the other: synced together, by the descriptors that wrote them, and before anyone says so."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import pytest

from distckpt import CheckpointManager, SaveError
from distckpt.digest import XXH3
from distckpt.durable import REAL
from distckpt.saving.files import RankFiles
from distckpt.saving.piecewriter import PieceWriter
from distckpt.saving.unsynced import _BYTES, _FILES
from distckpt.testing.faults import FaultyFiles, call, fail


def rank_files(where: Path, files: FaultyFiles) -> RankFiles:
    return RankFiles(files, str(where), 0, 1, algorithm=XXH3, aborted=lambda: False)


def write(files: RankFiles, names: range, data: bytes = b"x" * 100) -> None:
    for name in names:
        with files.writer(f"f{name}", exact=True) as out:
            out.write(data)


def done(faulty: FaultyFiles, op: str) -> list[str]:
    return [os.path.basename(operation.path) for operation in faulty.log if operation.op == op]


def descriptors(where: Path) -> list[str]:
    """The files below ``where`` that this process has open."""
    return REAL.held_open(str(where))


def test_many_files_are_synced_together_each_once_and_before_they_are_acknowledged(tmp_path: Path) -> None:
    """Sixteen fsyncs wait for each other: one by one, none would ever end."""
    meeting = threading.Barrier(16)
    faulty = FaultyFiles(REAL, call(lambda operation: meeting.wait(30) and None, op="fsync", forever=True))
    files = rank_files(tmp_path, faulty)
    write(files, range(2 * _FILES - 1))
    assert len(done(faulty, "fsync")) == _FILES and len(descriptors(tmp_path)) == _FILES - 1
    write(files, range(2 * _FILES - 1, 2 * _FILES))
    assert descriptors(tmp_path) == [] and len(files.unsynced) == 0
    entries = files.finish()
    assert len(entries) == 2 * _FILES and sorted(done(faulty, "fsync")) == sorted(entry.path for entry in entries)
    assert sorted(done(faulty, "close")) == sorted(done(faulty, "fsync"))


def test_what_is_left_is_synced_before_the_files_are_measured_and_their_directory_synced(tmp_path: Path) -> None:
    synced: list[int] = []
    faulty = FaultyFiles(REAL, call(lambda operation: synced.append(len(done(faulty, "fsync"))), op="stat", forever=True))
    files = rank_files(tmp_path, faulty)
    write(files, range(3))
    assert done(faulty, "fsync") == [] and Path(tmp_path, "f2").read_bytes() == b"x" * 100
    files.finish()
    assert synced == [3, 3, 3] and faulty.log[-1].op == "fsync_dir"


def test_large_files_are_not_held_until_the_memory_is_full_of_them(tmp_path: Path) -> None:
    """Counted is what the disk may not have yet, of all that are held."""
    faulty = FaultyFiles(REAL)
    files = rank_files(tmp_path, faulty)
    write(files, range(3), bytes(_BYTES // 4))
    assert done(faulty, "fsync") == [] and faulty.hints[-1].path.endswith("f2"), "the disk has begun with them"
    write(files, range(3, 4), bytes(_BYTES // 4 + 1))
    assert len(done(faulty, "fsync")) == 4 and len(files.unsynced) == 0
    write(files, range(5, 6), bytes(100))
    assert len(files.unsynced) == 1, "what was synced is not counted again"


@pytest.mark.parametrize("op", ["fsync", "close"])
@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("count", [_FILES, 3])
def test_an_error_of_one_that_is_held_ends_the_save_and_no_descriptor_stays(op: str, swallowed: bool, count: int,
                                                                            tmp_path: Path) -> None:
    """Whether the close of the last one meets it, or finish does, and whoever swallows it."""
    faulty = FaultyFiles(REAL, fail(errno.EIO, op=op, path=lambda path: path.endswith("/f1"), after=op == "close"))
    files = rank_files(tmp_path, faulty)
    if count == _FILES:
        with pytest.raises(OSError, match="f1"):
            write(files, range(count))
    else:
        write(files, range(count))
    if count != _FILES or swallowed:
        with pytest.raises(OSError, match="f1") as raised:
            files.finish()
        assert raised.value.errno == errno.EIO
    assert descriptors(tmp_path) == [] and len(files.unsynced) == 0
    assert done(faulty, "fsync").count("f1") == 1, "a second one would succeed over what is lost"


def test_the_disk_begins_with_a_file_as_it_is_closed_and_an_error_that_tells_ends_it(tmp_path: Path) -> None:
    faulty = FaultyFiles(REAL, fail(errno.EIO, op="start_writeback", path="/f0"))
    files = rank_files(tmp_path, faulty)
    with pytest.raises(OSError, match="f0"):
        write(files, range(1))
    assert descriptors(tmp_path) == []
    with pytest.raises(OSError, match="f0"):
        files.finish()
    assert done(faulty, "fsync") == []


def test_where_descriptors_run_out_those_that_are_held_are_given_back(tmp_path: Path) -> None:
    faulty = FaultyFiles(REAL, fail(errno.EMFILE, op="open", path="/f2"))
    files = rank_files(tmp_path, faulty)
    write(files, range(3))
    assert done(faulty, "fsync") == ["f0", "f1"] and len(files.unsynced) == 1
    assert [entry.path for entry in files.finish()] == ["f0", "f1", "f2"]
    none_held = rank_files(tmp_path, FaultyFiles(REAL, fail(errno.EMFILE, op="open", path="/g0")))
    with pytest.raises(OSError, match="g0"):
        none_held.writer("g0", exact=True)
    other = FaultyFiles(REAL, fail(errno.ENOSPC, op="open", path="/h1"))
    files = rank_files(tmp_path, other)
    files.writer("h0", exact=True).close()
    with pytest.raises(OSError, match="h1"):
        files.writer("h1", exact=True)
    assert done(other, "fsync") == [], "another error is not made up for"


def test_what_a_close_says_of_a_file_that_is_given_up_keeps_no_other_open(tmp_path: Path) -> None:
    """NFS tells a full disk at the close. Raised here, it would keep the rank from telling the others what ended the save."""
    files = rank_files(tmp_path, FaultyFiles(REAL, fail(errno.ENOSPC, op="close", path="/f0", after=True)))
    write(files, range(3))
    files.unsynced.release()
    assert descriptors(tmp_path) == []
    with pytest.raises(OSError, match="never closed"):
        files.finish()


@pytest.mark.parametrize("error", [ValueError("the loop's own"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_save_that_failed_gives_its_descriptors_back_and_syncs_nothing(error: BaseException, tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PieceWriter, "sync", lambda self: pytest.fail("synced for nobody"))
    with CheckpointManager(str(tmp_path / "r")) as manager:
        with pytest.raises((SaveError, KeyboardInterrupt)), manager.saving(1) as files:
            write(files, range(5))
            assert len(files.unsynced) == 5
            raise error
        assert not [path for path in descriptors(tmp_path) if re.search(r"/f\d", path)], "in the trash, or deleted"


def test_threads_are_not_begun_for_a_few(tmp_path: Path) -> None:
    faulty = FaultyFiles(REAL)
    files = rank_files(tmp_path, faulty)
    write(files, range(15))
    files.finish()
    assert {operation.thread for operation in faulty.log} == {threading.get_native_id()}
