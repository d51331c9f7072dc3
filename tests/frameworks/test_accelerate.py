"""Accelerate's save_state and load_state through us, on real ranks: DDP and FSDP2 on CPU."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt.durable import REAL
from distckpt.errors import ConfigError, DiskFull, SaveError, StepAlreadyExists, WorldMismatch
from distckpt.options import Seams
from distckpt.payloads import memory
from distckpt.testing.faults import FaultyFiles, fail
from tests.frameworks.alone import settings_of
from tests.frameworks.hftools import (
    Faults,
    broken,
    broken_shard,
    counted,
    full,
    full_shard,
    hashes,
    lost,
    saving,
    short,
    short_metadata,
    short_shard,
    without_us,
)
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import Job, Story, Told, digest

pytest.importorskip("accelerate")


stage = staged("accelerate", "torch.distributed.fsdp", "distckpt.integrations.accelerate", "distckpt.payloads.accelerator")


def prepared(rank: int, kind: str = "ddp") -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(**settings_of(kind))
    wanted = {"fsdp2": ("FSDP",), "fsdp-full": ("FSDP",), "deepspeed": ("DEEPSPEED",)}.get(kind, ("MULTI_CPU", "NO"))
    assert str(accelerator.distributed_type).endswith(wanted), accelerator.distributed_type
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    torch.manual_seed(rank)
    return accelerator, model, optimizer, scheduler


def train(rank: int, world: int, job: Job) -> Told:
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, model, optimizer, scheduler = prepared(rank, job.extra.get("kind", "ddp"))
    memory.LARGE = 1  # what is small here is large elsewhere, and written behind the training

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        scheduler.step()

    def end(started: int) -> Told:
        if hasattr(model, "save_checkpoint"):
            assert model.zero_optimization_stage() == 2
        state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        return Told(started, digest([state, scheduler.state_dict(), torch.get_rng_state()]))

    if not job.root:
        for _ in range(job.steps):
            step()
        return end(0)
    with distckpt.CheckpointManager(job.root, save_every=job.every, keep_last=job.keep_last, seams=job.seams) as manager:
        checkpoints = Checkpointing(accelerator, manager)
        started = done = checkpoints.restore() or 0
        while done < job.steps:
            if checkpoints.poll(done).save:
                checkpoints.save(done, background=job.background)
            step()
            done += 1
        behind = job.background and started < job.steps - job.every
        if behind and hasattr(model, "save_checkpoint"):  # ZeRO's shards as well are copied and written behind
            assert len(checkpoints._state._memory._arenas) == (2 if rank else 3)
        checkpoints.save(done, on_exists="skip")
    return end(started)


@pytest.mark.xdist_group("accelerate")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
def test_B42_story(stage: Stage, tmp_path: Path, background: bool) -> None:
    for kind in ("ddp", "fsdp2"):
        story = Story(stage, train, tmp_path / kind, extra={"kind": kind})
        plain = story.plain()
        if kind == "ddp":
            story.whole(plain, background)
        else:
            story.saved(plain, background)
            story.killed_thrice(plain, background)


ALL_RANKS: Faults = {  # what Accelerate itself writes, whatever the strategy
    5: (1, partial(saving, "random_states", lost), "wrote nothing into this file"),
    6: (0, partial(saving, "scheduler", short), "the archive is cut off"),
}
SHARD = {"ddp": "random_states_1", "fsdp2": "__1_0.distcp", "deepspeed": "zero_pp_rank_1"}
"""A file of rank 1's."""
FAULTS: dict[str, Faults] = {
    "ddp": {
        2: (1, partial(saving, "random_states", full), "No space left"),
        3: (0, partial(saving, "optimizer", broken), "a bug in the framework"),
        4: (1, partial(saving, "random_states", short), "the archive is cut off"),
        **ALL_RANKS},
    "fsdp2": {
        2: (1, full_shard, "No space left"),
        3: (1, broken_shard, "a bug in the framework"),
        4: (1, partial(short_shard, 3), "the archive is cut off"),
        **ALL_RANKS},
    "deepspeed": {  # by DeepSpeed's own checkpoint engine, which calls torch.save
        2: (1, partial(saving, SHARD["deepspeed"], full), "No space left"),
        3: (1, partial(saving, SHARD["deepspeed"], broken), "a bug in the framework"),
        4: (1, partial(saving, SHARD["deepspeed"], short), "the archive is cut off"),
        **ALL_RANKS},
}


def faults(rank: int, world: int, root: str, background: bool, kind: str = "ddp") -> dict[str, Any]:
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, model, optimizer, _ = prepared(rank, kind)
    memory.LARGE = 1
    disk = FaultyFiles(REAL)
    told: dict[str, Any] = {}
    with distckpt.CheckpointManager(root, keep_last=2, seams=Seams(files=disk)) as manager:
        checkpoints = Checkpointing(accelerator, manager)

        def save(step: int) -> SaveError | None:
            try:
                checkpoints.save(step, background=background)
                manager.wait()
            except SaveError as error:
                return error
            return None

        assert save(1) is None
        before = hashes(f"{root}/step-1")
        for step, (who, fault, text) in FAULTS[kind].items():
            with fault() if who == rank else nullcontext():
                error = save(step)
            assert error is not None and text in str(error.failures.get(who)), (step, error)
            assert isinstance(error, DiskFull) == ("No space" in text), error
            told.setdefault("wrongly blamed", {}).update({step: str(error)} if list(error.failures) != [who] else {})
        if rank == 1:
            disk.faults.append(fail(errno.ENOSPC, op=("fsync", "fsync_file"), path=SHARD[kind]))
        error = save(7)
        assert isinstance(error, DiskFull) and list(error.failures) == [1] and (rank == 0 or disk.faults[0].fired)
        assert manager.all_steps() == [1] and hashes(f"{root}/step-1") == before
        disk.faults.clear()
        assert save(8) is None
        told["steps"] = manager.all_steps()
        told["left"] = sorted(os.listdir(root))
    return told


@pytest.mark.xdist_group("accelerate")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_B133_what_goes_wrong_in_accelerates_writer_on_one_rank_ends_the_save_on_all(
        stage: Stage, tmp_path: Path, kind: str, background: bool) -> None:
    """ENOSPC, an exception, a file that is short although the writer said nothing, a rank's random states that are missing: each
    is that rank's failure on every rank, the checkpoint before it stays, and the next save works."""
    for told in stage.values(2, faults, str(tmp_path / "root"), background, kind):
        if kind != "fsdp2" or not background:  # test_a_rank_that_another_ended_is_not_blamed
            assert told["wrongly blamed"] == {}
        assert told["steps"] == [1, 8]
        assert [name for name in told["left"] if name.startswith("step-")] == ["step-1", "step-8"]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("distckpt-scratch-") and os.stat(
        f"/dev/shm/{name}").st_mtime > (tmp_path / "root").stat().st_ctime]


def blames(rank: int, world: int, root: str) -> list[int]:
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, *_ = prepared(rank, "fsdp2")
    with distckpt.CheckpointManager(root) as manager, broken_shard() if rank == 1 else nullcontext():
        with pytest.raises(SaveError, match="a bug in the framework") as caught:
            Checkpointing(accelerator, manager).save(1, background=True)
            manager.wait()
        return list(caught.value.failures)


@pytest.mark.xdist_group("accelerate")
def test_a_rank_that_another_ended_is_not_blamed(stage: Stage, tmp_path: Path) -> None:
    """A background save of FSDP2 by Accelerate, or Trainer: DCP's collectives run while it is staged."""
    assert stage.values(2, blames, str(tmp_path / "root")) == [[1], [1]]


def believed(rank: int, world: int, root: str, background: bool) -> list[str]:
    """Of DCP's files that are short although it said nothing: which were committed."""
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, *_ = prepared(rank, "fsdp2")
    committed = []
    with distckpt.CheckpointManager(root) as manager:
        checkpoints = Checkpointing(accelerator, manager)
        for step, (who, what, fault) in enumerate([(1, "half a shard", partial(short_shard, 0.5)),
                                                   (0, "no end of .metadata", short_metadata)]):
            with fault() if rank == who else nullcontext(), suppress(SaveError):
                checkpoints.save(step, background=background)
                manager.wait()
                committed.append(what)
    return committed


@pytest.mark.xdist_group("accelerate")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
def test_B89_dcps_word_is_not_taken_for_files_that_are_short(stage: Stage, tmp_path: Path, background: bool) -> None:
    for committed in stage.values(2, believed, str(tmp_path / "root"), background):
        assert committed == []


def stranded(rank: int, world: int, root: str) -> None:
    """FULL_STATE_DICT: rank 0 writes the model by torch.save, and then all gather the optimizer. And an Accelerator as the model
    of a TrainState."""
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, model, _, _ = prepared(rank, "fsdp-full")
    with distckpt.CheckpointManager(root) as manager:
        checkpoints = Checkpointing(accelerator, manager)
        with saving("pytorch_model_fsdp", full), pytest.raises(DiskFull) as told:
            checkpoints.save(1)
        assert list(told.value.failures) == [0]
        checkpoints.save(2)
        assert manager.all_steps() == [2]
        progress = {"epoch": 3}
        state = distckpt.TrainState(model=accelerator, progress=progress)
        for step, background in ((3, False), (4, True)):
            manager.save(step, state, background=background)
            manager.wait()
            before = digest([parameter.full_tensor() for parameter in model.parameters()])
            progress["epoch"] = 0
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            assert manager.restore(state) == step and progress == {"epoch": 3}
            assert digest([parameter.full_tensor() for parameter in model.parameters()]) == before


@pytest.mark.xdist_group("accelerate")
def test_a_writer_that_fails_before_the_others_collectives_does_not_strand_them(stage: Stage, tmp_path: Path) -> None:
    stage.values(2, stranded, str(tmp_path / "root"), limit=40)


class Position:
    """Something of the user's that must come back."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def kept(rank: int, world: int, root: str) -> dict[str, Any]:
    """Twelve saves in a root where something else stands; each file is the one that Accelerate wrote, and once: the real writers
    were called for it, and nothing of ours serialised."""
    from accelerate.utils import other

    from distckpt.integrations.accelerate import Checkpointing

    accelerator, model, optimizer, _ = prepared(rank)
    position = Position(10 * rank)
    accelerator.register_for_checkpointing(position)
    accelerator.backward(model(torch.randn(4, 8)).square().mean())
    optimizer.step()
    memory.LARGE = 1
    disk = FaultyFiles(REAL)
    mine = [f"random_states_{rank}.pkl", *(["custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "scheduler.bin"]
                                          if rank == 0 else [])]
    late = [f"random_states_{rank}.pkl", *(["optimizer.bin"] if rank == 0 else [])]
    with distckpt.CheckpointManager(root, keep_last=2, seams=Seams(files=disk)) as manager:
        checkpoints = Checkpointing(accelerator, manager)
        for step in range(1, 13):
            background = step % 2 == 0
            position.value = 100 * step
            with counted((other, "safe_save_file")) as calls:
                checkpoints.save(step, on_exists="error", background=background)
                now = digest(model.state_dict())
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1)
                manager.wait()
            assert sorted(name for name, *_ in calls) == sorted(mine), calls
            through = [name for name, ours, _ in calls if ours]
            behind = [name for name, ours, place in calls if place.startswith(root) and not ours]
            opened = {os.path.basename(o.path) for o in disk.operations("open", f"/step-{step}/")} - {"commit.json"}
            if background:
                assert sorted(through) == sorted(late) and behind == mine[2:3], calls
            else:
                assert set(through) == opened == set(mine) - {"model.safetensors"}
        with pytest.raises(StepAlreadyExists):
            checkpoints.save(12)
        checkpoints.save(11, on_exists="replace")
        position.value = -1
        assert checkpoints.restore(12) == 12 and position.value == 1200 and digest(model.state_dict()) == now
    return {"model": now}


def theirs(rank: int, world: int, path: str) -> str:
    without_us()
    accelerator, model, _, _ = prepared(rank)
    accelerator.register_for_checkpointing(Position(0))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    accelerator.load_state(path)
    return digest(model.state_dict())


def refused(rank: int, world: int, root: str) -> None:
    """What would have gone wrong in silence: another number of ranks, random states that are not there or do not load."""
    from accelerate.utils import ProjectConfiguration

    from distckpt.errors import IntegrityError
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, *_ = prepared(rank)
    accelerator.register_for_checkpointing(Position(0))
    with distckpt.CheckpointManager(root) as manager:
        checkpoints = Checkpointing(accelerator, manager)
        name = f"{root}/step-12/random_states_1.pkl"
        if world == 1:
            with pytest.raises(WorldMismatch, match="saved by 2 ranks and is loaded by 1"):
                checkpoints.restore()
            torch.manual_seed(1)
            assert Checkpointing(accelerator, manager, on_world_change="reseed").restore() == 12
            first = torch.get_rng_state()
            torch.manual_seed(2)
            Checkpointing(accelerator, manager, on_world_change="reseed").restore()
            assert torch.equal(first, torch.get_rng_state())
            project = accelerator.project_configuration
            for options in ({"automatic_checkpoint_naming": True}, {"total_limit": 2}, {"save_on_each_node": True}):
                accelerator.project_configuration = ProjectConfiguration(project_dir=root, **options)
                with pytest.raises(ConfigError, match="leave"):
                    Checkpointing(accelerator, manager)
            accelerator.project_configuration = project
            with accelerator.accumulate(), pytest.raises(ConfigError, match="in the middle of gradient accumulation"):
                accelerator.gradient_state._set_sync_gradients(False)
                checkpoints.save(13)
        else:
            if rank == 1:
                data = bytearray(Path(name).read_bytes())
                data[len(data) // 2] ^= 1
                Path(name).write_bytes(data)
            torch.distributed.barrier()
            with pytest.raises(IntegrityError, match="random_states_1"):
                checkpoints.restore()


@pytest.mark.xdist_group("accelerate")
def test_B65_B75_B82_B136_B140_accelerates_files_ours_to_name_keep_and_refuse(stage: Stage, tmp_path: Path) -> None:
    """Twelve saves leave the last two (10 after 9), a stray folder disturbs nobody, one rank deletes, a step that is there is
    told; custom objects come back; Accelerate alone reads what was committed; what it would pass over at INFO is an error."""
    root = tmp_path / "root"
    (root / "notes").mkdir(parents=True)
    ran = stage.values(2, kept, str(root))
    assert sorted(p.name for p in root.iterdir() if not p.name.startswith(".")) == ["latest", "notes", "step-11", "step-12"]
    assert stage.values(2, theirs, str(root / "step-12")) == [told["model"] for told in ran]
    stage.values(1, refused, str(root))
    stage.values(2, refused, str(root))
