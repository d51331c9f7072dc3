"""What ``save`` gives back."""

from __future__ import annotations

from distckpt import catalog
from distckpt.checkpoint import Checkpoint
from distckpt.durable import Files
from distckpt.errors import DistckptError
from distckpt.runtime import Event


class SaveHandle:
    """A save, under way or ended: the checkpoint it made, or the one that satisfied ``on_exists="skip"``. Local.

    ``path`` is where the checkpoint stands once it is committed. ``skipped``: nothing was written, because the step was
    there, or because another save was in flight.
    """

    def __init__(self, files: Files, path: str, step: int, rank: int, world: int, skipped: bool = False, *,
                 ended: Event | None = None, number: int = 0) -> None:
        self.path, self.step, self.skipped, self.number = path, step, skipped, number
        self._files, self._rank, self._world = files, rank, world
        self._checkpoint: Checkpoint | None = None
        self._ended = ended
        self._error: DistckptError | None = None

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, path={self.path!r}, skipped={self.skipped})"

    def done(self) -> bool:
        """Whether the outcome is known on this rank. Must not steer collective code: other ranks learn it a moment later."""
        return self._ended is None or self._ended.is_set()

    def exception(self) -> DistckptError | None:
        """What a background save failed with, so far; a synchronous one raises its error itself."""
        return self._error

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The committed checkpoint, exactly this attempt, wherever ``latest`` moves meanwhile; raises what the save failed
        with, TimeoutError after ``timeout`` seconds, or OSError when it is committed and cannot be read (``exception()`` is
        None then)."""
        if self._ended is not None and not self._ended.wait(timeout):
            raise TimeoutError(f"the save of step {self.step} is still under way after {timeout:g} s")
        if self._error is not None:
            raise self._error
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self.path, catalog.read_marker(self._files, self.path), rank=self._rank,
                                          world=self._world, files=self._files)
        return self._checkpoint

    def commit(self, path: str, skipped: bool) -> None:
        """The finaliser's: it is committed, or was there already."""
        self.path, self.skipped = path, skipped
        if self._ended is not None:
            self._ended.set()

    def fail(self, error: DistckptError) -> None:
        """The finaliser's: it is not."""
        self._error = error
        if self._ended is not None:
            self._ended.set()
