"""Lightning: whatever fails in a save fails on every rank, names its rank, and costs nothing that was there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint import FileSystemWriter

from distckpt import Timeouts
from distckpt.checkpoint import Checkpoint
from distckpt.errors import RankTimeout, SaveError
from distckpt.integrations.lightning import Checkpointing
from distckpt.payloads.base import Ranks
from distckpt.payloads.lightning import Lightning
from distckpt.payloads.rng import Rng
from distckpt.saving.files import RankFiles
from tests.frameworks.lightning_job import Gpu, the_stage
from tests.frameworks.lightning_nets import Loader, Net, Sharded, net_of, trainer_of

pytestmark = pytest.mark.xdist_group("lightning")

Patch = Callable[[int], AbstractContextManager[Any]]


def _io(after: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Lightning's single-file writer, and then ``after(path)``."""
    write = TorchCheckpointIO.save_checkpoint

    def save(self: TorchCheckpointIO, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        write(self, checkpoint, path, storage_options)
        after(str(path))

    return mock.patch.object(TorchCheckpointIO, "save_checkpoint", save)


def _dcp(after: Callable[[str], None]) -> AbstractContextManager[Any]:
    """The part of DCP's writer that every rank runs, and then ``after(path)`` of this rank's file."""
    write = FileSystemWriter.write_data

    def write_data(self: FileSystemWriter, plan: Any, planner: Any) -> Any:
        future = write(self, plan, planner)
        after(os.path.join(self.path, future.wait()[0].storage_data.relative_path))
        return future

    return mock.patch.object(FileSystemWriter, "write_data", write_data)


def _full(path: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", path)


def _broken(path: str) -> None:
    raise ValueError("the writer is broken")


def _cut(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def _hook(rank: int) -> AbstractContextManager[Any]:
    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        if rank == 1:
            raise KeyError("the hook is broken")

    return mock.patch.object(Net, "on_save_checkpoint", on_save_checkpoint)


def _denied(rank: int) -> AbstractContextManager[Any]:
    """FIELD_CASES B127: Lightning's atomic writer takes a PermissionError for another one and drops it."""
    return mock.patch.object(LocalFileSystem, "open", side_effect=PermissionError(errno.EACCES, "Permission denied"))


def _meta(rank: int) -> AbstractContextManager[Any]:
    save = torch.save

    def broken(value: Any, file: Any, *args: Any, **options: Any) -> None:
        if str(file).endswith("meta.pt"):
            _full(str(file))
        save(value, file, *args, **options)

    return mock.patch.object(torch, "save", broken)


@contextmanager
def _one_name(rank: int) -> Iterator[None]:
    """FIELD_CASES B35, B36: DCP's coordinator gives all ranks the prefix of rank 0; their shards differ in size."""
    plan = FileSystemWriter.prepare_global_plan

    def prepare_global_plan(self: FileSystemWriter, plans: list[Any]) -> list[Any]:
        planned = plan(self, plans)
        return [replace(one, storage_data=planned[0].storage_data) for one in planned]

    with mock.patch.object(FileSystemWriter, "prepare_global_plan", prepare_global_plan):
        yield


class _Orders:
    """A file of the user's own beside the trainer's, of one name on all ranks (FIELD_CASES B35, B36)."""

    collective = False
    members: list[str] = []

    def check(self) -> None: ...

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        Path(files.claim("prefetch_orders.json")).write_text("[]" * (1 + ranks.rank))

    def tree(self) -> Any:
        return {}

    def of(self, tree: Any) -> _Orders:
        return self

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None: ...


# For each: what goes wrong, on which rank it does, and a part of what every rank is told.
FAULTS: dict[str, list[tuple[str, Patch, int, str]]] = {
    "ddp": [
        ("full disk", lambda rank: _io(_full), 0, "the disk is full on rank 0"),
        ("writer raises", lambda rank: _io(_broken), 0, "the writer is broken"),
        ("short file", lambda rank: _io(_cut), 0, "reported success and the archive is cut off"),
        ("B127", _denied, 0, "Lightning reported success and wrote nothing"),
        ("hook raises", _hook, 1, "the hook is broken"),
    ],
    "fsdp2": [
        ("full disk", lambda rank: _dcp(_full) if rank == 1 else nullcontext(), 1, "the disk is full on rank 1"),
        ("writer raises", lambda rank: _dcp(_broken) if rank == 1 else nullcontext(), 1, "the writer is broken"),
        ("short file", lambda rank: _dcp(_cut) if rank == 1 else nullcontext(), -1, "__1_0.distcp'"),
        ("meta.pt", _meta, 0, "the disk is full on rank 0"),
        ("hook raises", _hook, 1, "the hook is broken"),
    ],
}


for _faults in FAULTS.values():
    _faults.append(("one path", lambda rank: nullcontext(), -1, "ranks 0 and 1 both wrote 'orders/prefetch_orders.json'"))
FAULTS["fsdp2 one name"] = [("one name", _one_name, -1, "ranks 0 and 1 both wrote 'checkpoint.ckpt/__0_0.distcp'")]
FAULTS["fsdp1"] = FAULTS["fsdp2"]  # both strategies write by DCP, and their meta.pt by torch.save


class _Attempts(pl.Callback):
    """After step 1, a good save. After each further step, a save that must fail, synchronous and in the background."""

    def __init__(self, rank: int, root: str, kind: str, checkpointing: Checkpointing) -> None:
        self._rank, self._root, self._kind, self._checkpointing = rank, root, kind, checkpointing
        self.told: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *ignored: Any) -> None:
        step, manager = trainer.global_step, self._checkpointing.manager
        state = Lightning(trainer, {"rng": Rng()})
        if step == 1 or step == len(FAULTS[self._kind]) + 2:
            manager.save(step, state, background=step > 1)
            return
        name, patch, _, _ = FAULTS[self._kind][step - 2]
        given: Any = {"trainer": state, "orders": _Orders()} if name == "one path" else state
        for background in (False, True):
            with patch(self._rank):
                try:
                    manager.save(step, given, background=background)
                    manager.wait()
                except SaveError as error:
                    self.told.append((type(error).__name__, error.outcome, sorted(error.failures), str(error)))
            standing = sorted(name for name in os.listdir(self._root) if name.startswith("step-"))
            assert standing == ["step-1"], f"{standing} after a save that failed"


def _failing(rank: int, world: int, root: str, faults: str) -> list[Any]:
    checkpointing = Checkpointing(root, keep_last=1, on_exists="skip")
    attempts = _Attempts(rank, root, faults, checkpointing)
    steps, kind = len(FAULTS[faults]) + 2, faults.partition(" ")[0]
    mocked = [Gpu()] if kind == "fsdp1" else []
    trainer = trainer_of(kind, world, steps, attempts, checkpointing, *mocked)
    trainer.fit(net_of(kind), Loader(rank, 99), ckpt_path=checkpointing.ckpt_path)
    return attempts.told


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1", "fsdp2 one name"])
def test_B63_B127_a_save_that_fails_on_one_rank_fails_on_both_and_the_one_before_stays(kind: str, tmp_path: Path) -> None:
    """With ``keep_last=1``: nothing is rotated for a save that is not committed. Nobody waits in a barrier for the failing rank
    (``trainer.save_checkpoint`` ends in one), and the next save works."""
    root = tmp_path / "root"
    told = the_stage().values(2, _failing, str(root), kind, limit=90.0)
    assert told[0] == told[1] and len(told[0]) == 2 * len(FAULTS[kind])
    for index, (name, _, rank, text) in enumerate(FAULTS[kind]):
        for kind_of_error, outcome, ranks, message in told[0][2 * index:2 * index + 2]:
            assert outcome == "aborted" and text in message, f"{name}: {message}"
            assert rank < 0 or ranks == [rank], f"{name}: {message}"
            assert (kind_of_error == "DiskFull") == ("disk is full" in text)
    assert [p.name for p in root.iterdir() if p.name.startswith("step-")] == [f"step-{len(FAULTS[kind]) + 2}"]
    assert list((root / ".distckpt" / "staging").glob("*/*")) == []


class _Raises(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_step == 3:
            raise ValueError("only here")


def _one_raises(rank: int, world: int, root: str) -> None:
    checkpointing = Checkpointing(root, save_every=2, keep_last=2, background=True)
    trainer = trainer_of("ddp", world, 9, checkpointing, *([_Raises()] if rank == 1 else []))
    trainer.fit(Net(), Loader(rank, 99), ckpt_path=checkpointing.ckpt_path)


def test_B51_an_error_of_one_rank_is_raised_there_at_once_and_nobody_saves_for_it(tmp_path: Path) -> None:
    ends = the_stage().run(2, _one_raises, str(tmp_path / "root"), limit=40.0)
    assert (ends[1].error, ends[1].text) == ("ValueError", "only here") and ends[0].error
    assert sorted(p.name for p in (tmp_path / "root").iterdir()) == [".distckpt", "latest", "step-2"]


def _behind(rank: int, world: int, root: str) -> Any:
    """The writer of step 2 is broken; what ``fit`` raises, and at which step."""
    checkpointing = Checkpointing(root, save_every=2, background=True)
    trainer = trainer_of("ddp", world, 50, checkpointing)
    with (_io(_broken) if rank == 0 else nullcontext()), pytest.raises(SaveError, match="the writer is broken") as caught:
        trainer.fit(Net(), Loader(rank, 99), ckpt_path=checkpointing.ckpt_path)
    return caught.value.step, sorted(caught.value.failures), trainer.global_step


def test_a_failed_background_save_ends_fit_on_every_rank_at_the_same_step(tmp_path: Path) -> None:
    told = the_stage().values(2, _behind, str(tmp_path / "root"))
    assert told[0] == told[1] and told[0][:2] == (2, [0]) and 2 < told[0][2] < 50


class _OnRank0(pl.Callback):
    """Saves under ``if trainer.is_global_zero``, while the others train on."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        self._checkpointing = checkpointing
        self.told: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, *ignored: Any) -> None:
        if trainer.global_step == 2:
            if trainer.is_global_zero:
                with pytest.raises(RankTimeout, match="every rank must make this call") as caught:
                    self._checkpointing.manager.save(2, Lightning(trainer, {}))
                self.told = sorted(caught.value.missing)
            dist.barrier()


def _one_saves(rank: int, world: int, root: str, kind: str) -> None:
    checkpointing = Checkpointing(root, timeouts=Timeouts(arrive=1.0))
    lone = _OnRank0(checkpointing)
    trainer = trainer_of(kind, world, 3, lone, checkpointing)
    try:
        trainer.fit(Sharded() if kind == "fsdp2" else Net(), Loader(rank), ckpt_path=checkpointing.ckpt_path)
    finally:
        assert lone.told == ([1] if rank == 0 else None)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_B49_a_save_that_one_rank_makes_alone_names_the_others_and_strands_nobody(kind: str, tmp_path: Path) -> None:
    """The others are told at their next save, and the run ends on every rank."""
    ends = the_stage().run(2, _one_saves, str(tmp_path / "root"), kind, limit=40.0)
    assert ends[1].error == "RankTimeout" and "save of step 2: no word for 1 s in phase 'save' from rank 1" in ends[1].text
    assert ends[0].error == "RankLost" and not list((tmp_path / "root").glob("step-*"))
