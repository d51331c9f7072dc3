"""Lightning: checkpoints of a ``Trainer``, whatever its strategy, that exist only when every rank's bytes are durable.

    checkpointing = Checkpointing("runs/gpt", save_every=500, keep_last=3, background=True)
    trainer = Trainer(callbacks=[checkpointing], ...)
    trainer.fit(model, data, ckpt_path=checkpointing.ckpt_path)

Started again, the same lines go on from the newest checkpoint. It needs the package ``lightning``, not ``pytorch_lightning``.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from distckpt.durable import REAL, Files
from distckpt.errors import ConfigError
from distckpt.layout import HOME, MARKER, series_of
from distckpt.manager import CheckpointManager
from distckpt.ordered import unlink_if_there
from distckpt.payloads.base import Ranks
from distckpt.payloads.lightning import NAME, Lightning
from distckpt.payloads.rng import Rng
from distckpt.saving.piecewriter import PieceWriter, as_file

log = logging.getLogger(__name__)


class _Decided(os.PathLike[str]):
    """The path that ``fit`` loads. Which one it is, the ranks agree on in ``setup``, when they have met; Lightning takes it
    before that and looks at it after. False when the run starts fresh."""

    def __init__(self) -> None:
        self.path: str | None = None

    def __bool__(self) -> bool:
        return self.path != ""

    def __fspath__(self) -> str:
        if self.path is None:
            raise ConfigError("checkpointing.ckpt_path is known inside fit only, for a trainer that has this callback; elsewhere "
                              "distckpt.open(root).latest() says which checkpoint is the newest")
        return self.path

    __str__ = __fspath__

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Decided, ()) if self.path is None else (str, (self.path,))


class Checkpointing(Checkpoint):
    """A callback that saves into ``root`` by a CheckpointManager, and says what ``fit`` goes on from: ``ckpt_path``.

    ``root``: the directory of the run's checkpoints, with the manager's own arguments as ``options`` (``save_every`` counts
    ``trainer.global_step``); it is made in ``setup``, when Lightning has made the process group, and closed in ``teardown``.
    Or a CheckpointManager that you make and close.
    ``background``: the trainer's state is copied at the step and written behind the training. ``after_validation``: a save
    when validation has ended, too, with ``trainer.callback_metrics`` for ``keep_best``. ``rng``: the random states of every
    rank are kept, which Lightning does not. ``members``: more state of this rank by name, as for ``TrainState``. ``step``,
    ``verify``, ``strict``, ``allow_fresh``: as for ``manager.restore``.

    Saves are made when a batch has ended with an optimizer step, never between accumulated batches, at the last step, and on
    a stop signal, which ends ``fit`` at one step for all ranks (``stopped`` says why): Lightning's own handlers, which run
    collectives and its SLURM requeue where the signal happens to arrive, are taken out for that. With it Lightning adds no
    ModelCheckpoint by itself; one of yours may write beside the root, not into it.

    What the manager raises, ``fit`` raises, on every rank alike.
    """

    def __init__(self, root: str | os.PathLike[str] | CheckpointManager, *, background: bool = False,
                 after_validation: bool = False, rng: bool = True, members: Mapping[str, Any] | None = None,
                 step: int | None = None, verify: str = "size", strict: bool = True, allow_fresh: bool = False,
                 **options: Any) -> None:
        given = isinstance(root, CheckpointManager)
        if given and options:
            raise ConfigError(f"Checkpointing(manager, {next(iter(options))}=...): the manager was made with its options")
        self._given = root if isinstance(root, CheckpointManager) else None
        self._root = "" if isinstance(root, CheckpointManager) else os.fspath(root)
        self._options = options
        self._background, self._after_validation = background, after_validation
        self._members: dict[str, Any] = {**(members or {}), **({"rng": Rng()} if rng else {})}
        self._resume: dict[str, Any] = {"step": step, "verify": verify, "strict": strict, "allow_fresh": allow_fresh}
        self._manager: CheckpointManager | None = None
        self._left: CheckpointManager | None = None
        self._decided = _Decided()
        self._loaded: Lightning | None = None
        self._handlers: dict[int, Any] = {}
        self._seen = -1
        self._whole = False
        self._saved: int | None = None
        self._skipped_validation: Any = None
        self.stopped = ""

    @property
    def ckpt_path(self) -> str:
        """For ``trainer.fit(..., ckpt_path=...)``: the checkpoint that all ranks go on from, or none when the run is fresh."""
        return cast("str", self._decided)

    @property
    def manager(self) -> CheckpointManager:
        """The manager, from the beginning of ``fit``; closed after it, for ``distckpt.launch.finish``."""
        found = self._manager or self._left
        if found is None:
            raise ConfigError("Checkpointing has its manager from the beginning of trainer.fit, in the process where that runs")
        return found

    # -- the beginning and the end of fit ------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:
            self._decided.path = "" if stage == "fit" else self._decided.path
            return
        if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            raise ConfigError("AsyncCheckpointIO says that a file is written when it is not: leave the plugin out, and pass "
                              "Checkpointing(..., background=True)")
        self._handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        self._manager = self._given or CheckpointManager(self._root, **self._options)
        self._seen, self._whole, self._saved, self.stopped = -1, False, None, ""
        self._loaded = Lightning(trainer, self._members)
        self._manager.restore(self._loaded, **self._resume)
        found = self._loaded.found
        self._decided.path = os.path.join(found.path, NAME) if found is not None else ""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._manager is not None:
            self._take_signals()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._manager is None:
            return
        self._refuse_two_owners(trainer)
        self._go_on(trainer)
        self._take_signals()
        self._seen = trainer.global_step
        self._boundary(trainer)

    def _go_on(self, trainer: Trainer) -> None:
        """Lightning has loaded what the ranks agreed on, and nothing else; then this rank's own members follow."""
        assert self._loaded is not None
        found = self._loaded.found
        if found is None:
            return
        given = trainer.ckpt_path
        if given is not self._decided and str(given) != str(self._decided):
            raise ConfigError(f"{self.manager.root} goes on from {found.name}, and fit was given ckpt_path={given!r}: pass "
                              "ckpt_path=checkpointing.ckpt_path (Checkpointing(step=...) goes back to an older one, another "
                              "root starts another run)")
        if trainer.global_step != found.step:
            raise ConfigError(f"{found.name} is of step {found.step}, and the trainer that Lightning loaded from it is at step "
                              f"{trainer.global_step}: was global_step changed by a hook?")
        self._loaded.load(found, Ranks(self.manager.rank, self.manager.world, lambda: None, bool(self._resume["strict"])))

    def _take_signals(self) -> None:
        """Undo what Lightning has put in since ``setup``: a broadcast on the training's process group in the SIGTERM handler of
        one rank, and a save in SLURM's requeue handler (FIELD_CASES B60, B113, B116). ``poll`` then takes over, in its way."""
        if not self.manager.stop_signals or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._handlers.items():
            handler = signal.getsignal(number)
            if before is not None and handler is not before and type(handler).__module__.startswith("lightning."):
                signal.signal(number, before)
                log.info("%s: Lightning's own handler is out; what it would requeue under SLURM, "
                         "sys.exit(distckpt.launch.finish(checkpointing.manager)) after fit does", signal.Signals(number).name)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._manager is not None and not self.stopped and self._saved != trainer.global_step:
            self._save(trainer, on_exists="skip")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """No save and no collective: the other ranks may be anywhere, and the error must not wait for them (FIELD_CASES B51)."""
        manager = self._leave(trainer)
        if manager is not None:
            manager.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        manager = self._leave(trainer) if stage == "fit" else None
        if manager is not None:
            manager.close()

    def _leave(self, trainer: Trainer) -> CheckpointManager | None:
        """The manager, if it is ours to close; the trainer as it was."""
        if self._skipped_validation is not None:
            trainer.limit_val_batches, self._skipped_validation = self._skipped_validation, None
        self._decided.path = None
        manager, self._manager = self._manager, None
        self._left = manager or self._left
        return manager if self._given is None else None

    # -- the steps -----------------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
                           batch_idx: int) -> None:
        """The boundary of a step. Not the start of the next batch: that is fetched by then, and a loader that saves its position
        would leave it out after a resume."""
        self._whole = trainer.global_step != self._seen
        if self._manager is not None and self._whole:
            self._seen = trainer.global_step
            self._boundary(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._manager is not None and self._after_validation and self._whole and not trainer.sanity_checking:
            self._save(trainer, on_exists="replace", metrics=dict(trainer.callback_metrics), background=self._background)

    def _boundary(self, trainer: Trainer) -> None:
        todo = self.manager.poll(self._seen)
        if todo.save or self._seen == trainer.max_steps:
            self._save(trainer, background=self._background and not todo.stop, on_exists="skip")
        if todo.stop:
            self._stop(trainer, todo.reason)

    def _save(self, trainer: Trainer, **options: Any) -> None:
        self.manager.save(trainer.global_step, Lightning(trainer, self._members), **options)
        self._saved = trainer.global_step

    def _stop(self, trainer: Trainer, reason: str) -> None:
        """End ``fit`` here: no minimum and no validation comes first, since a stop signal is followed by a kill."""
        self.stopped = reason
        trainer.should_stop = True
        trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None
        self._skipped_validation, trainer.limit_val_batches = trainer.limit_val_batches, 0
        log.warning("stopping at step %d: %s", trainer.global_step, reason)

    # -- one owner per directory ---------------------------------------------------------------------------------

    def _refuse_two_owners(self, trainer: Trainer) -> None:
        """A ModelCheckpoint has names, limits and deletions of its own, so it may not stand in the root (below it, in a
        directory that is no checkpoint's, it may: default_root_dir and the root are often one)."""
        root, real = self.manager.root, os.path.realpath
        for other in trainer.checkpoint_callbacks:
            if not isinstance(other, ModelCheckpoint) or not other.dirpath:
                continue
            first = os.path.relpath(real(other.dirpath), real(root)).partition(os.sep)[0]
            if first in (".", HOME) or series_of(self.manager._naming, first) is not None:
                raise ConfigError(f"ModelCheckpoint(dirpath={other.dirpath!r}) writes into {root}, whose checkpoints are kept "
                                  "and deleted by distckpt: give it another directory, or leave it out")


class DurableCheckpointIO(TorchCheckpointIO):
    """For ``Trainer(plugins=[DurableCheckpointIO()])``: the single files that Lightning writes on rank 0, ModelCheckpoint's
    above all, are durable before they have their name, in their own directory and not by way of ``/tmp``.

    A kill or a power cut leaves the file as it was before, or whole (FIELD_CASES B08), and every error is raised (B127). A
    file of a checkpoint that distckpt committed is never removed. Sharded strategies do not ask a CheckpointIO.
    """

    def __init__(self, files: Files = REAL) -> None:
        self._files = files

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("DurableCheckpointIO takes no storage_options")
        target = os.path.abspath(os.fspath(path))
        folder, name = os.path.split(target)
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, f".{name}.part")
        unlink_if_there(self._files, temporary)  # of a process that was killed here
        try:
            with PieceWriter(self._files.open(temporary), temporary, None, lambda size: None) as out:
                torch.save(checkpoint, as_file(out))
            self._files.rename(temporary, target)
        except BaseException:  # whatever it was is raised again: only the space goes back
            with suppress(OSError):
                unlink_if_there(self._files, temporary)
            raise
        self._files.fsync_dir(folder)

    def remove_checkpoint(self, path: Any) -> None:
        target = os.path.realpath(os.fspath(path))
        place = target
        while place != os.path.dirname(place):
            if os.path.exists(os.path.join(place, MARKER)):
                raise ConfigError(f"{target} belongs to a checkpoint that distckpt committed; 'distckpt prune' deletes those")
            place = os.path.dirname(place)
        super().remove_checkpoint(path)
