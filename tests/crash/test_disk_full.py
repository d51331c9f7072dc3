"""A disk that is really full: a small tmpfs, mounted by the test (FIELD_CASES B124, B125)."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt.durable import REAL
from distckpt.errors import DiskFull
from distckpt.options import Seams
from distckpt.testing.faults import FaultyFiles, fail
from tests.harness import run, values

MB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this machine does not let root mount a tmpfs: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _payload(kind: str, size: int, rank: int) -> Any:
    """About ``size`` bytes per rank, written in one of the ways that exist."""
    tensors = {"w": torch.full((size // 4,), float(rank))}
    if kind == "shards":
        return distckpt.Shards(tensors)
    if kind == "safetensors":
        return distckpt.Shards(tensors, format="safetensors")
    assert kind == "dcp"
    return distckpt.DCP(state={f"w{rank}": tensors["w"]})


def _save(manager: distckpt.CheckpointManager, kind: str, step: int, size: int, rank: int) -> None:
    if kind == "torch.save":
        with manager.saving(step) as files:
            torch.save({"w": torch.full((size // 4,), float(rank))}, files.mine("w.pt"))
    else:
        manager.save(step, _payload(kind, size, rank))


def _fill(rank: int, world: int, root: str, kind: str) -> dict[str, Any]:
    with distckpt.CheckpointManager(root, keep_last=1) as manager:
        _save(manager, kind, 1, MB, rank)
        free = os.statvfs(root)
        before = free.f_bavail * free.f_frsize
        try:
            _save(manager, kind, 2, 20 * MB // world, rank)
        except DiskFull as error:
            seen = {"needed": error.needed, "free": error.free, "path": error.path, "ranks": sorted(error.failures),
                    "text": str(error)}
        gc.collect()  # torch.save's writer keeps its file open as long as the exception's frames live
        names = sorted(n for n in os.listdir(root) if n.startswith("step-"))
        _save(manager, kind, 3, MB, rank)
        if rank == 0:
            assert manager._owned is not None and manager._owned.janitor.wait(30)
    return {"names": names, "before": before, **seen}


@pytest.mark.parametrize("kind", ["shards", "torch.save", "safetensors", "dcp"])
def test_disk_full_on_every_rank_and_nothing_lost(kind: str, small: Path) -> None:
    root = small / "root"
    found = values(run(2, _fill, str(root), kind))
    for one in found:
        assert one["names"] == ["step-1"], "the checkpoint before it is untouched, nothing partial is visible"
        assert one["ranks"] == found[0]["ranks"] and one["needed"] == found[0]["needed"] and one["needed"] > MB
        assert one["free"] is not None and one["path"]
        assert "is full on rank" in one["text"] and "bytes are free" in one["text"]
    assert sorted(n for n in os.listdir(root) if n.startswith("step-")) == ["step-3"], "the next save works"
    left = os.statvfs(root)
    assert left.f_bavail * left.f_frsize > found[0]["before"] - MB, "the space of the failed attempt came back"
    newest = distckpt.open(root).latest()
    assert newest is not None and not distckpt.open(root).verify(newest, digest=True)


def test_a_save_that_cannot_fit_is_refused_before_anything_is_written(small: Path) -> None:
    root = small / "root"
    with distckpt.CheckpointManager(root) as manager:
        manager.save(1, {"w": torch.zeros(9 * MB // 4)})
        with pytest.raises(DiskFull) as caught:
            manager.save(2, {"w": torch.zeros(9 * MB // 4)})
        assert caught.value.needed is not None and caught.value.free is not None
        assert caught.value.needed > 9 * MB > caught.value.free and "nothing was written" in str(caught.value)
        assert not [n for n in os.listdir(root / ".distckpt" / "staging" / "1") if len(n) == 16]


def _one_rank(rank: int, world: int, root: str, number: int) -> dict[str, Any]:
    files = FaultyFiles(REAL)
    with distckpt.CheckpointManager(root, seams=Seams(files=files)) as manager:
        manager.save(1, {"w": torch.full((1000,), float(rank))})
        if rank == 1:
            files.faults.append(fail(number, op="write", path="state.rank"))
        with pytest.raises(DiskFull) as caught:
            manager.save(2, {"w": torch.full((1000,), float(rank))})
        manager.save(3, {"w": torch.full((1000,), float(rank))})
    assert rank == 0 or (files.faults and files.fired)
    return {"ranks": list(caught.value.failures), "path": caught.value.path, "needed": caught.value.needed}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_of_one_rank_is_told_to_all(number: int, tmp_path: Path) -> None:
    for one in values(run(2, _one_rank, str(tmp_path / "root"), number)):
        assert one["ranks"] == [1] and "rank-00001" in one["path"] and one["needed"]
