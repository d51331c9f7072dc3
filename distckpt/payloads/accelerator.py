"""Everything that an Accelerator has prepared or was given to keep, written and read by Accelerate itself."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from distckpt import options
from distckpt.checkpoint import Checkpoint
from distckpt.errors import ConfigError, MemberMissing, WorldMismatch
from distckpt.payloads.base import Ranks
from distckpt.payloads.deepspeed import check_world, writing_late
from distckpt.payloads.framework import FrameworkFiles, Held, all_or_none
from distckpt.payloads.rng import Rng

log = logging.getLogger(__name__)

RULES = ("error", "reseed")
# Accelerate has every rank write these, all under one name.
_ALIKE = re.compile(r"scaler\.pt|dl_state_dict(_\d+)?\.bin")


def is_accelerator(value: Any) -> bool:
    """Whether ``value`` is Accelerate's, told without importing it."""
    loaded = sys.modules.get("accelerate")
    return loaded is not None and isinstance(value, loaded.Accelerator)


class AcceleratorState(FrameworkFiles):
    """``accelerator.save_state`` and ``load_state`` as a payload: models, optimizers, schedulers, scaler, custom objects, and
    the random states of every rank, in Accelerate's own files.

    ``on_world_change``: what becomes of the random states at another number of ranks: "error", or "reseed" for new,
    reproducible ones. ``save_options`` and ``load_options`` go to ``save_state`` and ``load_state``. ``scratch``: see
    ``FrameworkFiles``. ConfigError when Accelerate's own naming or limit is on.
    """

    def __init__(self, accelerator: Any, *, on_world_change: str = "error", scratch: str | None = None,
                 save_options: Mapping[str, Any] | None = None, load_options: Mapping[str, Any] | None = None) -> None:
        self._accelerator = accelerator
        self._rule = options.choice("on_world_change", on_world_change, RULES)
        self._save_options, self._load_options = dict(save_options or {}), dict(load_options or {})
        super().__init__(self._save, self._restore, owed=[_random_states(accelerator.process_index)],
                         alike=lambda name: _ALIKE.fullmatch(name) is not None, scratch=scratch)
        self._check_project()

    def _check_project(self) -> None:
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming or project.total_limit is not None:
            raise ConfigError("ProjectConfiguration(automatic_checkpoint_naming=True) and total_limit would name and delete "
                              "checkpoints beside distckpt, and delete before they save: leave both out, and say naming= and "
                              "keep_last= to CheckpointManager")
        if project.save_on_each_node:
            raise ConfigError("ProjectConfiguration(save_on_each_node=True) is for disks of each node's own; the ranks of a "
                              "CheckpointManager share one root, where every node would write the same names: leave it out")

    def check(self) -> None:
        self._check_project()
        if not self._accelerator.sync_gradients:
            raise ConfigError("save_state in the middle of gradient accumulation: gradients are in no checkpoint, so this state "
                              "would not go on as it was; save when accelerator.sync_gradients is true")

    def _save(self, directory: str, held: Held) -> None:
        with ExitStack() as late:
            for model in self._accelerator._models:
                if hasattr(model, "save_checkpoint"):  # a DeepSpeed engine
                    late.enter_context(writing_late(model, held))
            self._accelerator.save_state(directory, **self._save_options)

    def _restore(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        same = checkpoint.world == ranks.world
        error = None
        try:
            check_world(checkpoint, ranks.world)
            if same:
                _check_random_states(checkpoint, _random_states(ranks.rank))
            elif self._rule == "error":
                raise WorldMismatch(f"{checkpoint.name} was saved by {checkpoint.world} ranks and is loaded by {ranks.world}: "
                                    "random states are per rank. Load with as many ranks, or say on_world_change='reseed'",
                                    step=checkpoint.step, saved=checkpoint.world, now=ranks.world)
        except Exception as raised:  # told to the other ranks, and raised there
            error = raised
        all_or_none(error, ranks)
        self._accelerator.load_state(checkpoint.directory, **self._load_options)
        if not same:
            text = checkpoint.entry(_random_states(0)).digest or checkpoint.attempt
            seed = int(text.rpartition(":")[2][:12], 16)
            Rng().reseed([{"seed": seed}] * checkpoint.world, ranks.rank, ranks.world)


def _random_states(rank: int) -> str:
    return f"random_states_{rank}.pkl"


def _check_random_states(checkpoint: Checkpoint, name: str) -> None:
    """Accelerate goes on with other random numbers, and says so at INFO, when these cannot be loaded: found out here."""
    if not checkpoint.has(name):
        raise MemberMissing(f"{checkpoint.name} has no {name}: this rank's random states were never saved, and Accelerate would "
                            "go on with others without a word", step=checkpoint.step, members=[name])
    from accelerate.utils import load

    with checkpoint.open(name) as file:
        states = load(file)
    lacking = {"random_state", "numpy_random_seed", "torch_manual_seed"} - set(states)
    if lacking:
        raise MemberMissing(f"{checkpoint.name}: {name} lacks {', '.join(sorted(lacking))}", step=checkpoint.step,
                            members=sorted(lacking))
