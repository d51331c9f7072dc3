"""The real manager with one rank on any ``Files``, on a clock that jumps: for crash and fault tests within one process.

The threads that rotate and delete run when the test says so (``tidy``), so every run makes the same operations in the same order.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distckpt import catalog, owned
from distckpt.checkpoint import Checkpoint
from distckpt.durable import Files
from distckpt.layout import MARKER, Layout, rank_name
from distckpt.manager import CheckpointManager
from distckpt.options import Seams
from distckpt.payloads.base import Ranks
from distckpt.saving.files import RankFiles
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from tests.support import ROOT

_NAMES = ("model.bin", "sub/optim.bin")


class Blob:
    """A payload that goes through the seam only: one file beside the marker, one in a directory of its own.

    ``text`` is what its bytes say, so that a checkpoint tells which save it is of; all texts have one length of bytes.
    """

    collective = False
    members: list[str] = []

    def __init__(self, text: str) -> None:
        self.text = text

    @staticmethod
    def content(text: str, rank: int = 0, world: int = 1) -> dict[str, bytes]:
        """What stands in the files of a save of ``text``."""
        return {rank_name(name, rank, world): f"{name} of {text:>12} by {rank};".encode() * 20 for name in _NAMES}

    def check(self) -> None:
        return None

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        for name, data in zip(_NAMES, self.content(self.text, ranks.rank, ranks.world).values(), strict=True):
            with files.writer(name) as out:
                for start in range(0, len(data), 400):
                    out.write(data[start:start + 400])

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        raise NotImplementedError


class Machine:
    """One machine after another: each ``boot`` is a new process that finds the ones before it dead."""

    def __init__(self, root: str = ROOT, clock: VirtualClock | None = None, pid: int = 100) -> None:
        self.root, self.layout = root, Layout.at(root)
        self.clock = clock or VirtualClock()
        self._pid = pid

    def boot(self, files: Files, *, same: bool = False, **options: Any) -> CheckpointManager:
        """The manager of a new process on ``files``, or of the ``same`` one once more; it keeps the last two."""
        if not same:
            owned._open.clear()  # this process's registry: the one before "died" in it
            self.clock.living.clear()
            self._pid += 1
        runtime = VirtualRuntime(self.clock, pid=self._pid)
        return CheckpointManager(self.root, seams=Seams(files, runtime), **{"keep_last": 2, **options})


def tidy(manager: CheckpointManager) -> None:
    """Let what is queued be rotated and deleted, now and on this thread."""
    runtime = manager._seams.runtime
    assert isinstance(runtime, VirtualRuntime)
    for name in ("afterwards", "janitor"):
        runtime.run(name, waits=0)


def close(manager: CheckpointManager) -> None:
    tidy(manager)
    manager.close()


def standing(files: Files, layout: Layout, world: int = 1) -> dict[str, str]:
    """{name: text} of every checkpoint-named entry of the root; AssertionError when one is not whole, bit by bit."""
    found = {}
    for item in files.scan(layout.root):
        if not item.name.startswith("step-"):
            continue
        directory = layout.final(item.name)
        marker = catalog.read_marker(files, directory)
        assert marker.head.name == item.name, f"{item.name} holds the marker of {marker.head.name}"
        assert not catalog.check_files(files, directory, marker.files, digest=True), f"{item.name} is not whole"
        data = {entry.path: b"".join(bytes(p) for p in files.pieces(f"{directory}/{entry.path}")) for entry in marker.files}
        text = str(marker.meta["text"])
        wanted = {path: bytes_ for rank in range(world) for path, bytes_ in Blob.content(text, rank, world).items()}
        assert data == wanted, f"{item.name} does not hold the bytes of {text}"
        assert not catalog.strangers(files, directory, data), f"{item.name} holds more than its marker says"
        found[item.name] = text
    return found


def unclean(files: Files, layout: Layout) -> list[str]:
    """What stands in staging and trash, besides the empty directories of generations."""
    found = []
    for kind in ("staging", "trash"):
        for generation in files.scan(layout.home(kind)):
            found += [f"{kind}/{generation.name}/{i.name}" for i in files.scan(layout.home(kind, generation.name))]
    return found


@contextmanager
def quick_folder(otherwise: Path) -> Iterator[Path]:
    """A directory on a file system in memory where there is one: the real system calls, without a wait for the disk."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or not os.path.ismount(shared):
        yield otherwise
        return
    made = Path(tempfile.mkdtemp(prefix="distckpt-", dir=shared))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def marker_of(layout: Layout, name: str) -> str:
    return f"{layout.final(name)}/{MARKER}"
