"""Lightning: the story with DDP and with FSDP2 (ModelParallelStrategy), who writes, and who can read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import distckpt
from distckpt import catalog
from distckpt.durable import REAL
from distckpt.payloads import dcp, torchfile
from distckpt.saving.arena import Arena
from tests.frameworks.lightning_job import the_stage, train
from tests.frameworks.story import Job, Story

pytestmark = pytest.mark.xdist_group("lightning")

_READER = """
import json, sys
import torch
from tests.frameworks.lightning_nets import Loader, net_of, trainer_of
kind, path = sys.argv[1:]
trainer = trainer_of("one" if kind == "ddp" else kind, 1, 0)
net = net_of(kind)
trainer.fit_loop.epoch_loop.max_steps = 7
seen = []
class Look(__import__("lightning").pytorch.Callback):
    def on_train_start(self, trainer, module):
        seen.append(trainer.global_step)
        for parameter in module.parameters():
            local = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            seen.append(local.detach().double().sum().item())
trainer.callbacks.append(Look())
trainer.fit(net, Loader(0), ckpt_path=path)
assert not [name for name in sys.modules if name.startswith("distckpt")]
print(json.dumps([seen, trainer.global_step]))
"""


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1"])
def test_the_story(kind: str, background: bool, tmp_path: Path) -> None:
    """And what was committed is read by Lightning alone, with another number of ranks: two saved, one goes on. FSDP1
    (FSDPStrategy) on the mocked GPU: in the background from a device whose copies end late. (With ``state_dict_type="full"``
    torch gathers by way of the device's memory, and dies without one.)"""
    story = Story(the_stage(), train, tmp_path, extra={"kind": kind})
    plain = story.plain()
    if kind == "fsdp1":
        root = story.saved(plain, background)
        story.killed_thrice(plain, background)
    else:
        root = story.whole(plain, background)
    if background != (kind == "fsdp2"):
        return  # Lightning's own layout is read once, and the one that we write for it
    newest = distckpt.open(root).latest()
    assert newest is not None and newest.step == 6
    path = f"{newest.path}/checkpoint.ckpt"
    said = subprocess.run([sys.executable, "-c", _READER, kind, path], capture_output=True, text=True, timeout=120, check=False,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"})
    assert said.returncode == 0, said.stderr[-4000:]
    (step, *sums), end = json.loads(said.stdout.splitlines()[-1])
    assert (step, end) == (6, 7) and len(sums) == 4 and all(sums)
    if kind != "ddp":
        dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(path if kind == "ddp" else tmp_path / "whole.pt", weights_only=True)
    stored = whole["model" if kind == "fsdp1" else "state_dict"]
    assert sorted(sums) == sorted(value.double().sum().item() for value in stored.values())


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
def test_a_sharded_strategy_that_gathers_its_state_has_one_file_of_rank_0(background: bool, tmp_path: Path) -> None:
    root, extra = str(tmp_path / "root"), {"kind": "fsdp2-full"}
    plain = the_stage().values(2, train, Job(extra=extra))
    the_stage().values(2, train, Job(root, steps=4, background=background, extra=extra))
    told = the_stage().values(2, train, Job(root, background=background, extra=extra))
    assert [t.started for t in told] == [4, 4] and [t.final for t in told] == [t.final for t in plain]
    assert os.path.isfile(f"{root}/step-6/checkpoint.ckpt")


_PROGRAM = """
import os, sys
import torch
from distckpt.integrations.lightning import Checkpointing
from tests.frameworks.lightning_nets import Loader, Net, state_of, trainer_of
from tests.frameworks.story import digest
rank = int(os.environ.get("LOCAL_RANK", 0))
torch.manual_seed(100 + rank)
checkpointing = Checkpointing(sys.argv[1], save_every=2, background=True)
trainer = trainer_of("ddp", 2, 6, checkpointing)
trainer.fit(Net(), Loader(rank), ckpt_path=checkpointing.ckpt_path)
with open(f"{sys.argv[1]}.{trainer.global_rank}", "w") as out:
    out.write(digest(state_of(trainer)))
"""


def test_under_lightnings_own_launcher_which_starts_the_second_rank_inside_fit(tmp_path: Path) -> None:
    """``python train.py``: there is one process and no process group before ``fit``. It goes on from what other ranks saved."""
    plain = [t.final for t in the_stage().values(2, train, Job())]
    root, script = tmp_path / "root", tmp_path / "train.py"
    the_stage().values(2, train, Job(str(root), steps=4))
    script.write_text(_PROGRAM)
    bare = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    said = subprocess.run([sys.executable, str(script), str(root)], capture_output=True, text=True, timeout=120, check=False,
                          env={**bare, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()})
    assert said.returncode == 0, said.stderr[-4000:]
    assert [(tmp_path / f"root.{rank}").read_text() for rank in range(2)] == plain


def _who_writes(rank: int, world: int, job: Job) -> Any:
    """What Lightning's own writers and ours were given in one run."""
    ours: list[list[str]] = []
    write, single = torchfile.write, TorchCheckpointIO.save_checkpoint
    strategy = FSDPStrategy if job.extra["kind"] == "fsdp1" else ModelParallelStrategy
    sharded, reserve, copied = strategy.save_checkpoint, Arena.reserve, [0]

    def watched(value: Any, out: Any) -> None:
        ours.append(sorted(value))
        write(value, out)

    def counted(self: Arena, size: int) -> None:
        copied.append(size)
        reserve(self, size)

    with mock.patch.object(Arena, "reserve", counted), mock.patch.object(torchfile, "write", watched), \
            mock.patch.object(TorchCheckpointIO, "save_checkpoint", autospec=True, side_effect=single) as by_io, \
            mock.patch.object(strategy, "save_checkpoint", autospec=True, side_effect=sharded) as by_strategy, \
            mock.patch.object(dcp._Writer, "write_data", autospec=True, side_effect=dcp._Writer.write_data) as by_dcp:
        train(rank, world, job)
    return by_io.call_count, by_strategy.call_count, ours, max(copied), by_dcp.call_count


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
def test_lightnings_own_writers_write_and_ours_see_members_only(background: bool, tmp_path: Path) -> None:
    """Three saves. A background one of shards is written by DCP on a process group of its own, as the strategy lays it out; a
    synchronous one by the strategy, whose call of DCP's save gets the writer that leaves the sync, and the CRC, to our digest."""
    shards = [0, 0] if background else [3, 3]
    for kind, by_io, by_strategy in (("ddp", [3, 0], [0, 0]), ("fsdp2", [0, 0], shards), ("fsdp1", [0, 0], shards)):
        told = the_stage().values(2, _who_writes, Job(str(tmp_path / kind), background=background, extra={"kind": kind}))
        assert [t[0] for t in told] == by_io and [t[1] for t in told] == by_strategy
        assert all(t[2] == [["rng"]] * 3 for t in told)
        assert [t[4] for t in told] == ([0, 0] if kind == "ddp" else [3, 3])
        if background and kind == "ddp":
            assert told[0][3] > told[1][3], "a rank that writes nothing of it copied the model"
        found = catalog.read_marker(REAL, str(tmp_path / kind / "step-6"))
        names = {e.path for e in found.files} - {f"members.rank-0000{r}-of-00002.pt" for r in range(2)}
        assert names == ({"checkpoint.ckpt"} if kind == "ddp" else {f"checkpoint.ckpt/{name}" for name in (
            ".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp")})
