"""What ``poll`` answers, when saves are due, and what a failed one does. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from distckpt.errors import ConfigError


class Todo(NamedTuple):
    """What every rank does at this step, alike: save now, stop now, and why."""

    save: bool = False
    stop: bool = False
    reason: str = ""


NOTHING = Todo()


@dataclass(frozen=True)
class Tolerate:
    """``on_failure=Tolerate(2)``: two failed background saves in a row are warnings, the third is raised."""

    failures: int

    def __post_init__(self) -> None:
        if isinstance(self.failures, bool) or not isinstance(self.failures, int) or self.failures < 1:
            raise ConfigError(f"Tolerate takes a whole number of failures from 1 on, not {self.failures!r}")


def tolerated(on_failure: str | Tolerate) -> int:
    """How many failed saves in a row are warnings."""
    if isinstance(on_failure, Tolerate):
        return on_failure.failures
    if on_failure != "raise":
        raise ConfigError(f"on_failure must be 'raise' or Tolerate(n), not {on_failure!r}")
    return 0


class Schedule:
    """Saves that are due by the step alone: the same on every rank, without a word between them.

    Never asks for a step that is committed, in flight or just resumed from, nor for 0 unless ``at_start``.
    """

    def __init__(self, every: int | None, at_start: bool) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
            raise ConfigError(f"save_every must be a whole number of steps, or None or 0 for never; not {every!r}")
        self.every = every or 0
        self.at_start = at_start
        self.last: int | None = None

    def due(self, step: int) -> bool:
        if step == self.last:
            return False
        if step == 0:
            return self.at_start
        return bool(self.every) and step % self.every == 0

    def reason(self, step: int) -> str:
        """Why ``step`` is due: the same words on every rank, whichever way its ``poll`` took."""
        return f"every {self.every} steps" if step else "at start"
