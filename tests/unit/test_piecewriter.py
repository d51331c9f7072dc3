"""A file of ours while it is written: small writes are gathered, nothing is lost or exchanged by that, and an error ends it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distckpt import DCP, CheckpointManager, Shards, durable
from distckpt.digest import XXH3, Running
from distckpt.durable import PIECE, REAL
from distckpt.saving import piecewriter as saving
from distckpt.saving.files import RankFiles
from distckpt.saving.links import Nowhere
from distckpt.saving.piecewriter import PeerFailed, PieceWriter
from distckpt.testing.faults import FaultyFiles, call, fail


def rank_files(where: Path, files: FaultyFiles) -> RankFiles:
    return RankFiles(files, str(where), 0, 1, algorithm=XXH3, aborted=lambda: False)


def digest_of(data: bytes | bytearray) -> str:
    running = Running()
    running.update(data)
    return running.text


@pytest.mark.parametrize("nowhere", [False, True])
def test_small_writes_are_gathered_and_what_is_written_is_what_was_given_in_its_order(nowhere: bool, tmp_path: Path) -> None:
    """Small, large and just at the limit; what was digested is what is on the disk; the caller's memory may be used again."""
    limit, given, buffer = saving._GATHERED, bytearray(), bytearray(3 * saving._GATHERED)
    faulty = FaultyFiles(REAL)
    path = str(tmp_path / "a.bin")
    with PieceWriter(Nowhere() if nowhere else faulty.open(path), path, XXH3, lambda size: None) as out:
        for number, size in enumerate([*[100] * 1000, 0, limit, 1, limit - 1, limit, limit + 1, 5, 3 * limit, 7, limit - 7, 1]):
            piece = memoryview(buffer)[:size]
            piece[:] = bytes([number % 251]) * size
            assert out.write(piece) == size
            given += piece
            assert out.tell() == len(given)
            buffer[:] = bytes(len(buffer))
    assert (out.size, out.digest) == (len(given), digest_of(given))
    if not nowhere:
        assert Path(path).read_bytes() == given
        assert sum(operation.op == "write" for operation in faulty.log) == 10


def test_large_writes_are_not_copied_and_keep_their_place(tmp_path: Path) -> None:
    memory = memoryview(bytearray(3 * PIECE))
    seen: list[tuple[bool, int]] = []

    class Watching(Nowhere):
        def write(self, data: bytes | bytearray | memoryview) -> int:
            seen.append((memoryview(data).obj is memory.obj, len(data)))
            return len(data)

    with PieceWriter(Watching(), "a.bin", XXH3, lambda size: None) as out:
        out.write(b"head")
        out.write(memory)
        out.write(b"tail")
    assert seen == [(False, 4), (True, PIECE), (True, PIECE), (True, PIECE), (False, 4)]


@pytest.mark.parametrize("payload", [Shards, lambda state: DCP(state=state)], ids=["torch.save", "DCP"])
def test_an_archive_of_many_tensors_is_a_few_writes_and_a_large_tensor_is_written_from_where_it_lies(
        payload: Callable[[dict[str, torch.Tensor]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not gathered, each of the 500 tensors is five writes or more; gathered, they are under 1 MB in all."""
    large, real = torch.rand(PIECE), durable._File.write
    seen: list[tuple[int, bool]] = []

    def write(self: durable._File, data: Any) -> int:
        at = np.frombuffer(data, np.uint8).__array_interface__["data"][0] - large.data_ptr()
        if self._path.endswith((".pt", ".distcp")):
            seen.append((len(data), 0 <= at < large.nbytes))
        return real(self, data)

    monkeypatch.setattr(durable._File, "write", write)
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(1, payload({f"small {number}": torch.rand(10) for number in range(500)}))
        assert 1 < len(seen) < 16, seen
        seen.clear()
        manager.save(2, payload({"large": large}))
    assert sum(size for size, straight in seen if straight) == large.nbytes
    assert [straight for _, straight in seen] == [False, *[True] * 4, False], "what is around it was gathered"


def test_what_is_flushed_is_in_the_file_and_what_is_closed_is_durable(tmp_path: Path) -> None:
    faulty, path = FaultyFiles(REAL), str(tmp_path / "a.bin")
    with PieceWriter(faulty.open(path), path, XXH3, lambda size: None) as out:
        out.write(b"one")
        assert os.path.getsize(path) == 0
        out.flush()
        assert Path(path).read_bytes() == b"one"
        out.flush()
        out.write(b"two")
    assert [operation.op for operation in faulty.log] == ["open", "write", "write", "fsync", "close"]
    with pytest.raises(OSError, match="after it was closed"):
        out.write(b"three")
    assert Path(path).read_bytes() == b"onetwo"


def test_an_error_of_what_was_gathered_is_raised_by_the_write_the_flush_or_the_close_that_meets_it(tmp_path: Path) -> None:
    met: dict[str, Callable[[PieceWriter], object]] = {
        "large": lambda out: out.write(bytes(saving._GATHERED + 1)), "small": lambda out: out.write(bytes(saving._GATHERED)),
        "flush": PieceWriter.flush, "close": PieceWriter.close}
    for name, after in met.items():
        faulty = FaultyFiles(REAL, fail(errno.ENOSPC, op="write"))
        mine = rank_files(tmp_path, faulty)
        with pytest.raises(OSError, match="No space left"), mine.writer(name) as out:
            out.write(b"x")
            after(out)
        assert faulty.fired and not out.durable and [operation.op for operation in faulty.log] == ["open", "write", "close"]
        with pytest.raises(OSError, match="No space left"):
            mine.finish()


def test_what_is_gathered_counts_as_progress(tmp_path: Path) -> None:
    """Of a rank that comes by a line a minute: ``Timeouts.progress`` counts from its last new bytes."""
    mine = rank_files(tmp_path, FaultyFiles(REAL))
    with mine.writer("a.bin") as out:
        for lines in range(1, 4):
            out.write(b"a line\n")
            assert mine.written_bytes() == 7 * lines
        out.flush()
        assert mine.written_bytes() == 21
    assert mine.written_bytes() == 21


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), PeerFailed(), KeyboardInterrupt(), MemoryError()])
def test_the_first_error_is_the_last_thing_that_happens_to_a_file(error: BaseException, tmp_path: Path) -> None:
    """Bytes of a call that succeeded are missing then: a caller who tries again, or goes on, must not get a file that passes."""
    mine, raising = rank_files(tmp_path, faulty := FaultyFiles(REAL)), [error]

    def strike(operation: Any) -> None:
        if raising:
            raise raising.pop()

    faulty.faults.append(call(strike, op="write"))
    out = mine.writer("a.bin")
    out.write(b"these are missing")
    for again in (out.flush, out.flush, lambda: out.write(b"x"), lambda: out.write(bytes(100_000)), out.close):
        with pytest.raises(type(error)) as caught:
            again()
        assert caught.value is error
    out.close()
    out.abandon()
    assert [operation.op for operation in faulty.log] == ["open", "write", "close"] and not out.durable
    with pytest.raises(OSError, match="No space left" if isinstance(error, OSError) else "never closed"):
        mine.finish()


def test_an_abandoned_writer_writes_nothing_more(tmp_path: Path) -> None:
    mine = rank_files(tmp_path, faulty := FaultyFiles(REAL))
    with pytest.raises(ValueError, match="the payload's"), mine.writer("a.bin") as out:
        out.write(b"x")
        raise ValueError("the payload's")
    out.flush()
    out.close()
    with pytest.raises(OSError, match="after it was closed"):
        out.write(b"y")
    assert [operation.op for operation in faulty.log] == ["open", "close"] and not out.durable


def test_an_error_that_the_framework_swallowed_is_raised_when_it_says_that_it_is_done(tmp_path: Path) -> None:
    """FIELD_CASES B89: a writer that reports success all the same."""
    mine = rank_files(tmp_path, FaultyFiles(REAL, fail(errno.ENOSPC, at=2, op="write")))
    with pytest.raises(OSError, match="No space left"), mine.writer("a.bin") as out:
        out.write(b"x" * 100_000)
        with contextlib.suppress(OSError):
            out.write(b"y" * 100_000)
        out.write(b"z" * 100_000)
