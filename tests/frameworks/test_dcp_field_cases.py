"""Public failures of FSDP, DDP, DCP and torch.save (FIELD_CASES), each on the real thing."""

from __future__ import annotations

import io
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt.durable import REAL
from distckpt.errors import NoUsableCheckpoint
from distckpt.options import Seams
from distckpt.testing.faults import FaultyFiles, Operation, call
from tests.frameworks.test_dcp_failures import Loop
from tests.harness import run, start, values


def _three(rank: int, world: int, root: str) -> list[str]:
    loop, digests = Loop("fsdp2", world), []
    with distckpt.CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            loop.step()
            manager.save(step, {"train": loop.state, "own": distckpt.Shards({"w": torch.full((5000,), float(rank))})})
            digests.append(loop.digest())
    return digests


def _resume(rank: int, world: int, root: str) -> tuple[int | None, str, dict[str, str]]:
    loop, own = Loop("fsdp2", world, seed=3), {"w": torch.zeros(5000)}
    with distckpt.CheckpointManager(root) as manager:
        found = manager.resume()
        step = manager.restore({"train": loop.state, "own": distckpt.Shards(own)})
    assert float(own["w"][7]) == rank
    return step, loop.digest(), found.skipped


def test_B14_B16_what_is_cut_or_missing_is_named_by_file_and_size_and_the_one_before_is_taken(tmp_path: Path) -> None:
    """B16: ``.metadata`` is there and a shard is not. B14: a zip of torch.save without its end, found before it is opened."""
    root = tmp_path / "root"
    digests = values(run(2, _three, str(root)))
    (root / "step-3" / "train" / "__1_0.distcp").unlink()
    cut = root / "step-2" / "own" / "shard.rank-00001-of-00002.pt"
    size = cut.stat().st_size
    os.truncate(cut, size - 100)
    for rank, (step, digest, skipped) in enumerate(values(run(2, _resume, str(root)))):
        assert step == 1 and digest == digests[rank][0]
        assert "train/__1_0.distcp" in skipped["step-3"] and "missing" in skipped["step-3"], skipped
        assert f"has {size - 100} bytes, the marker says {size}" in skipped["step-2"] and cut.name in skipped["step-2"]


def _nothing(rank: int, world: int, root: str) -> str:
    with distckpt.CheckpointManager(root) as manager:
        with pytest.raises(NoUsableCheckpoint) as caught:
            manager.restore(Loop("ddp", world).state)
        dist.barrier()
    return str(caught.value)


def test_B20_step_directories_without_a_commit_are_never_a_fresh_start(tmp_path: Path) -> None:
    """An async save of another tool that never published: its directories stand, and there is no tracker."""
    (tmp_path / "root" / "step-40").mkdir(parents=True)
    (tmp_path / "root" / "step-40" / ".metadata").write_bytes(b"x")
    for text in values(run(2, _nothing, str(tmp_path / "root"))):
        assert "step-40" in text and "adopt" in text and "allow_fresh=True" in text
    assert (tmp_path / "root" / "step-40" / ".metadata").exists()


def _one_stays(rank: int, world: int, root: str) -> dict[str, Any]:
    """keep_last=1, behind: at the moment of each publication, and when all is done."""
    seen: list[list[str]] = []

    def look(operation: Operation) -> None:
        seen.append(sorted(p.name for p in Path(root).iterdir() if (p / "commit.json").exists()))

    files = FaultyFiles(REAL, call(look, op="rename", path=lambda p: p.endswith(("/root/step-2", "/root/step-3")), forever=True))
    with distckpt.CheckpointManager(root, keep_last=1, seams=Seams(files=files)) as manager:
        loop = Loop("ddp", world)
        for step in (1, 2, 3):
            loop.step()
            manager.save(step, loop.state, background=True)
            manager.wait()
            if step == 1:
                if rank == 0:
                    os.makedirs(f"{root}/step-9")
                    Path(root, "step-9", ".metadata").write_bytes(b"abandoned")
                    distckpt.open(root).lease(distckpt.open(root).at(1), reason="the evaluation job", ttl=None)
                dist.barrier()
    return {"seen": seen, "left": sorted(p.name for p in Path(root).iterdir())}


def test_B66_B85_one_is_kept_until_the_next_is_there_abandoned_ones_do_not_count_and_a_reader_keeps_his(tmp_path: Path) -> None:
    told = values(run(2, _one_stays, str(tmp_path / "root")))[0]
    before = told["seen"]
    assert before and all(names for names in before), "there is never an instant without a committed one"
    assert ["step-1"] in before and any("step-2" in names for names in before), before
    assert told["left"] == [".distckpt", "latest", "step-1", "step-3", "step-9"]


def _side_by_side(rank: int, world: int, root: str) -> tuple[bool, int, bool]:
    """Collectives of the training on its own group, without a pause, beside ten saves of DCP behind it."""
    loop, total = Loop("fsdp2", world), torch.zeros(1)
    with distckpt.CheckpointManager(root, keep_last=2) as manager:
        for step in range(1, 11):
            handle = manager.save(step, loop.state, background=True)
            saved = loop.digest()
            for _ in range(20):
                loop.step()
                one = torch.ones(1)
                dist.all_reduce(one)
                total += one
                objects: list[Any] = [None] * world
                dist.all_gather_object(objects, (rank, step))
                assert objects == [(r, step) for r in range(world)]
            manager.poll(step)
        manager.wait()
        assert handle.done()
        again = Loop("fsdp2", world, seed=4)
        step = manager.restore(again.state) or 0
    return float(total) == 400, step, again.digest() == saved


def test_B95_saves_behind_training_never_share_its_group(tmp_path: Path) -> None:
    assert values(run(2, _side_by_side, str(tmp_path / "root"))) == [(True, 10, True)] * 2


class _Dies(io.RawIOBase):
    """A file that is killed with its process in the middle of its bytes."""

    def __init__(self, path: str, after: int) -> None:
        self._out, self._left = open(path, "wb", buffering=0), after  # noqa: SIM115 - it ends with the process

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(memoryview(data))[:self._left]
        self._out.write(piece)
        self._left -= len(piece)
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(data)


def _torch_save(rank: int, world: int, root: str, doomed: bool) -> float | None:
    logging.getLogger().setLevel(logging.WARNING)
    with distckpt.CheckpointManager(root) as manager:
        found = manager.resume().checkpoint
        weights = torch.zeros(40_000) if found is None else torch.load(found.mine("w.pt"), weights_only=True)
        if not doomed and found is not None:
            return float(weights[0])
        for step in (1, 2):
            weights += 1
            with manager.saving(step) as files:
                path = files.mine("w.pt")
                torch.save(weights, _Dies(path, 50_000) if step == 2 and rank == 1 else path)
    return None


def test_B08_a_rank_killed_in_the_middle_of_torch_save_leaves_the_one_before(tmp_path: Path) -> None:
    ends = start(2, _torch_save, str(tmp_path / "root"), True).join(60)
    assert ends[1].exitcode == -signal.SIGKILL and ends[0].error is not None
    assert values(run(2, _torch_save, str(tmp_path / "root"), False)) == [1.0, 1.0]
