"""The disk begins with others' files while they grow: what is asked of it, by whom, and that nothing is lost or left by it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt import pagecache
from distckpt.durable import REAL
from distckpt.errors import SaveError
from distckpt.manager import CheckpointManager
from distckpt.options import Seams
from distckpt.payloads.framework import FrameworkFiles
from distckpt.runtime import SYSTEM
from distckpt.saving.files import RankFiles
from distckpt.saving.pacing import paced
from distckpt.testing.faults import FaultyFiles, Operation, call, fail
from tests.support import crash_disk

LIMIT = 20
pytestmark = pytest.mark.skipif(not REAL.sees_open, reason="only where the kernel tells which files are open, and takes hints")


class Watched(FaultyFiles):
    """``begun`` is set when write-back of a file whose name holds ``part`` was asked for."""

    def __init__(self, part: str) -> None:
        self.begun = threading.Event()
        super().__init__(REAL, call(self._note, op="start_writeback", path=part, after=True, forever=True))

    def _note(self, operation: Operation) -> None:
        self.begun.set()

    def asked(self, op: str = "start_writeback") -> set[str]:
        return {os.path.basename(o.path) for o in self.hints if o.op == op}


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def before() -> None:
    """Ranks that a test of this process left for dead, in the middle of a save, keep their threads."""
    _before.clear()
    _before.update(threading.enumerate())


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "pacing" in t.name and t not in _before]


def nobody(path: str) -> bool:
    return False


def test_a_file_that_grows_is_on_its_way_before_its_writer_is_done(tmp_path: Path) -> None:
    """Whatever it is called meanwhile, wherever below; by the descriptor, and so without reading any directory."""
    files = Watched("tmp-of-somebody")
    (tmp_path / "sub").mkdir()
    (tmp_path.parent / "elsewhere").write_bytes(b"1")
    with paced(files, SYSTEM, str(tmp_path), nobody), open(tmp_path.parent / "elsewhere", "ab") as other, \
            open(tmp_path / "sub" / ".tmp-of-somebody", "wb", buffering=0) as out:
        assert threads() == ["distckpt-pacing"]
        for _ in range(3):  # and again, as it grows
            files.begun.clear()
            out.write(bytes(1 << 20))
            other.write(b"2")
            assert files.begun.wait(LIMIT)
    assert threads() == [] and files.asked() == {".tmp-of-somebody"} and not files.reads
    count = len(files.hints)
    assert count >= 3 and files.asked("await_writeback") == files.asked("drop_cache") == set(), "it never waits"


def test_our_own_files_pace_themselves(tmp_path: Path) -> None:
    files = Watched("z-others.bin")
    mine = RankFiles(files, str(tmp_path), 0, 1, algorithm=None, aborted=lambda: False)
    with mine.paced(), mine.writer("own.bin") as out, open(mine.mine("claimed.bin"), "wb"), open(tmp_path / "z-others.bin", "wb"):
        out.write(b"1")
        for _ in range(2):
            assert files.begun.wait(LIMIT)
            files.begun.clear()
        assert files.asked() == {"claimed.rank-00000-of-00001.bin", "z-others.bin"}


def test_a_write_error_that_it_is_told_ends_the_save_and_hides_no_other(tmp_path: Path) -> None:
    told = threading.Event()
    files = FaultyFiles()
    with CheckpointManager(tmp_path, seams=Seams(files=files)) as manager:
        for own in (False, True):
            told.clear()
            files.faults = [call(lambda _: told.set(), op="start_writeback"), fail(errno.EIO, op="start_writeback", path="mine")]
            with pytest.raises(SaveError, match="my own" if own else "Input/output error"), manager.saving(1) as out, \
                    open(out.mine("mine.bin"), "wb"):
                assert told.wait(LIMIT)
                if own:
                    raise ValueError("my own")
            assert files.fired and threads() == []
        files.faults = []
        with manager.saving(1) as out:
            Path(out.mine("mine.bin")).write_bytes(b"1")


@pytest.mark.parametrize("lacking", ["sync_file_range", "/proc", "a disk that is real", "threads"])
def test_without_the_means_there_is_no_thread_and_the_same_file(lacking: str, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    files: Any = REAL
    if lacking == "sync_file_range":
        monkeypatch.setattr(pagecache, "_SYNC_RANGE", None)
    elif lacking == "/proc":
        monkeypatch.setattr(pagecache, "DESCRIPTORS", str(tmp_path / "none"))
    elif lacking == "threads":
        def refused(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refused)
    else:
        files = FaultyFiles(crash_disk())
    with paced(files, SYSTEM, str(tmp_path), nobody), open(tmp_path / "f", "wb") as out:
        assert threads() == []
        out.write(b"1")
    assert (tmp_path / "f").read_bytes() == b"1"


# -- who is paced --------------------------------------------------------------------------------------------------------


def _slowly(files: Watched, into: Callable[[str], object]) -> Callable[..., None]:
    """A framework's writer that is not done before the disk has begun with its file."""

    def write(value: Any, path: Any, *args: Any, **options: Any) -> None:
        with open(f"{path}.part", "wb", buffering=0) as out:
            out.write(b"1")
            assert files.begun.wait(LIMIT), "nobody begins with it"
        os.unlink(f"{path}.part")
        into(path)

    return write


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", ["shards", "framework"])
def test_safetensors_files_are_begun_while_they_are_written(kind: str, background: bool, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch as safetensors

    tensors = {"w": torch.ones(1 << 20)}

    def framework(folder: str, held: Any) -> None:
        safetensors.save_file(tensors, f"{folder}/model.safetensors")

    payload = distckpt.Shards(tensors, format="safetensors") if kind == "shards" else FrameworkFiles(framework)
    files, real = Watched(".safetensors.part"), safetensors.save_file
    monkeypatch.setattr(safetensors, "save_file", _slowly(files, lambda path: real(tensors, path)))
    with CheckpointManager(tmp_path, seams=Seams(files=files)) as manager:
        manager.save(1, payload, background=background)
        manager.wait()
    assert threads() == [] and len(files.operations("fsync_file", ".safetensors")) == 1


def test_what_a_block_of_saving_writes_is_begun_claimed_or_not(tmp_path: Path) -> None:
    for step, name in enumerate(("mine", "unclaimed"), 1):
        files = Watched(name)
        with CheckpointManager(tmp_path, seams=Seams(files=files)) as manager, manager.saving(step) as out:
            path = out.mine("mine.bin") if name == "mine" else os.path.join(out.path, "unclaimed.bin")
            with open(path, "wb", buffering=0) as file:
                file.write(b"1")
                assert files.begun.wait(LIMIT)
        assert threads() == [] and files.operations("fsync_file", name)
