"""What ``save`` gives back."""

from __future__ import annotations

from distckpt import catalog
from distckpt.checkpoint import Checkpoint
from distckpt.durable import Files


class SaveHandle:
    """A save that has ended: the checkpoint it made, or the one that satisfied ``on_exists="skip"``. Local."""

    def __init__(self, files: Files, path: str, step: int, rank: int, world: int, skipped: bool) -> None:
        self.path, self.step, self.skipped = path, step, skipped
        self._files, self._rank, self._world = files, rank, world
        self._checkpoint: Checkpoint | None = None

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, path={self.path!r}, skipped={self.skipped})"

    def done(self) -> bool:
        """Whether the outcome is known on this rank. Must not steer collective code."""
        return True

    def exception(self) -> None:
        """A synchronous save raises its error itself."""

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The committed checkpoint, exactly this attempt, wherever ``latest`` moves meanwhile."""
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self.path, catalog.read_marker(self._files, self.path), rank=self._rank,
                                          world=self._world, files=self._files)
        return self._checkpoint
