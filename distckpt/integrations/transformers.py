"""Transformers' Trainer: ``class MyTrainer(CrashSafe, Trainer)``, and its checkpoints exist only when they are whole.

The Trainer writes its own files and decides when; where they go until every rank's are durable, who renames, what is
deleted and what a run resumes from is decided here. ``output_dir`` is the root, ``checkpoint-{step}`` the names.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HubStrategy

from distckpt.checkpoint import Checkpoint
from distckpt.errors import ConfigError, MemberMissing, WorldMismatch
from distckpt.layout import HOME, Naming
from distckpt.leases import Lease
from distckpt.manager import CheckpointManager
from distckpt.payloads.deepspeed import check_world, writing_late
from distckpt.payloads.framework import FrameworkFiles, Held
from distckpt.payloads.memory import Memory
from distckpt.reader import open_root
from distckpt.retention import KeepAll, KeepTotal, Policy

log = logging.getLogger(__name__)

_NAMING = "checkpoint-{step}"
_BEST = "best_step"
_STATE = "trainer_state.json"
_MODEL_ONLY = "save_only_model"
# What this class overrides or calls: a Trainer without one of them would save or delete behind its back.
_NEEDED = ("_save_checkpoint", "_get_output_dir", "_finalize_training", "_push_from_checkpoint", "_finish_current_push", "_save",
           "_save_scaler", "_save_rng_state", "_save_optimizer_and_scheduler")
AUTO = "auto"


class CrashSafe(Trainer):  # type: ignore[misc]
    """A mixin, first of the bases: ``class MyTrainer(CrashSafe, Trainer)``.

    TrainingArguments keep their meaning. ``train(resume_from_checkpoint=True)`` goes on from the newest whole checkpoint, or
    raises as Trainer does when there never was one; ``"auto"`` starts fresh then. A stop signal, or a save that ``poll`` asks
    for, is answered by every rank at the same step. ``train`` is collective; it raises what CheckpointManager, ``resume`` and
    ``save`` raise, on every rank alike.

    ``background_saves``: what the Trainer writes goes to memory, as a copy of the large states and in small files (those to
    ``scratch``, a directory, if given), and training goes on while it goes to disk.
    ``allow_world_change``: resume at another number of processes, where random states of old ranks do not fit and the new ones
    keep their seeds. ``manager_options``: more keyword arguments for CheckpointManager.
    """

    background_saves = False
    scratch: str | None = None
    allow_world_change = False
    manager_options: Mapping[str, Any] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        lacking = [name for name in _NEEDED if not hasattr(Trainer, name)]
        if lacking:
            raise ConfigError(f"this version of transformers has no Trainer.{lacking[0]}, which CrashSafe builds on: use "
                              "transformers 5.24 or newer, or save through manager.saving in a loop of your own")
        super().__init__(*args, **options)
        self.manager: CheckpointManager | None = None
        self._into: str | None = None
        self._held: Held | None = None
        self._memory: Memory | None = None
        self._unpushed = False
        self._leases: list[Lease] = []
        self._saved: dict[int, int | None] = {}
        self._check_arguments()
        self.add_callback(Poll(self))
        for pattern in (HOME, f"{HOME}/*", f"*/{HOME}", f"*/{HOME}/*"):
            if pattern not in DEFAULT_IGNORE_PATTERNS:
                DEFAULT_IGNORE_PATTERNS.append(pattern)  # of every upload of a folder, as for .git

    def _check_arguments(self) -> None:
        args = self.args
        if args.enable_jit_checkpoint:
            raise ConfigError("enable_jit_checkpoint=True saves by a timer of each rank's own, at steps that may differ: leave "
                              "it out, CrashSafe answers SIGTERM at one step for all ranks")
        if self.background_saves and args.push_to_hub and args.hub_strategy != HubStrategy.END:
            raise ConfigError("background_saves=True with push_to_hub: a checkpoint is pushed once it is committed, and a "
                              "background save is not when training goes on: say hub_strategy='end', or background_saves=False")

    # -- the run -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None,
              ignore_keys_for_eval: list[str] | None = None) -> Any:
        """As Trainer's. Collective: every rank, with the same arguments."""
        if trial is not None:
            raise ConfigError("a hyperparameter search runs many runs in one output_dir, and a root belongs to one: use Trainer "
                              "itself for the search")
        options = {"naming": _NAMING, "retention": _policy(self.args), **self.manager_options}
        with CheckpointManager(self.args.output_dir, **options) as manager:
            self.manager, self._memory = manager, Memory()
            try:
                self._one_writer()
                start = self._start(resume_from_checkpoint)
                return super().train(resume_from_checkpoint=start, trial=None, ignore_keys_for_eval=ignore_keys_for_eval)
            finally:
                self.manager = self._memory = None
                self._release()

    def _running(self) -> CheckpointManager:
        if self.manager is None:
            raise ConfigError("CrashSafe saves checkpoints inside train() only; save_model() writes a model anywhere")
        return self.manager

    def _one_writer(self) -> None:
        manager = self._running()
        if (self.args.process_index, self.args.world_size) != (manager.rank, manager.world):
            raise ConfigError(f"the Trainer calls this process rank {self.args.process_index} of {self.args.world_size}, the "
                              f"manager rank {manager.rank} of {manager.world}: start it with torchrun, srun or deepspeed")
        if self.args.save_on_each_node and manager.hosts > 1:
            raise ConfigError(f"save_on_each_node=True is for disks of each node's own, and all {manager.hosts} hosts share "
                              f"{manager.root}, where every node would write the same names: leave it out")

    def _start(self, asked: str | bool | None) -> str | None:
        """The directory that the Trainer resumes from, for what ``train`` was asked."""
        manager = self._running()
        if asked is None or asked is False:
            return None
        if asked is True or asked == AUTO:
            found = manager.resume()
            if found.checkpoint is None and asked is True:
                raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir}): nothing was ever "
                                 "committed there. Say resume_from_checkpoint='auto' to start fresh in that case")
        else:
            step = self._step_of(str(asked))
            if step is None:
                return str(asked)  # of another directory: a start from its weights, as Trainer does it
            found = manager.resume(step=step)
        if found.checkpoint is None:
            return None
        self._check_world(found.checkpoint)
        return found.checkpoint.path

    def _check_world(self, checkpoint: Checkpoint) -> None:
        """Trainer goes on without a rank's random states, and says so at INFO."""
        world = self.args.world_size
        if checkpoint.meta.get(_MODEL_ONLY):
            log.warning("%s was saved with save_only_model: optimizer, scheduler and random states start anew", checkpoint.name)
            return
        check_world(checkpoint, world)
        if checkpoint.world != world:
            if not self.allow_world_change:
                raise WorldMismatch(f"{checkpoint.name} was saved by {checkpoint.world} ranks and is resumed by {world}: random "
                                    "states and the order of data are per rank. Resume with as many, or set "
                                    "allow_world_change = True", step=checkpoint.step, saved=checkpoint.world, now=world)
            log.warning("%s was saved by %d ranks and is resumed by %d: random states and the order of data change",
                        checkpoint.name, checkpoint.world, world)
            return
        missing = [name for name in (_rng_name(rank, world) for rank in range(world)) if not checkpoint.has(name)]
        if missing:
            raise MemberMissing(f"{checkpoint.name} has no {missing[0]}: that rank's random states were never saved, and Trainer "
                                "would go on with others", step=checkpoint.step, members=missing)

    def _step_of(self, path: str | None) -> int | None:
        """The step of a checkpoint of this root, by its path; None for another path."""
        if path is None:
            return None
        folder, name = os.path.split(os.path.realpath(path))
        return Naming.parse(_NAMING).step_of(name) if folder == os.path.realpath(self.args.output_dir) else None

    # -- saving --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Trainer's own, into an attempt; collective. Returns when it is committed, or staged in memory."""
        manager, step = self._running(), self.state.global_step
        self._name_best(step)
        best = self._step_of(self.state.best_model_checkpoint)
        pushed = self.args.push_to_hub  # what is being uploaded must stay as it is
        again = "skip" if step in self._saved and (pushed or self._saved[step] == best) else "replace"

        def write(directory: str, held: Held) -> None:
            self._into, self._held, self._unpushed = directory, held, False
            best_path = self.state.best_model_checkpoint
            try:
                with writing_late(self.model_wrapped, held) if self.is_deepspeed_enabled else nullcontext():
                    super(CrashSafe, self)._save_checkpoint(model, trial)
            finally:
                self._into = self._held = None
            if self.state.best_model_checkpoint != best_path:  # it looked where it was writing
                self.state.best_model_checkpoint = best_path
                if self.args.should_save:
                    held.run(self.state.save_to_json, os.path.join(directory, self._name(step), _STATE))

        only = self.args.save_only_model
        files = FrameworkFiles(write, inside=self._name(step), scratch=self.scratch, memory=self._memory,
                               owed=[] if only else [_rng_name(self.args.process_index, self.args.world_size)])
        handle = manager.save(step, files, metrics=self._metrics(step, best), meta={_MODEL_ONLY: True} if only else None,
                              background=self.background_saves, on_exists=again)
        self._saved[step] = best
        if self._unpushed and not handle.skipped:
            self._push_from_checkpoint(os.path.join(self.args.output_dir, self._name(step)))

    def _name_best(self, step: int) -> None:
        """What Trainer's own does by looking whether a directory is there: this knows what was saved."""
        best = self.state.best_global_step
        if best and self.args.save_strategy != "no" and (best == step or best in self._saved):
            self.state.best_model_checkpoint = os.path.join(self.args.output_dir, self._name(best))

    def _metrics(self, step: int, best: int | None) -> dict[str, float]:
        found = {key: value for entry in self.state.log_history if entry.get("step") == step for key, value in entry.items()
                 if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
                 and key not in ("step", "epoch")}
        return {**found, _BEST: best} if best is not None else found

    def forget_saves(self) -> None:
        """Training begins, and with ``auto_find_batch_size`` perhaps again from the first step."""
        self._saved = {}

    @staticmethod
    def _name(step: int) -> str:
        return _NAMING.format(step=step)

    def _get_output_dir(self, trial: Any) -> str:
        found: str = self._into if self._into is not None else super()._get_output_dir(trial)
        return found

    # Between these and the end of the save the other ranks may stand in a barrier: an error of one waits until then.

    def _kept(self, write: Any, *args: Any, **options: Any) -> None:
        if self._held is None:
            write(*args, **options)
        else:
            self._held.run(write, *args, **options)

    def _save(self, *args: Any, **options: Any) -> None:
        self._kept(super()._save, *args, **options)

    def _save_scaler(self, output_dir: str) -> None:
        self._kept(super()._save_scaler, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self._kept(super()._save_rng_state, output_dir)

    # -- the end, and the Hub ------------------------------------------------------------------------------------

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Trainer's own deletes checkpoints here, when ``save_total_limit`` is 1, by its own list."""
        self._running().wait()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **options)
        finally:
            self.args.save_total_limit = limit

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """After the commit, from the committed directory, which rotation leaves alone until the push has ended. Rank 0 pushes."""
        if self._into is not None:
            self._unpushed = True
            return
        step = self._step_of(checkpoint_folder)
        if not self.is_world_process_zero() or step is None or self.args.hub_strategy == HubStrategy.END:
            return
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self._release()
        root = open_root(self.args.output_dir)
        self._leases.append(root.lease(next(c for c in root.checkpoints() if c.step == step), "push to the Hub"))
        super()._push_from_checkpoint(checkpoint_folder)

    def _release(self) -> None:
        while self._leases:
            self._leases.pop().release()


class Poll(TrainerCallback):  # type: ignore[misc]
    """Asks ``poll`` after every optimizer step: raises a failed background save, and saves and stops when all ranks shall."""

    def __init__(self, trainer: CrashSafe) -> None:
        self._trainer = trainer
        self._stopping = self._owed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        """The first ``poll`` takes the stop signals over. Trainer can save after a step only."""
        self._trainer.forget_saves()
        self._stopping = self._owed = False
        self._owed = self._ask(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        if self._ask(state, control) or self._owed:
            control.should_save, self._owed = True, False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        if self._stopping:  # there may be seconds left, and this step is saved
            control.should_evaluate = control.should_save = False

    def _ask(self, state: Any, control: Any) -> bool:
        """Whether to save."""
        manager = self._trainer.manager
        if manager is None:
            return False
        todo = manager.poll(state.global_step)
        if todo.stop:
            log.warning("stopping at step %d: %s", state.global_step, todo.reason)
            self._stopping = control.should_training_stop = True
            control.should_evaluate = False
        return todo.save


def _policy(args: Any) -> Policy:
    """What ``save_total_limit`` means: so many in all, the best among them."""
    limit = args.save_total_limit
    return KeepAll() if limit is None or limit <= 0 else KeepTotal(limit, _BEST)


def _rng_name(rank: int, world: int) -> str:
    return f"rng_state_{rank}.pth" if world > 1 else "rng_state.pth"
