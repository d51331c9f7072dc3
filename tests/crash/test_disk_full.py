"""A disk that is really full: a small tmpfs, mounted by the test, under real ranks and every kind of writer.

Torch's own zip writer, safetensors and DCP report a full disk in ways of their own, one of them without an errno; every
rank must get the same ``DiskFull`` all the same, with the rank, the path, what was needed and what is free.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt.durable import REAL
from distckpt.errors import DiskFull
from distckpt.layout import Layout
from distckpt.manager import CheckpointManager
from distckpt.options import Seams
from distckpt.testing.faults import FaultyFiles, fail
from tests.harness import run, values
from tests.onerank import unclean

MB = 1 << 20
SIZE = 32 * MB
SMALL, BIG = 64 << 10, 2 * MB  # floats: 256 KiB and 8 MiB a rank
SLACK = 256 << 10  # the journal, and pages of directories
KINDS = ("shards", "user", "safetensors", "dcp")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 32 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _state(count: int, rank: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(count, dtype=torch.float32) + rank}


class _Part:
    """The state of one rank in the form that ``kind`` saves."""

    def __init__(self, kind: str, count: int, rank: int, world: int) -> None:
        self.kind, self.rank, self.world = kind, rank, world
        self.state = _state(count, rank)
        if kind == "dcp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import DTensor, Shard

            mesh = init_device_mesh("cpu", (world,))
            self.state = {"w": DTensor.from_local(self.state["w"], mesh, [Shard(0)])}

    @property
    def payload(self) -> Any:
        if self.kind == "dcp":
            return distckpt.DCP(state=self.state)
        return distckpt.Shards(self.state, format="safetensors" if self.kind == "safetensors" else "torch")

    def save(self, manager: CheckpointManager, step: int) -> None:
        if self.kind != "user":
            manager.save(step, self.payload)
            return
        with manager.saving(step) as files:
            torch.save(self.state, files.mine("theirs.pt"))

    def load(self, manager: CheckpointManager) -> torch.Tensor:
        if self.kind != "user":
            manager.restore(self.payload)
        else:
            found = manager.resume().checkpoint
            assert found is not None
            self.state = torch.load(found.mine("theirs.pt"), weights_only=True)
        return self.state["w"].to_local() if self.kind == "dcp" else self.state["w"]


def _free(path: str) -> int:
    seen = os.statvfs(path)
    return seen.f_bavail * seen.f_frsize


def _fill(disk: str, rank: int, leave: int) -> None:
    """Rank 0 takes all but ``leave`` bytes of the disk away; the others wait for it."""
    if rank == 0:
        with open(f"{disk}/ballast", "wb") as out:
            out.write(b"x" * (_free(disk) - leave))
    dist.barrier()


def _empty(disk: str, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        os.unlink(f"{disk}/ballast")
    dist.barrier()


def _tree(root: str) -> list[str]:
    return sorted(os.path.join(here, name) for here, folders, names in os.walk(root) for name in folders + names)


def _intact(root: str, steps: list[int]) -> None:
    reader = distckpt.open(root)
    found = reader.checkpoints()
    assert [c.step for c in found] == steps and not any(reader.verify(c, digest=True) for c in found)


def _settled(manager: CheckpointManager) -> None:
    """What an aborted attempt took is deleted in the background by rank 0."""
    if manager._owned is not None:
        manager._owned.afterwards.catch_up()
        assert manager._owned.janitor.wait(20)
    dist.barrier()


def _fills_up(rank: int, world: int, disk: str, kind: str) -> dict[str, Any]:
    root = f"{disk}/run"
    with CheckpointManager(root, keep_last=2) as manager:
        _Part(kind, SMALL, rank, world).save(manager, 1)
        _fill(disk, rank, leave=6 * MB)
        free = _free(disk)
        dist.barrier()
        with pytest.raises(DiskFull) as caught:
            _Part(kind, BIG, rank, world).save(manager, 2)
        error = caught.value
        _settled(manager)
        back = _free(disk)
        if rank == 0:
            _intact(root, [1])
            assert not unclean(REAL, Layout.at(root)), unclean(REAL, Layout.at(root))
            told = json.loads(Path(root, ".distckpt", "status.json").read_text())["attempts"][-1]
            assert (told["step"], told["state"]) == (2, "failed"), "written again when there was room"
        _empty(disk, rank)
        _Part(kind, BIG, rank, world).save(manager, 2)
        loaded = _Part(kind, BIG, rank, world)
        loaded.state["w"].zero_()
        assert torch.equal(loaded.load(manager), _state(BIG, rank)["w"])
        if rank == 0:
            _intact(root, [2, 1])
    return {"message": str(error), "failures": sorted(error.failures), "path": error.path, "needed": error.needed,
            "free": error.free, "outcome": error.outcome, "before": free, "after": back,
            "types": {r: f.type for r, f in error.failures.items()}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fills_up_in_a_save_is_DiskFull_on_every_rank_and_loses_nothing(disk: Path, kind: str) -> None:
    told = values(run(2, _fills_up, str(disk), kind))
    for answer in told:
        print(answer)
        assert answer["outcome"] == "aborted" and answer["failures"] and set(answer["failures"]) <= {0, 1}
        assert answer["path"].startswith(f"{disk}/run/.distckpt/staging/"), answer
        assert answer["needed"] and 0.4 * MB < answer["needed"] < MB, "what the last checkpoint took"
        assert answer["free"] is not None and answer["free"] <= 6 * MB
        rank = min(answer["failures"])
        for part in (f"the disk is full on rank {rank}", f"{answer['free']} bytes are free", str(answer["needed"]), "Free space",
                     answer["path"]):
            assert part in answer["message"], answer["message"]
        assert answer["after"] > answer["before"] - SLACK, "the space of the attempt comes back"
    for key in ("message", "failures", "path", "needed", "free"):
        assert told[0][key] == told[1][key], "every rank is told the same"


def _too_full_to_begin(rank: int, world: int, disk: str) -> dict[str, Any]:
    root = f"{disk}/run"
    with CheckpointManager(root, keep_last=2) as manager:
        part = _Part("shards", BIG // 2, rank, world)
        part.save(manager, 1)
        manager.wait()
        _fill(disk, rank, leave=4 * MB)
        before = _tree(root)
        dist.barrier()
        with pytest.raises(DiskFull) as caught:
            part.save(manager, 2)
        dist.barrier()
        after = _tree(root)
        _empty(disk, rank)
        part.save(manager, 2)
        if rank == 0:
            _intact(root, [2, 1])
    error = caught.value
    return {"same": before == after, "needed": error.needed, "free": error.free, "path": error.path, "message": str(error)}


def test_a_save_that_cannot_fit_is_refused_before_anything_is_written(disk: Path) -> None:
    for answer in values(run(2, _too_full_to_begin, str(disk))):
        assert answer["same"], "nothing was made in the root"
        assert answer["path"] == f"{disk}/run" and answer["free"] < 4.1 * MB
        assert 8 * MB < answer["needed"] < 9 * MB
        assert "nothing was written" in answer["message"] and str(answer["needed"]) in answer["message"]


def _one_rank_is_full(rank: int, world: int, root: str, number: int, op: str) -> dict[str, Any]:
    files = FaultyFiles(REAL)
    fault = fail(number, 2 if op == "write" else 1, op=op, path="shard.rank-00001")
    with CheckpointManager(root, keep_last=2, seams=Seams(files=files)) as manager:
        part = _Part("shards", SMALL, rank, world)
        part.save(manager, 1)
        if rank == 1:
            files.faults.append(fault)
        with pytest.raises(DiskFull) as caught:
            part.save(manager, 2)
        assert bool(fault.fired) == (rank == 1)
        _settled(manager)
        if rank == 0:
            _intact(root, [1])
            assert not unclean(REAL, Layout.at(root)), unclean(REAL, Layout.at(root))
        dist.barrier()
        part.save(manager, 2)
        if rank == 0:
            _intact(root, [2, 1])
    error = caught.value
    return {"failures": sorted(error.failures), "path": error.path, "needed": error.needed, "free": error.free,
            "message": str(error), "host": error.failures[1].host}


@pytest.mark.parametrize("op", ["open", "write", "fsync", "close"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_on_one_rank_only_is_named_on_every_rank(tmp_path: Path, op: str, number: int) -> None:
    """By ``open`` or ``write``; network file systems say so at ``fsync`` or ``close``."""
    told = values(run(2, _one_rank_is_full, str(tmp_path / "run"), number, op))
    assert told[0] == told[1]
    answer = told[0]
    assert answer["failures"] == [1] and answer["path"].endswith("shard.rank-00001-of-00002.pt")
    assert answer["needed"] and answer["free"] and f"rank 1 ({answer['host']})" in answer["message"]
