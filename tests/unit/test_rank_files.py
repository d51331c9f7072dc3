"""The files of one rank: names that no other rank has, bytes that are durable, digested and measured."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from distckpt import digest
from distckpt.digest import XXH3
from distckpt.durable import PIECE, REAL, Files, Output
from distckpt.errors import ConfigError
from distckpt.manager import CheckpointManager
from distckpt.options import Seams
from distckpt.payloads.lightning import _claim_shards
from distckpt.saving import piecewriter as saving
from distckpt.saving.files import RankFiles, Written, _Claim, make_durable
from distckpt.saving.piecewriter import PeerFailed
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.faults import FaultyFiles, call, fail


def rank_files(where: Path | str, files: Files = REAL, rank: int = 1, world: int = 4, aborted: Any = lambda: False,
               algorithm: str | None = XXH3) -> RankFiles:
    return RankFiles(files, str(where), rank, world, algorithm=algorithm, aborted=aborted)


def digest_of(data: bytes) -> str:
    running = digest.Running()
    running.update(data)
    return running.text


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [
    ("optim.pt", "optim.rank-00001-of-00004.pt"), ("optim", "optim.rank-00001-of-00004"),
    ("a/b.tar.gz", "a/b.tar.rank-00001-of-00004.gz"), (".hidden", ".hidden.rank-00001-of-00004"),
])
def test_mine_carries_the_rank_and_the_suffix_stays_last(name: str, expected: str, tmp_path: Path) -> None:
    assert rank_files(tmp_path).mine(name) == str(tmp_path / expected)


def test_shared_has_one_writer_chosen_by_the_coordinator(tmp_path: Path) -> None:
    first, second = rank_files(tmp_path, rank=0), rank_files(tmp_path, rank=1)
    assert first.writes("vocab.json") and not second.writes("vocab.json")
    assert first.shared("vocab.json") == str(tmp_path / "vocab.json")
    with pytest.raises(ConfigError, match=r"rank 1 must not: guard the call with files.writes\('vocab.json'\)"):
        second.shared("vocab.json")


@pytest.mark.parametrize("name", ["", "/abs", "a/../b", "..", "a//b", "a\nb", "a\0b", "x" * 1025, "./a", "a/", "\ud800"])
@pytest.mark.parametrize("method", ["mine", "shared", "writes", "claim", "writer", "below"])
def test_a_name_that_may_not_stand_in_a_checkpoint(name: str, method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot stand in a checkpoint"):
        getattr(rank_files(tmp_path, rank=0), method)(name)
    assert list(tmp_path.iterdir()) == []


def test_the_markers_own_name_is_taken(tmp_path: Path) -> None:
    files = rank_files(tmp_path, rank=0)
    for method in (files.shared, files.claim):
        with pytest.raises(ConfigError, match="marker's own name"):
            method("commit.json")
    assert files.below("sub").shared("commit.json") == str(tmp_path / "sub" / "commit.json"), "elsewhere it is free"


def test_below_is_the_same_rank_in_a_sub_directory(tmp_path: Path) -> None:
    files = rank_files(tmp_path)
    inner = files.below("train").below("deep")
    with inner.writer("a.bin") as out:
        out.write(b"abc")
    Path(inner.mine("b.bin")).write_bytes(b"de")
    assert inner.directory == str(tmp_path / "train" / "deep")
    assert inner.path == inner.directory and files.open_ended, "the first rank of each host then looks for more"
    inner.note("k", 1)
    assert files.notes == {"k": 1}
    assert [(e.path, e.size, e.rank) for e in files.finish()] == [
        ("train/deep/a.rank-00001-of-00004.bin", 3, 1), ("train/deep/b.rank-00001-of-00004.bin", 2, 1)]
    assert files.bytes_written == 3 and files.written_bytes() == 5


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [XXH3, None])
def test_a_writer_digests_what_it_is_given_piece_by_piece(algorithm: str | None, tmp_path: Path) -> None:
    data = os.urandom(2 * PIECE + 12345)
    files = rank_files(tmp_path, algorithm=algorithm)
    with files.writer("big.bin") as out:
        assert out.write(memoryview(data)[:7]) == 7 and out.write(bytearray(data[7:])) == len(data) - 7 and out.write(b"") == 0
        assert out.tell() == len(data) and out.writable() and not out.readable() and not out.seekable()
        out.flush()
    entry, = files.finish()
    assert (tmp_path / entry.path).read_bytes() == data
    assert (entry.size, entry.digest) == (len(data), digest_of(data) if algorithm else None)


def test_what_somebody_elses_code_wrote_is_synced_digested_and_measured(tmp_path: Path) -> None:
    files = FaultyFiles(REAL)
    mine = rank_files(tmp_path, files)
    Path(mine.mine("a.pt")).write_bytes(b"hello")
    entry, = mine.finish()
    assert (entry.size, entry.digest) == (5, digest_of(b"hello"))
    assert [o.op for o in files.log if o.path.endswith(".pt")] == ["fsync_file"]


def test_S9_every_directory_that_got_a_file_is_synced_after_the_files_children_before_parents(tmp_path: Path) -> None:
    files = FaultyFiles(REAL)
    mine = rank_files(tmp_path, files)
    for name in ("top.bin", "a/one.bin", "a/b/c/two.bin"):
        with mine.writer(name) as out:
            out.write(b"x")
    mine.finish()
    synced = [os.path.relpath(o.path, tmp_path) for o in files.operations("fsync_dir")]
    assert synced == ["a/b/c", "a/b", "a", "."]
    last = max(o.n for o in files.operations("fsync"))
    assert min(o.n for o in files.operations("fsync_dir")) > last


def test_S9_after_finish_a_power_cut_loses_none_of_it() -> None:
    disk = CrashFiles("/disk")
    disk.mkdir("/disk/attempt")
    disk.fsync_dir("/disk")
    mine = rank_files("/disk/attempt", disk)
    for name in ("top.bin", "a/b/two.bin"):
        with mine.writer(name) as out:
            out.write(name.encode())
    entries = mine.finish()
    for after in disk.crash_states():
        for entry in entries:
            assert after.stat(f"/disk/attempt/{entry.path}").size == entry.size


def test_two_writers_of_one_name_never_share_it(tmp_path: Path) -> None:
    files = rank_files(tmp_path)
    files.writer("a.bin")
    with pytest.raises(FileExistsError):
        files.writer("a.bin")


def test_B35_B36_two_frameworks_writers_of_one_name_are_told_before_either_has_written(tmp_path: Path) -> None:
    """Else the second empties the file under the first, and what is told is whatever that breaks."""
    path = rank_files(tmp_path, rank=0).claim_new("model/states.pt")
    assert Path(path).read_bytes() == b""
    with pytest.raises(FileExistsError) as told:
        rank_files(tmp_path, rank=1).claim_new("model/states.pt")
    assert told.value.filename == path


def test_parents_are_made_below_the_attempt_and_the_attempt_itself_never(tmp_path: Path) -> None:
    """S5, S21: a writer that comes late finds its attempt gone and gets ENOENT."""
    gone = rank_files(tmp_path / "attempt" / "step-1")
    for late in (lambda: gone.writer("a.bin"), lambda: gone.mine("sub/a.bin"), lambda: gone.below("x").directory):
        with pytest.raises(FileNotFoundError):
            late()
    assert list(tmp_path.iterdir()) == []


# -- what ends an attempt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["write", "fsync", "close"])
def test_an_error_of_write_fsync_or_close_condemns_the_file(op: str, tmp_path: Path) -> None:
    """A full disk may be told by any of them (NFS: by close); nothing is retried, and the file never counts."""
    files = FaultyFiles(REAL, fail(errno.ENOSPC, op=op))
    mine = rank_files(tmp_path, files)
    if op == "write":
        with pytest.raises(OSError, match="No space left"), mine.writer("a.bin") as out:
            out.write(b"x" * 10)
    else:
        with mine.writer("a.bin") as out:
            out.write(b"x" * 10)
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            mine.finish()
        assert caught.value.errno == errno.ENOSPC and len(files.operations("fsync")) == (op != "write")
    assert not out.durable


def test_a_writer_that_was_left_by_an_error_is_closed_and_does_not_count(tmp_path: Path) -> None:
    files = FaultyFiles(REAL)
    mine = rank_files(tmp_path, files)
    with pytest.raises(ValueError), mine.writer("a.bin") as out:
        out.write(b"x")
        raise ValueError
    assert len(files.operations("close")) == 1 and files.operations("fsync") == []
    with pytest.raises(OSError, match="was never closed"):
        mine.finish()
    out.close()
    assert files.operations("fsync") == [], "a close after the error does not save it"


def test_a_writer_stops_between_pieces_when_another_rank_has_failed(tmp_path: Path) -> None:
    pieces: list[int] = []

    class Counting(Files):
        def open(self, path: str) -> Output:
            inner = super().open(path)
            write = inner.write

            def counted(data: Any) -> int:
                pieces.append(len(data))
                return write(data)

            inner.write = counted  # type: ignore[method-assign]
            return inner

    mine = rank_files(tmp_path, Counting(), aborted=lambda: len(pieces) >= 2)
    with pytest.raises(PeerFailed), mine.writer("a.bin") as out:
        out.write(bytes(3 * saving.PACE))
    assert sum(pieces) == PIECE + saving.PACE
    with pytest.raises(PeerFailed):
        mine.stop_if_aborted()


def test_whether_another_rank_failed_is_asked_by_the_bytes_and_not_by_the_pieces(tmp_path: Path) -> None:
    """To ask is a message to rank 0: a file of a thousand small tensors, or ten of a tenth of them, must not cost a thousand."""
    asked: list[int] = []
    mine = rank_files(tmp_path, aborted=lambda: bool(asked.append(1)))
    for name in ("a", "b"):
        with mine.writer(f"{name}.bin") as out:
            for _ in range(3 * saving.PACE // 2 >> 13):
                out.write(bytes(1 << 13))
    assert len(asked) == 2 + 2  # at each file's first piece, and after 8 MB more


@pytest.mark.parametrize("kept", [False, True])
def test_the_kernel_is_paced_and_pages_are_given_back_some_steps_behind(kept: bool, tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """``page_cache="keep"`` paces as well: it is the kernel that has to be held back, and only the pages that stay."""
    monkeypatch.setattr(saving, "PACE", PIECE)
    monkeypatch.setattr(saving, "_BEHIND", 2 * PIECE)
    ranges: list[tuple[str, int, int]] = []

    class Watching(Files):
        def open(self, path: str) -> Output:
            inner = super().open(path)
            inner.start_writeback = lambda offset, length: ranges.append(("start", offset, length))  # type: ignore[method-assign]
            inner.await_writeback = lambda offset, length: ranges.append(("await", offset, length))  # type: ignore[method-assign]
            inner.drop_cache = lambda offset, length: ranges.append(("drop", offset, length))  # type: ignore[method-assign]
            return inner

    with RankFiles(Watching(), str(tmp_path), 0, 1, algorithm=None, aborted=lambda: False, kept=kept).writer("a.bin") as out:
        out.write(bytes(4 * PIECE))
    assert [r for r in ranges if not kept or r[0] != "drop"] == ranges, "nothing is dropped that is to be kept"
    assert ranges == [r for r in [
        ("start", 0, PIECE), ("start", PIECE, PIECE), ("start", 2 * PIECE, PIECE), ("await", 0, PIECE), ("drop", 0, PIECE),
        ("start", 3 * PIECE, PIECE), ("await", PIECE, PIECE), ("drop", PIECE, PIECE)] if not kept or r[0] != "drop"]


@pytest.mark.parametrize(("page_cache", "dropped"), [("drop", True), ("keep", False)])
@pytest.mark.parametrize("writer", ["thread", "saving"])
def test_a_manager_says_whether_pages_stay(page_cache: str, dropped: bool, writer: str, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our own files behind the write, of others' when they were digested and synced, claimed or not: never before."""
    monkeypatch.setattr(saving, "PACE", 8)
    monkeypatch.setattr(saving, "_BEHIND", 8)
    files = FaultyFiles()
    with CheckpointManager(tmp_path, seams=Seams(files=files), page_cache=page_cache) as manager:
        if writer == "thread":
            manager.save(1, {"w": torch.ones(64)}, background=True)
            manager.wait()
            expected = {"state.rank-00000-of-00001.pt"}
        else:
            with manager.saving(1) as out:
                Path(out.mine("mine.bin")).write_bytes(bytes(100))
                Path(out.path, "unclaimed.bin").write_bytes(bytes(100))
            expected = {"mine.rank-00000-of-00001.bin", "unclaimed.bin"}
    found = {os.path.basename(o.path) for o in files.hints if o.op == "drop_cache"}
    assert found == (expected if dropped else set())
    with pytest.raises(ConfigError, match="page_cache must be one of 'drop', 'keep', not 'evict'"):
        CheckpointManager(tmp_path / "other", page_cache="evict")


def test_a_write_error_that_the_kernel_tells_to_a_pacing_call_ends_the_file(tmp_path: Path) -> None:
    """It is told once: the fsync after it may report success over pages that were lost (tests/crash/test_lost_writeback.py)."""
    for op in ("start_writeback", "await_writeback"):
        files = FaultyFiles(REAL, fail(errno.EIO, op=op))
        mine = rank_files(tmp_path, files)
        with (pytest.raises(OSError, match="Input/output error") as raised, mine.writer(f"{op}.bin") as out,
              suppress(OSError)):  # a framework that swallows it does not hide it
            out.write(bytes(6 * saving.PACE))
        assert raised.value.errno == errno.EIO and files.fired
        assert not files.operations("fsync"), "nothing makes believe that it is durable"


def test_the_disk_begins_with_all_that_others_wrote_before_it_is_read_and_each_is_read_before_it_is_waited_for(
        tmp_path: Path) -> None:
    """Otherwise the disk idles while a digest is made, and the save waits for one file after the other."""
    done: list[tuple[str, str]] = []

    class Watching(Files):
        def start_writeback(self, path: str) -> None:
            super().start_writeback(path)
            done.append(("begin", os.path.basename(path)))

        def pieces(self, path: str) -> Iterator[memoryview]:
            done.append(("read", os.path.basename(path)))
            return super().pieces(path)

        def fsync(self, path: str) -> None:
            done.append(("fsync", os.path.basename(path)))
            super().fsync(path)

    mine = rank_files(tmp_path, Watching())
    for name in ("a", "b"):
        Path(mine.claim(name)).write_bytes(b"x" * 10)
    with mine.writer("c") as out:
        out.write(b"y")
    mine.finish()
    assert done == [("begin", "a"), ("begin", "b"), ("read", "a"), ("fsync", "a"), ("read", "b"), ("fsync", "b")]
    mine.claim("missing")
    with pytest.raises(FileNotFoundError, match="never written"):
        mine.finish()


@pytest.mark.parametrize(("change", "text"), [
    (lambda path: Path(path).unlink(), "claimed for this checkpoint and never written"),
    (lambda path: (Path(path).unlink(), os.symlink("/etc/passwd", path)), "a link stands where a regular file should be"),
    (lambda path: (Path(path).unlink(), os.mkdir(path)), "a dir stands where a regular file should be"),
])
def test_what_is_no_regular_file_does_not_count(change: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    change(str(path))
    with pytest.raises(OSError, match=text):
        make_durable(REAL, str(tmp_path), "a", 0, XXH3)


@pytest.mark.parametrize("when", ["grows", "is replaced"])
def test_a_file_that_is_still_being_written_ends_the_attempt(when: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 10)

    def change(_: Any) -> None:
        if when == "grows":
            with open(path, "ab") as more:
                more.write(b"y")
        else:
            (tmp_path / "b").write_bytes(b"z" * 10)
            os.replace(tmp_path / "b", path)

    files = FaultyFiles(REAL, call(change, op="fsync_file", after=True))
    with pytest.raises(OSError, match="still being written"):
        make_durable(files, str(tmp_path), "a", 0, XXH3)


def test_a_written_file_that_lost_bytes_on_disk_is_noticed(tmp_path: Path) -> None:
    mine = rank_files(tmp_path)
    with mine.writer("a.bin") as out:
        out.write(b"x" * 100)
    os.truncate(mine._top._directory + "/a.rank-00001-of-00004.bin", 50)
    with pytest.raises(OSError, match="100 bytes were written and 50 are on disk"):
        mine.finish()


def test_an_exact_name_is_the_frameworks_own(tmp_path: Path) -> None:
    mine = rank_files(tmp_path)
    with mine.below("sub").writer("a.bin", exact=True) as out:
        out.write(b"x")
    assert [(e.path, e.digest) for e in mine.finish()] == [("sub/a.bin", digest_of(b"x"))]


def test_a_writer_serves_whoever_writes_binary_files(tmp_path: Path) -> None:
    with rank_files(tmp_path).writer("a.txt") as out:
        text = io.TextIOWrapper(io.BytesIO())
        text.write("ü")
        text.flush()
        out.write(text.buffer.getvalue())  # type: ignore[attr-defined]
    assert (tmp_path / "a.rank-00001-of-00004.txt").read_text(encoding="utf-8") == "ü"


def test_a_file_that_is_not_of_the_size_that_its_writer_reported_is_an_error(tmp_path: Path) -> None:
    """A framework says how much it wrote; a short write that it did not notice is noticed here."""
    files = rank_files(tmp_path)
    for name, said in (("whole.bin", 5), ("short.bin", 6)):
        Path(files.claim(name, size=said)).write_bytes(b"12345")
    with pytest.raises(OSError, match="its writer reported 6 bytes and 5 are on disk") as raised:
        files.finish()
    assert raised.value.errno == errno.EIO and str(raised.value.filename).endswith("/short.bin")


def test_what_dcps_writer_claimed_keeps_its_size_and_its_link_when_lightnings_files_are_claimed(tmp_path: Path) -> None:
    """S25: to claim a link again would be refused, as a framework's open("wb") on it must be."""
    files = RankFiles(REAL, str(tmp_path), 0, 1, algorithm=None, aborted=lambda: False)
    for name in ("__0_0.distcp", "__0_1_0.distcp", "meta.pt"):
        Path(files.below("checkpoint.ckpt").directory, name).write_bytes(b"abc")
    files.below("checkpoint.ckpt").claim("__0_0.distcp", 4)
    files._claims["checkpoint.ckpt/__0_1_0.distcp"] = _Claim(Written(3, None, linked=True))
    _claim_shards(files, str(tmp_path / "checkpoint.ckpt"), 0)
    assert files.is_linked("checkpoint.ckpt/__0_1_0.distcp") and "checkpoint.ckpt/meta.pt" in files._claims
    with pytest.raises(OSError, match="its writer reported 4 bytes and 3 are on disk"):
        files.finish()
