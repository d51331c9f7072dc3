"""Files that a framework writes for us: taken over whole, or not at all; memory that comes back."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint import FileSystemWriter

import distckpt
from distckpt.durable import REAL
from distckpt.errors import ConfigError, DiskFull, SaveError
from distckpt.payloads import scratch, whole
from distckpt.payloads.framework import FrameworkFiles, Held, holding
from distckpt.payloads.scratch import Scratch
from distckpt.saving.files import RankFiles


def files(folder: Path, rank: int = 0) -> RankFiles:
    return RankFiles(REAL, str(folder), rank, 2, algorithm="xxh3-128", aborted=lambda: False)


def test_what_a_framework_wrote_is_moved_claimed_and_nothing_else_stays(tmp_path: Path) -> None:
    mine = files(tmp_path)
    private = Path(mine.private())
    (private / "a" / "empty").mkdir(parents=True)
    (private / "a" / "deep.bin").write_bytes(b"deep")
    (private / "top.bin").write_bytes(b"top")
    (private / "alike.bin").write_bytes(b"as on every rank")
    inode = (private / "top.bin").stat().st_ino
    assert sorted(mine.take(str(private), leave={"alike.bin"})) == ["a/deep.bin", "top.bin"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "top.bin"] and (tmp_path / "top.bin").stat().st_ino == inode
    assert {(e.path, e.size) for e in mine.finish()} == {("a/deep.bin", 4), ("top.bin", 3)}


def test_a_link_is_not_taken(tmp_path: Path) -> None:
    mine = files(tmp_path)
    os.symlink("/etc/passwd", os.path.join(mine.private(), "link"))
    with pytest.raises(OSError, match="left a link where a regular file should be"):
        mine.take(mine.private())


def test_the_files_of_one_level_below_are_taken(tmp_path: Path) -> None:
    mine = files(tmp_path, 1)
    inner = Path(mine.private(), "checkpoint-3")
    inner.mkdir()
    (inner / "x").write_bytes(b"x")
    assert mine.take(str(inner)) == ["x"] and sorted(os.listdir(tmp_path)) == ["x"]


# -- short files ---------------------------------------------------------------------------------------------------------


def _zip(path: Path) -> None:
    torch.save({"w": torch.arange(100)}, path)


def _safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.arange(100)}, path)


def _shard(path: Path) -> None:
    """Of DCP's: an archive per tensor, the first one much longer than the second."""
    with path.open("wb") as file:
        torch.save(torch.arange(100_000), file)
        torch.save(torch.arange(3), file)


def _metadata(path: Path) -> None:
    state = {"w": torch.arange(100), "name": "x", "shape": torch.Size([3])}
    torch.distributed.checkpoint.save(state, storage_writer=FileSystemWriter(path.parent / "dcp"), no_dist=True)
    path.write_bytes((path.parent / "dcp" / ".metadata").read_bytes())


@pytest.mark.parametrize("name, make", [("a.pt", _zip), ("a.safetensors", _safetensors), ("__0_0.distcp", _shard),
                                        (".metadata", _metadata),
                                        ("a.json", lambda path: path.write_text(json.dumps({"a": [1, 2, 3]})))])
def test_a_file_cut_off_anywhere_is_found_out(tmp_path: Path, name: str, make: Any) -> None:
    path = tmp_path / name
    make(path)
    whole.check(str(path))
    data = path.read_bytes()
    for length in {0, 1, 5, 9, len(data) // 2, len(data) - 1, max(0, len(data) - 400)}:
        path.write_bytes(data[:length])
        with pytest.raises(OSError) as told:
            whole.check(str(path))
        assert told.value.errno == errno.EIO and told.value.filename == str(path), length
    path.with_suffix(".txt").write_bytes(b"of no known kind")
    whole.check(str(path.with_suffix(".txt")))


def test_a_header_that_says_it_is_longer_than_any_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # all of it is there, of zeros
    with pytest.raises(OSError, match="its header is cut off"):
        whole.check(str(path))


# -- memory --------------------------------------------------------------------------------------------------------------


def test_the_directory_goes_when_the_files_are_held_and_they_go_when_closed(tmp_path: Path) -> None:
    place = Scratch(str(tmp_path))
    Path(place.path, "a").write_bytes(b"bytes")
    place.seal(place.path, ["a"])
    assert os.listdir(tmp_path) == [] and place.files["a"].read() == b"bytes"
    place.close()
    assert place.files == {}


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    living, dead = Scratch(str(tmp_path)), Scratch(str(tmp_path))
    Path(dead.path, "a").write_bytes(b"left")
    fcntl.flock(dead._lock, fcntl.LOCK_UN)  # as the end of its process would
    (tmp_path / "distckpt-scratch-0-of-nobody").mkdir()  # no lock in it: perhaps being made
    (tmp_path / "something else").mkdir()
    third = Scratch(str(tmp_path))
    assert os.path.isdir(living.path) and os.path.isdir(third.path) and not os.path.exists(dead.path)
    assert (tmp_path / "something else").exists() and (tmp_path / "distckpt-scratch-0-of-nobody").exists()


def test_a_directory_that_is_swept_before_it_is_locked_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = fcntl.flock, []

    def flock(file: Any, how: int) -> None:
        if not swept and how == fcntl.LOCK_EX:
            swept.append(file.name)
            scratch._sweep(str(tmp_path))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    place = Scratch(str(tmp_path))
    assert os.path.isdir(place.path) and not os.path.exists(swept[0])


# -- the payload, on one rank --------------------------------------------------------------------------------------------


def payload(**more: Any) -> FrameworkFiles:
    def write(directory: str, held: Held) -> None:
        torch.save({"w": torch.ones(10)}, f"{directory}/w.pt")

    return FrameworkFiles(write, **more)


def test_no_room_in_memory_is_a_full_disk_that_names_the_place_and_the_way_out(tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    def write(directory: str, held: Held) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0")

    monkeypatch.setattr(Scratch, "full", lambda self: True)
    (tmp_path / "memory").mkdir()
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, FrameworkFiles(write, scratch=str(tmp_path / "memory")), background=True)
        with pytest.raises(DiskFull, match="give scratch= another directory"):
            manager.wait()
        manager.save(2, payload(scratch=str(tmp_path / "memory")), background=True)
        manager.wait()
        assert manager.all_steps() == [2] and os.listdir(tmp_path / "memory") == []


def test_memory_comes_back_when_the_save_never_began(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        state = payload(scratch=str(tmp_path / "memory"))
        manager.save(1, state, background=True)
        manager.wait()
        manager.save(1, state, background=True)  # it is there: refused before anything is written
        assert state._staged is not None
        held = state._staged.scratch
        assert held.files
        with pytest.raises(SaveError):
            manager.wait()
        manager.save(2, state, background=True)
        assert held.files == {}
        manager.wait()


def test_a_file_that_is_owed_and_a_loader_that_is_not_ours(tmp_path: Path) -> None:
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        with pytest.raises(SaveError, match="did not write this file"):
            manager.save(1, payload(owed=["other.pt"]))
        manager.save(1, payload(owed=["w.pt"]))
        with pytest.raises(ConfigError, match="loaded by its framework"):
            manager.restore(payload())


def test_errors_are_held_on_this_thread_only_and_torch_save_is_put_back(tmp_path: Path) -> None:
    real, other = torch.save, []
    missing = str(tmp_path / "no" / "such" / "directory")

    def elsewhere() -> None:
        try:
            torch.save({}, missing)
        except RuntimeError as error:
            other.append(error)

    with holding() as held:
        torch.save({}, missing)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert torch.save is real and isinstance(held.error, RuntimeError) and len(other) == 1


def test_an_empty_file_is_not_whole_and_a_package_without_a_line_is(tmp_path: Path) -> None:
    for name in ("a.bin", "__init__.py"):
        (tmp_path / name).touch()
    whole.check(str(tmp_path / "__init__.py"))
    with pytest.raises(OSError, match="wrote nothing into this file"):
        whole.check(str(tmp_path / "a.bin"))
