"""Looking again, until a deadline, at what another host wrote.

A client of a network file system may be shown the past for a minute and more: a name that is not there yet, a size from before
the last write, a directory that exists for ``mkdir`` and for nobody else, ESTALE. So what contradicts another rank's word counts
only when it lasted (S10, S23). What a rank wrote itself, or another process of its host, it sees as it is: nobody waits for
that, nor on a local disk.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import TypeVar

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

    def again(self, do: Callable[[], T]) -> T:
        """What ``do`` gives, asked again while its error may pass. Never for an fsync: one that failed is not tried twice."""
        for _ in self.looks():
            try:
                return do()
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                last = error
        raise last


NONE = Patience(SYSTEM, 0.0)
