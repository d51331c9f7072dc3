"""The seam's promises about durability reach the kernel: what tests replace everywhere else, on the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distckpt.durable import REAL


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes that the kernel was asked to sync, in order."""
    found: list[int] = []
    real = os.fsync

    def note(fd: int) -> None:
        real(fd)
        found.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    return found


def test_each_sync_is_one_of_the_kernels_on_the_right_file(tmp_path: Path, synced: list[int]) -> None:
    path = tmp_path / "a"
    out = REAL.open(str(path))
    out.write(b"x")
    assert synced == []
    out.fsync()
    out.close()
    here = path.stat().st_ino
    assert synced == [here]
    REAL.fsync(str(path))
    assert synced == [here, here]
    REAL.fsync_dir(str(tmp_path))
    assert synced == [here, here, tmp_path.stat().st_ino]
