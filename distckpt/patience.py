"""Looking again, until a deadline, at what another host wrote.

A client of a network file system may be shown the past for a minute and more: a name that is not there yet, a size from before
the last write, a directory that exists for ``mkdir`` and for nobody else, ESTALE. So what contradicts another rank's word counts
only when it lasted (S10, S23). What a rank wrote itself, or another process of its host, it sees as it is: nobody waits for
that, nor on a local disk.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from distckpt.durable import GONE, Files
from distckpt.runtime import SYSTEM, Runtime

T = TypeVar("T")

PASSING = (*GONE, errno.ESTALE)
"""Errors that a host which is shown the past gets for what is there."""
_FIRST, _LONGEST = 0.01, 1.0


class Patience:
    """``seconds``: how long an answer must last before it counts; 0 where no answer can be old. ``moving`` is called at each
    further look: whoever waits like this is alive, and must not be taken for a rank that hangs."""

    def __init__(self, runtime: Runtime, seconds: float, moving: Callable[[], None] | None = None) -> None:
        self.seconds = seconds
        self._runtime, self._moving = runtime, moving

    @classmethod
    def towards(cls, files: Files, runtime: Runtime, root: str, seconds: float,
                moving: Callable[[], None] | None = None) -> Patience:
        """Of ``seconds`` where another machine may change what is under ``root``, else none."""
        return cls(runtime, seconds if files.is_network(root) else 0.0, moving)

    def looks(self, at_least: float = 0.0) -> Iterator[None]:
        """One turn for each look, with pauses between; the last one comes at the deadline. ``at_least``: seconds to look again
        on a disk that seems to be local, where the answer says whether it is shared at all."""
        begun, pause, limit = self._runtime.monotonic(), _FIRST, max(self.seconds, at_least)
        while True:
            waited = self._runtime.monotonic() - begun
            yield
            if waited >= limit:
                return
            self._runtime.sleep(min(pause, max(limit - waited, _FIRST)))
            pause = min(pause * 2, _LONGEST)
            if self._moving is not None:
                self._moving()

    def over(self, files: Files) -> Files:
        """``files``, whose looks are asked again while they are stale: that is no word of what is there, and no reason yet to
        give up a claim, a recovery or a commit. What is gone is gone at once."""
        return _Looking(files, self) if self.seconds else files

    def again(self, do: Callable[[], T], passing: tuple[int, ...] = PASSING) -> T:
        """What ``do`` gives, asked again while its error may pass. Never for an fsync: one that failed is not tried twice."""
        for _ in self.looks():
            try:
                return do()
            except OSError as error:
                if error.errno not in passing:
                    raise
                last = error
        raise last


_LOOKS = ("scan", "stat", "look", "member", "read", "access")


class _Looking(Files):
    """Another's files, all of whose methods are theirs, with patience in those that only look."""

    def __init__(self, files: Files, patience: Patience) -> None:
        self._files, self._patience = files, patience

    def __getattribute__(self, name: str) -> Any:
        if name in ("_files", "_patience"):
            return object.__getattribute__(self, name)
        found = getattr(self._files, name)
        if name not in _LOOKS:
            return found
        return lambda *where: self._patience.again(partial(found, *where), (errno.ESTALE,))


NONE = Patience(SYSTEM, 0.0)
