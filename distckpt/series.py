"""The lines of checkpoints of a manager, and a view of a further one, with limits of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distckpt.checkpoint import Checkpoint
from distckpt.errors import ConfigError
from distckpt.layout import Naming, check_step
from distckpt.resume import Resumed
from distckpt.retention import Policy
from distckpt.saving.files import RankFiles
from distckpt.saving.handle import SaveHandle
from distckpt.steps import Schedule

if TYPE_CHECKING:
    from distckpt.manager import CheckpointManager


@dataclass(frozen=True)
class Series:
    """What stays of a line of checkpoints, and when a save of it is due."""

    policy: Policy
    schedule: Schedule


def check_apart(name: str, others: Collection[str], naming: Naming) -> None:
    """ConfigError when ``name`` is one of the ``others``, or could own a name of theirs."""
    if name in others:
        raise ConfigError(f"series {name!r} exists already; make it once and keep the view")
    mine = naming.of_series(name)
    for other in others:
        if mine.overlaps(naming.of_series(other)):
            raise ConfigError(f"series {name!r} and {other!r} could both own a name under {naming.template!r}")


class SeriesView:
    """A series of a manager: same ranks, same owner, its own names and limits. Methods are the manager's."""

    def __init__(self, manager: CheckpointManager, name: str, schedule: Schedule) -> None:
        self._manager, self.name, self._schedule = manager, name, schedule

    def should_save(self, step: int) -> bool:
        """Whether this series' ``save_every`` asks for ``step``. Local, alike on every rank."""
        return self._schedule.due(check_step(step))

    def save(self, step: int, payload: Any, *, metrics: Mapping[str, Any] | None = None, meta: Mapping[str, Any] | None = None,
             background: bool = False, on_exists: str | None = None, staging: str = "copy") -> SaveHandle:
        """As ``CheckpointManager.save``, into this series. Collective."""
        return self._manager._save(self.name, step, payload, metrics, meta, background, on_exists, staging)

    @contextmanager
    def saving(self, step: int, *, metrics: Mapping[str, Any] | None = None, meta: Mapping[str, Any] | None = None,
               on_exists: str | None = None) -> Iterator[RankFiles]:
        """As ``CheckpointManager.saving``, into this series. Collective."""
        with self._manager._saving(self.name, step, metrics, meta, on_exists) as files:
            yield files

    def resume(self, step: int | None = None, *, verify: str = "size", allow_fresh: bool = False) -> Resumed:
        """As ``CheckpointManager.resume``, from this series. Collective."""
        return self._manager._resume(self.name, step, verify, allow_fresh)

    def restore(self, state: Any, step: int | None = None, *, strict: bool = True, only: Collection[str] | None = None,
                verify: str = "size", allow_fresh: bool = False) -> int | None:
        """As ``CheckpointManager.restore``, from this series. Collective."""
        return self._manager._restore(self.name, state, step, None, strict, only, verify, allow_fresh)

    def checkpoints(self) -> list[Checkpoint]:
        """As ``CheckpointManager.checkpoints``, of this series. Local."""
        return self._manager.checkpoints(self.name)
