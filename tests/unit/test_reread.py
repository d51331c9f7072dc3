"""What is read of a file after its digest was found right is what was digested, whoever writes into it in between."""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from distckpt import Shards, catalog, digest, durable, marker, reread
from distckpt.checkpoint import Checkpoint
from distckpt.durable import REAL, read_at
from distckpt.errors import IntegrityError
from distckpt.marker import FileEntry
from distckpt.payloads import inplace, torchfile
from distckpt.payloads.base import Ranks
from distckpt.reread import Reread
from tests.support import found, make_marker, saved

PIECE = digest._READ
SIZES = [0, 1, 4096, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5]


def committed(place: Path, data: bytes, algorithm: str = digest.XXH3) -> Path:
    """A checkpoint whose only file, ``x``, holds ``data``."""
    running = digest.Running(algorithm)
    running.update(data)
    directory = place / "step-1"
    directory.mkdir()
    (directory / "x").write_bytes(data)
    whole = make_marker(1)
    object.__setattr__(whole, "files", (FileEntry("x", len(data), running.text, 0),))
    (directory / "commit.json").write_bytes(marker.build(whole))
    return directory


def write_into(path: Path, offset: int, data: bytes) -> None:
    """In place: it stays the same file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("size", SIZES)
def test_it_reads_as_the_file_does(size: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    plain = io.BytesIO(data)
    with found(committed(tmp_path, data)).open("x") as file:
        assert file.seekable() and file.readable() and file.read() == data
        for offset, whence in ((0, os.SEEK_SET), (size // 2, os.SEEK_SET), (-min(size, 7), os.SEEK_END), (size + 9, os.SEEK_SET)):
            assert file.seek(offset, whence) == plain.seek(offset, whence)
            assert (file.read(3), file.readline(), file.tell()) == (plain.read(3), plain.readline(), plain.tell())
            room, other = bytearray(PIECE + 3), bytearray(PIECE + 3)
            assert (file.readinto(room), room) == (plain.readinto(other), other)
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()
    assert file.closed


@pytest.mark.parametrize("algorithm", [digest.XXH3, digest.SHA256])
@pytest.mark.parametrize("size", SIZES[1:])
def test_what_was_written_into_it_meanwhile_is_never_handed_out(size: int, algorithm: str, tmp_path: Path) -> None:
    data = os.urandom(size)
    directory = committed(tmp_path, data, algorithm)
    for at in {0, size // 2, size - 1}:
        with found(directory).open("x") as file:
            write_into(directory / "x", at, bytes([data[at] ^ 1]))
            room = memoryview(bytearray(PIECE))
            raw: Any = file.raw  # type: ignore[union-attr]
            for index in range(-(-size // PIECE)):
                if index == at // PIECE:
                    with pytest.raises(IntegrityError, match=r"step-1: x \(rank 0's\) was written into after") as caught:
                        raw.take(index, room)
                    assert list(caught.value.files) == ["x"]
                else:
                    assert raw.take(index, room) == data[index * PIECE:(index + 1) * PIECE]
            write_into(directory / "x", at, data[at:at + 1])
            assert file.read() == data
        with pytest.raises(IntegrityError), found(directory).open("x") as file:
            write_into(directory / "x", at, bytes([data[at] ^ 1]))
            with suppress(IntegrityError):
                file.read()
        write_into(directory / "x", at, data[at:at + 1])


def test_a_file_that_was_cut_meanwhile_is_refused_and_one_that_grew_ends_where_it_did(tmp_path: Path) -> None:
    data = os.urandom(PIECE + 10)
    directory = committed(tmp_path, data)
    with pytest.raises(IntegrityError), found(directory).open("x") as file:
        write_into(directory / "x", len(data), b"more")
        assert file.read() == data
        os.truncate(directory / "x", PIECE + 9)
        file.seek(0)
        assert file.read(PIECE) == data[:PIECE]
        file.read(10)


def test_without_a_digest_it_is_the_file_itself(tmp_path: Path) -> None:
    directory = committed(tmp_path, b"bytes")
    with found(directory).open("x", digest=False) as file:
        assert not isinstance(file.raw, Reread)  # type: ignore[union-attr]


def _new(file: Any) -> Any:
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before the zip"])
@pytest.mark.parametrize("load", [_new, torchfile.whole, lambda file: torch.load(file, weights_only=False)])
def test_nothing_that_was_not_digested_is_unpickled(load: Callable[[Any], Any], zipped: bool, tmp_path: Path) -> None:
    """Torch reads tensors of its older format from the descriptor itself, if there is one."""
    out, evil = io.BytesIO(), io.BytesIO()
    for file, fill in ((out, 1.0), (evil, 2.0)):
        torch.save({"x": torch.full((1 << 18,), fill)}, file, _use_new_zipfile_serialization=zipped)
    assert len(out.getvalue()) == len(evil.getvalue())
    directory = committed(tmp_path, out.getvalue())
    with found(directory).open("x") as file:
        assert torch.equal(load(file)["x"], torch.ones(1 << 18))
    with pytest.raises(IntegrityError, match="was written into"), found(directory).open("x") as file:
        write_into(directory / "x", PIECE + 1000, evil.getvalue()[PIECE + 1000:])  # behind all that describes the tensor
        load(file)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before the zip"])
def test_a_disk_that_fails_under_torch_is_an_error_that_names_the_file(zipped: bool, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch itself says that a closed file was read, or that an import returned a result with an exception set."""
    def fails(file: Any, room: Any, offset: int, wait: bool) -> int:
        if offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_at(file, room, offset, wait)

    out = io.BytesIO()
    torch.save({"x": torch.ones(1 << 18)}, out, _use_new_zipfile_serialization=zipped)
    directory = committed(tmp_path, out.getvalue())
    monkeypatch.setattr(reread, "read_at", fails)
    with pytest.raises(OSError) as caught, found(directory).open("x") as file:
        torchfile.whole(file)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(directory / "x"))


def test_a_pickle_that_was_exchanged_in_place_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    evil = pickle.dumps(Evil())
    directory = committed(tmp_path, pickle.dumps(1).ljust(len(evil), b"\0"), digest.SHA256)
    with pytest.raises(IntegrityError), found(directory).open("x") as file:
        write_into(directory / "x", 0, evil)
        pickle.load(file)
    assert not (tmp_path / "evil").exists()


# -- into tensors --------------------------------------------------------------------------------------------------------


def _state(fill: float) -> dict[str, torch.Tensor]:
    return {f"{name}": torch.full((5, PIECE // 7), fill + name) for name in range(6)}


def _here(directory: Path) -> Checkpoint:
    return Checkpoint(str(directory), catalog.read_marker(REAL, str(directory)), rank=0, world=1)


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("where", [0.05, 0.5, 0.95])
def test_no_tensor_gets_what_was_not_digested(where: float, readers: int, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job writes into the file when its digest was found right and its tensors are described."""
    directory = saved(tmp_path / "root", Shards(_state(10.0)))
    (path,) = directory.glob("shard*")
    overlap = inplace.overlap

    def written(rooms: Any) -> bool:
        write_into(path, int(where * path.stat().st_size) // 4 * 4, torch.full((1 << 12,), -1.0).numpy().tobytes())
        return overlap(rooms)

    monkeypatch.setattr(inplace, "overlap", written)
    monkeypatch.setattr(torch, "get_num_threads", lambda: readers)
    target = _state(0.0)
    with pytest.raises(IntegrityError, match="was written into after its digest was compared"):
        Shards(target).load(_here(directory), Ranks(0, 1, lambda: None))
    for name, tensor in target.items():
        assert set(tensor.unique().tolist()) <= {float(name), 10.0 + float(name)}, name


class _Kernel:
    """``preadv`` of a kernel that holds only the first ``cached`` bytes in memory and gives at most ``most`` at a time."""

    def __init__(self, cached: int, most: int = 1 << 30, refusal: int = errno.EAGAIN) -> None:
        self.cached, self.most, self.refusal = cached, most, refusal
        self.waits: list[int] = []
        self.asked = 0

    def __call__(self, fd: int, rooms: list[memoryview], offset: int, flags: int) -> int:
        (room,) = rooms
        room = room[:self.most]
        if flags:
            self.asked += 1
            room = room[:max(0, self.cached - offset)]
            if not room:
                raise OSError(self.refusal, os.strerror(self.refusal))
        else:
            self.waits.append(offset)
        return os.preadv(fd, [room], offset)


@pytest.mark.parametrize(("kernel", "waits"), [
    (_Kernel(1 << 30), "none"), (_Kernel(1 << 30, most=100_003), "none"), (_Kernel(0, most=100_003), "all"), (_Kernel(0), "all"),
    (_Kernel(0, refusal=errno.EOPNOTSUPP), "all"), (_Kernel(5 * PIECE + 77), "some"), (None, "all")])
@pytest.mark.parametrize("digested", ["xxh3-128", None])
def test_several_read_what_is_in_memory_and_one_the_rest_in_order(kernel: Any, waits: str, digested: Any, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path / "root", Shards(_state(10.0)), digest=digested)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(durable, "_PREADV", None)
    overlap = inplace.overlap

    def then(rooms: Any) -> bool:
        monkeypatch.setattr(durable, "_PREADV", kernel)
        return overlap(rooms)

    monkeypatch.setattr(inplace, "overlap", then)
    target = _state(0.0)
    Shards(target).load(_here(directory), Ranks(0, 1, lambda: None))
    assert all(torch.equal(tensor, _state(10.0)[name]) for name, tensor in target.items())
    if kernel is not None:
        assert (len(kernel.waits) > 0) == (waits != "none") and kernel.waits == sorted(kernel.waits)
        assert kernel.asked <= 4 or waits != "all", "each of the readers finds out once"
        kernel.waits, kernel.asked = [], 0


def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int, rooms: Any, offset: int, flags: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    directory = committed(tmp_path, b"bytes")
    with found(directory).open("x") as file:
        monkeypatch.setattr(durable, "_PREADV", fails)
        for wait in (True, False):
            with pytest.raises(OSError) as caught:
                file.raw.take(0, memoryview(bytearray(9)), wait)  # type: ignore[union-attr]
            assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(directory / "x"))


def test_a_piece_of_an_open_file_is_read_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    with open(tmp_path / "x", "rb") as file:
        for one in (file, io.BytesIO(b"0123456789")):
            room = bytearray(4)
            one.seek(1)
            assert (read_at(one, memoryview(room), 8), bytes(room[:2]), one.tell()) == (2, b"89", 1)
            assert read_at(one, memoryview(room), 10) == 0


def test_the_states_of_a_large_digest_are_not_many() -> None:
    assert digest.Trail(8 << 30).piece == PIECE and digest.Trail(100 << 30).piece == 8 << 20
    assert (100 << 30) // digest.Trail(100 << 30).piece <= digest._STATES


# -- memory --------------------------------------------------------------------------------------------------------------


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel keeps no high-water mark to begin anew")
@pytest.mark.parametrize("kind", ["dict", "module", "safetensors", "linked"])
def test_a_load_takes_little_memory_besides_the_state(kind: str, tmp_path: Path) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(1536, 1536) for _ in range(8)))
    size = sum(p.nbytes for p in module.parameters())
    state = {name: p.detach() for name, p in module.named_parameters()}
    shards = Shards(module if kind == "module" else state, format="safetensors" if kind == "safetensors" else "torch")
    directory = saved(tmp_path / "root", shards, dedup="link" if kind == "linked" else None)
    shards.load(_here(directory), Ranks(0, 1, lambda: None))  # what the code itself needs
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    shards.load(_here(directory), Ranks(0, 1, lambda: None))
    assert size > 64 << 20 and _status("VmHWM") - before < 16 << 20
