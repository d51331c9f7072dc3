"""DCP fails on one rank, in every way it can: all ranks raise that rank's cause, and what was committed stays as it was."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import distckpt
from distckpt import durable
from distckpt.errors import DiskFull, SaveError
from distckpt.payloads import torchfile
from tests.frameworks.story import digest
from tests.harness import run, values


class Loop:
    def __init__(self, kind: str, world: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        if kind == "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        elif kind == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01)

    @property
    def state(self) -> distckpt.TrainState:
        return distckpt.TrainState(model=self.model, optimizer=self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        return digest([p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters()])


# -- what goes wrong inside DCP ------------------------------------------------------------------------------------------

def _onto_a_full_disk(self: Any, data: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)


def _raising(self: Any, plan: Any, planner: Any) -> Any:
    raise ValueError("a bug in the writer")


def _cut(where: str, name: Callable[[int], str]) -> Any:
    """The writer's method ``where`` reports success although the end of its file is missing."""
    original = getattr(FileSystemWriter, where)

    def cut(self: Any, *args: Any) -> Any:
        answer = original(self, *args)
        path = Path(self.path, name(dist.get_rank()))
        os.truncate(path, path.stat().st_size - 3)
        return answer

    return cut


def _faults() -> dict[str, tuple[Any, str, Any, int, str]]:
    """{what: (owner, method, in its place, rank it happens on, what that rank says)}"""
    return {
        "the disk is full": (durable._File, "write", _onto_a_full_disk, 1, "No space left on device"),
        "an exception": (FileSystemWriter, "write_data", _raising, 1, "a bug in the writer"),
        "a short file": (FileSystemWriter, "write_data", _cut("write_data", lambda r: f"__{r}_0.distcp"), 1,
                         "bytes were written and"),
        "short metadata": (FileSystemWriter, "finish", _cut("finish", lambda r: ".metadata"), 0, "pickle"),
    }


def _fail(rank: int, world: int, root: str, kind: str, background: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    written: list[str] = []
    torch_save = torchfile.write
    torchfile.write = lambda value, out: (written.append(out.path), torch_save(value, out))[1]  # type: ignore[assignment]
    serialised = FileSystemWriter.write_data

    def count(self: Any, plan: Any, planner: Any) -> Any:
        written.append("DCP")
        return serialised(self, plan, planner)

    with distckpt.CheckpointManager(root, keep_last=2) as manager:
        loop = Loop(kind, world)
        FileSystemWriter.write_data = count  # type: ignore[method-assign]
        manager.save(1, loop.state, background=background)
        manager.wait()
        FileSystemWriter.write_data = serialised  # type: ignore[method-assign]
        found["written"] = list(written)
        for what, (owner, name, instead, where, _) in _faults().items():
            loop.step()
            original = getattr(owner, name)
            if rank == where:
                setattr(owner, name, instead)
            with pytest.raises(SaveError) as caught:
                manager.save(2, loop.state, background=background)
                manager.wait()
            setattr(owner, name, original)
            error = caught.value
            found[what] = {"failures": {r: f.message for r, f in error.failures.items()}, "outcome": error.outcome,
                           "full": isinstance(error, DiskFull)}
            dist.barrier()
            assert manager.all_steps() == [1], what
        for step in (2, 3):
            loop.step()
            manager.save(step, loop.state, background=background)
        manager.wait()
        saved = loop.digest()
        loop = Loop(kind, world, seed=5)
        found["restored"] = manager.restore(loop.state), loop.digest() == saved
    return found


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp"])
def test_B52_B89_B99_what_fails_in_dcp_on_one_rank_is_every_ranks_error_and_the_next_save_works(
        kind: str, background: bool, tmp_path: Path) -> None:
    """B52: the cause itself, not a time-out of the group. B89: DCP's success is not believed. B99: one failed background save
    ends none of what the next one needs."""
    root = tmp_path / "root"
    for rank, found in enumerate(values(run(2, _fail, str(root), kind, background))):
        assert found["written"] == ["DCP"], "DCP wrote it, once, and nothing of ours did"
        for what, (_, _, _, where, text) in _faults().items():
            told = found[what]
            assert list(told["failures"]) == [where] and text in told["failures"][where], (what, rank, told)
            assert told["outcome"] == "aborted" and told["full"] == (what == "the disk is full")
        assert found["restored"] == (3, True)
    assert sorted(os.listdir(root)) == [".distckpt", "latest", "step-2", "step-3"]
    if kind == "fsdp2" and background:
        _read_by_torch_alone(root / "step-3", tmp_path)


_ALONE = """
import sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
folder, out = sys.argv[1:]
state = {"model": {"0.weight": torch.zeros(16, 8)}}
dcp.load(state, checkpoint_id=folder)
dcp_to_torch_save(folder, out)
assert torch.equal(torch.load(out, weights_only=True)["model"]["0.weight"], state["model"]["0.weight"])
assert bool(state["model"]["0.weight"].any()) and not [m for m in sys.modules if m.startswith("distckpt")]
"""


def _read_by_torch_alone(checkpoint: Path, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _ALONE, checkpoint, folder / "out.pt"], cwd=folder, capture_output=True,
                          text=True, timeout=60, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert done.returncode == 0, done.stderr
