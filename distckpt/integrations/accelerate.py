"""Accelerate: ``save_state`` and ``load_state``, with checkpoints that exist only when they are whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distckpt.errors import ConfigError
from distckpt.manager import CheckpointManager
from distckpt.payloads.accelerator import AcceleratorState, is_accelerator
from distckpt.saving.handle import SaveHandle
from distckpt.steps import Todo


class Checkpointing:
    """An Accelerator's state in the checkpoints of ``manager``. Every rank makes it, after ``accelerator.prepare``.

    ``on_world_change``, ``scratch``, ``save_options`` and ``load_options``: see ``AcceleratorState``. ConfigError when
    Accelerate's own naming or ``total_limit`` is on, or when the two count their ranks differently.
    """

    def __init__(self, accelerator: Any, manager: CheckpointManager, *, on_world_change: str = "error",
                 scratch: str | None = None, save_options: Mapping[str, Any] | None = None,
                 load_options: Mapping[str, Any] | None = None) -> None:
        if not is_accelerator(accelerator):
            raise ConfigError(f"Checkpointing takes an accelerate.Accelerator, not {type(accelerator).__name__}")
        here = (accelerator.process_index, accelerator.num_processes)
        if here != (manager.rank, manager.world):
            raise ConfigError(f"Accelerate calls this process rank {here[0]} of {here[1]}, the manager rank {manager.rank} of "
                              f"{manager.world}: make the manager after the Accelerator, without group=")
        self._manager = manager
        self._state = AcceleratorState(accelerator, on_world_change=on_world_change, scratch=scratch,
                                       save_options=save_options, load_options=load_options)

    def poll(self, step: int) -> Todo:
        """``manager.poll``. Every rank, at the top of every step."""
        return self._manager.poll(step)

    def save(self, step: int, *, metrics: Mapping[str, Any] | None = None, meta: Mapping[str, Any] | None = None,
             background: bool = False, on_exists: str | None = None) -> SaveHandle:
        """``accelerator.save_state`` into the checkpoint of ``step``. Collective; errors as of ``manager.save``.

        ``background=True``: before this returns, what Accelerate writes is in memory: a copy of the large states, and its small
        files. To disk it goes behind the training.
        """
        return self._manager.save(step, self._state, metrics=metrics, meta=meta, background=background, on_exists=on_exists)

    def restore(self, step: int | None = None, **options: Any) -> int | None:
        """``accelerator.load_state`` from the newest whole checkpoint; the step to go on from, None for a fresh start.

        Collective; ``options`` and errors as of ``manager.restore``, and MemberMissing when this rank's random states are not
        there.
        """
        return self._manager.restore(self._state, step, **options)
