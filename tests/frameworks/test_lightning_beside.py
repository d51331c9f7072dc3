"""Lightning: what else owns signals, files and directories in a trainer, and where it ends."""

from __future__ import annotations

import errno
import glob
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import distckpt
from distckpt.durable import REAL
from distckpt.errors import ConfigError
from distckpt.integrations.lightning import Checkpointing, DurableCheckpointIO
from distckpt.launch import finish
from distckpt.testing.faults import FaultyFiles, Operation, call, fail
from distckpt.testing.forks import alone
from tests.frameworks.lightning_job import Started, the_stage
from tests.frameworks.lightning_nets import Loader, Net, state_of, trainer_of
from tests.frameworks.story import digest

pytestmark = pytest.mark.xdist_group("lightning")

SLURM = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1",
         "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "SLURM_RESTART_COUNT": "0"}


def in_one(target: Callable[..., Any], *args: Any) -> Any:
    """``target(*args)`` in a process of its own, without a process group."""
    return the_stage().values(1, _alone, target, args, init=False)[0]


def _alone(rank: int, world: int, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return target(*args)


def fit(root: object, steps: int, *callbacks: pl.Callback, net: Net | None = None, ckpt_path: Any = None, trainer: Any = None,
        **options: Any) -> tuple[int, str, Checkpointing]:
    """One rank: (the step it went on from, a digest of what it ended with, the callback)."""
    checkpointing = Checkpointing(str(root), **options)
    made = trainer_of("one", 1, steps, started := Started(), *callbacks, checkpointing, **(trainer or {}))
    torch.manual_seed(100)
    made.fit(net or Net(), Loader(0), ckpt_path=ckpt_path or checkpointing.ckpt_path)
    return started.step, digest(state_of(made)), checkpointing


def steps_of(root: object) -> list[int]:
    return [c.step for c in reversed(distckpt.open(str(root)).checkpoints())]


# -- signals -------------------------------------------------------------------------------------------------------------


class _Signal(pl.Callback):
    def __init__(self, number: int) -> None:
        self._number = number

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), self._number)


def _requeued(rank: int, world: int, root: str, folder: str, number: int, restart: int) -> Any:
    os.environ.update(SLURM, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_RESTART_COUNT=str(restart))
    checkpointing = Checkpointing(root, keep_last=2)
    callbacks = [_Signal(number)] if rank == 1 and number else []
    environment = SLURMEnvironment()
    assert environment.auto_requeue, "SLURM's requeue is what Lightning does by default"
    trainer = trainer_of("ddp", world, 60, *callbacks, started := Started(), checkpointing, plugins=[environment],
                         default_root_dir=folder)
    torch.manual_seed(100 + rank)
    trainer.fit(Net(), Loader(rank), ckpt_path=checkpointing.ckpt_path)
    code = finish(checkpointing.manager, "exit")
    assert code == (75 if checkpointing.stopped else 0)
    return started.step, trainer.global_step, checkpointing.stopped, digest(state_of(trainer))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_B60_B113_B116_B117_a_stop_signal_to_one_rank_stops_both_at_one_step_and_the_requeued_job_goes_on(
        number: int, tmp_path: Path) -> None:
    """Lightning would broadcast in the handler of the one rank, and save in it (``hpc_ckpt_1.ckpt``) on SLURM's signal. The root
    is one and the same for the job that comes after."""
    root, folder = str(tmp_path / "root"), str(tmp_path)
    told = the_stage().values(2, _requeued, root, folder, int(number), 0)
    assert told[0][:3] == told[1][:3]
    step = told[0][1]
    assert told[0][0] == 0 and 3 <= step < 60 and told[0][2] == f"{signal.Signals(number).name} on rank 1"
    assert steps_of(root) == [step] and glob.glob(f"{folder}/**/hpc_ckpt*", recursive=True) == []
    again = the_stage().values(2, _requeued, root, folder, 0, 1)
    assert [t[:3] for t in again] == [(step, 60, "")] * 2
    plain = the_stage().values(2, _requeued, str(tmp_path / "plain"), folder, 0, 0)
    assert [t[3] for t in again] == [t[3] for t in plain]


# -- where a save may be -------------------------------------------------------------------------------------------------


class _Validated(Net):
    """Validation gets better until step 4 and worse from there on."""

    def val_dataloader(self) -> Any:
        return [torch.zeros(1)]

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", float(abs(self.global_step - 4)))


class _Polls(pl.Callback):
    """Asks for a save in the middle of an accumulation, and counts what the manager is asked."""

    def __init__(self) -> None:
        self.polled: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        manager = next(c for c in trainer.callbacks if isinstance(c, Checkpointing)).manager
        poll = manager.poll
        manager.poll = lambda step: self.polled.append(step) or poll(step)  # type: ignore[func-returns-value,method-assign]


class _Draws(pl.Callback):
    """Somebody's start uses random numbers, after the ranks have agreed on a checkpoint."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.rand(3)


def _accumulated(root: str) -> Any:
    options = {"accumulate_grad_batches": 2}
    polls = _Polls()
    plain = fit(f"{root}-plain", 7, trainer=options)[1]
    whole = fit(root, 7, polls, trainer=options, save_every=1)
    again = fit(root, 7, _Draws(), trainer=options, step=3, on_exists="skip")
    return plain, whole[:2], again[:2], polls.polled


def test_B136_saves_stand_between_accumulations_and_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """4 batches make 2 steps: 7 steps end inside an epoch, and so does step 3, from which it goes on to the same bits."""
    plain, whole, again, polled = in_one(_accumulated, str(tmp_path / "root"))
    assert whole == (0, plain) and again == (3, plain)
    assert polled == list(range(8)), "polled with gradients half accumulated, or not at every step"


def _best(root: str) -> Any:
    net = _Validated()
    _, _, made = fit(root, 12, net=net, trainer={"max_epochs": 3}, after_validation=True, keep_last=1, keep_best=1,
                     best_metric="val_loss", background=True)
    return made.stopped


def test_keep_best_goes_by_what_validation_said_of_these_weights(tmp_path: Path) -> None:
    """Validation after steps 4, 8 and 12."""
    assert in_one(_best, str(tmp_path / "root")) == ""
    assert [(c.step, dict(c.metrics)) for c in distckpt.open(tmp_path / "root").checkpoints()] == [
        (12, {"val_loss": 8.0}), (4, {"val_loss": 0.0})]


def _ends(root: str) -> Any:
    """By max_epochs, and started again when all is done; then with one more epoch to go."""
    one = fit(root, -1, trainer={"max_epochs": 2})
    same = fit(root, -1, trainer={"max_epochs": 2})
    more = fit(root, -1, trainer={"max_epochs": 3}, keep_last=1)
    quick = fit(f"{root}-quick", 2, trainer={"fast_dev_run": True}, save_every=1)
    return one[0], same[0], more[0], quick[0], os.path.exists(f"{root}-quick")


def test_the_last_step_is_saved_a_run_that_is_done_starts_and_ends_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    assert in_one(_ends, str(tmp_path / "root")) == (0, -1, 8, 0, False)
    assert steps_of(tmp_path / "root") == [12]


# -- owners --------------------------------------------------------------------------------------------------------------


def _refusals(root: str) -> dict[str, str]:
    said: dict[str, str] = {}

    def refused(name: str, run: Callable[[], Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            run()
        said[name] = str(caught.value)

    refused("root", lambda: fit(root, 2, ModelCheckpoint(dirpath=root, every_n_train_steps=1)))
    refused("inside", lambda: fit(root, 2, ModelCheckpoint(dirpath=f"{root}/.distckpt/x", every_n_train_steps=1)))
    assert steps_of(root) == [] and glob.glob(f"{root}/**/*.ckpt", recursive=True) == []
    with pytest.raises(ValueError, match="requires a GPU accelerator"):  # so FSDPStrategy is tested on a mocked one
        pl.Trainer(strategy="fsdp", accelerator="cpu")
    refused("async", lambda: fit(root, 2, trainer={"plugins": [AsyncCheckpointIO()]}))
    fit(root, 2)
    refused("other", lambda: fit(root, 4, ckpt_path=_single(f"{root}-single")))
    checkpointing = Checkpointing(root)
    refused("none", lambda: trainer_of("one", 1, 4, checkpointing).fit(Net(), Loader(0)))
    refused("outside", lambda: str(checkpointing.ckpt_path))
    assert steps_of(root) == [2]
    return said


def _single(folder: str) -> str:
    """A checkpoint that Lightning wrote by itself."""
    trainer = trainer_of("one", 1, 1)
    trainer.fit(Net(), Loader(0))
    trainer.save_checkpoint(f"{folder}/some.ckpt")
    return f"{folder}/some.ckpt"


def test_two_owners_of_a_directory_and_two_starts_of_a_run_are_refused(tmp_path: Path) -> None:
    said = in_one(_refusals, str(tmp_path / "root"))
    for name in ("root", "inside"):
        assert "ModelCheckpoint(dirpath=" in said[name] and "give it another directory" in said[name]
    assert "pass Checkpointing(..., background=True)" in said["async"]
    for name in ("other", "none"):
        assert "goes on from step-2, and fit was given ckpt_path=" in said[name]
    assert "known inside fit only" in said["outside"]


def _beside(folder: str) -> Any:
    """Their files and ours, in one default_root_dir, over two runs."""
    theirs = f"{folder}/root/checkpoints"
    seen = []
    options: dict[str, Any] = {"save_every": 2, "trainer": {"default_root_dir": f"{folder}/root"}}
    for steps in (6, 10):
        other = ModelCheckpoint(dirpath=theirs, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True)
        started = fit(f"{folder}/root", steps, other, keep_last=2, **options)[0]
        seen.append((started, steps_of(f"{folder}/root"), sorted(os.listdir(theirs))))
    warm = fit(f"{folder}/new", 16, ckpt_path=f"{folder}/root/step-10/checkpoint.ckpt", save_every=2, keep_last=1)[0]
    return seen, warm, Path(f"{folder}/root/latest").read_text(), os.path.islink(f"{folder}/root/latest")


def test_B25_B78_B79_a_model_checkpoint_beside_ours_and_limits_after_a_resume(tmp_path: Path) -> None:
    """Each keeps and deletes its own; ours holds its limit after a resume, and of another run's root it deletes nothing."""
    seen, warm, latest, link = in_one(_beside, str(tmp_path))
    assert [(started, ours) for started, ours, _ in seen] == [(0, [4, 6]), (6, [8, 10])]
    assert all(len(theirs) == 3 and "last.ckpt" in theirs for _, _, theirs in seen)
    assert (warm, latest.strip(), link) == (10, "step-10", False)
    assert steps_of(tmp_path / "root") == [8, 10] and steps_of(tmp_path / "new") == [16]


# -- rank 0's own files --------------------------------------------------------------------------------------------------


def _write_io(path: str, value: int, files: Any) -> None:
    DurableCheckpointIO(files).save_checkpoint({"value": torch.full((1000,), value)}, path)


def _killed_io(path: str, at: int) -> None:
    def strike(operation: Operation) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _write_io(path, 2, FaultyFiles(REAL, call(strike, at)))


def test_B08_B127_a_single_file_is_as_it_was_or_whole_and_every_error_is_raised(tmp_path: Path) -> None:
    path = str(tmp_path / "files" / "last.ckpt")
    _write_io(path, 1, counted := FaultyFiles(REAL))
    names = [o.op for o in counted.log]
    assert names[-4:] == ["fsync", "close", "rename", "fsync_dir"]
    for at, op in enumerate(names, 1):
        _write_io(path, 1, REAL)
        assert alone(_killed_io, path, at).killed
        found = int(torch.load(path, weights_only=True)["value"].unique())
        assert found == (2 if op == "fsync_dir" else 1), f"killed at {op}, operation {at}"
        assert set(os.listdir(tmp_path / "files")) <= {"last.ckpt", ".last.ckpt.part"}
    _write_io(path, 1, REAL)
    assert os.listdir(tmp_path / "files") == ["last.ckpt"]
    for number, op in ((errno.EACCES, "open"), (errno.ENOSPC, "write"), (errno.EIO, "fsync"), (errno.EACCES, "rename")):
        with pytest.raises(OSError) as caught:
            _write_io(path, 2, FaultyFiles(REAL, fail(number, op=op)))
        assert caught.value.errno == number and int(torch.load(path, weights_only=True)["value"].unique()) == 1
        assert os.listdir(tmp_path / "files") == ["last.ckpt"], "a failed write keeps its space"


def _with_io(folder: str) -> Any:
    """It writes ModelCheckpoint's files and the one in the attempt, and never removes what was committed."""
    plugin = DurableCheckpointIO()
    other = ModelCheckpoint(dirpath=f"{folder}/theirs", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    _, final, _ = fit(f"{folder}/root", 4, other, save_every=2, keep_last=1, trainer={"plugins": [plugin]})
    with pytest.raises(ConfigError, match="distckpt committed"):
        plugin.remove_checkpoint(f"{folder}/root/step-4/checkpoint.ckpt")
    with suppress(FileNotFoundError):
        plugin.remove_checkpoint(f"{folder}/theirs/none.ckpt")
    return final, sorted(os.listdir(f"{folder}/theirs")), sorted(os.listdir(f"{folder}/root/step-4"))


def test_the_durable_checkpoint_io_in_a_trainer(tmp_path: Path) -> None:
    _, theirs, ours = in_one(_with_io, str(tmp_path))
    assert theirs == ["epoch=0-step=4.ckpt"]
    assert ours == ["checkpoint.ckpt", "commit.json", "members.rank-00000-of-00001.pt"]
