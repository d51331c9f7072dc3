"""The thread that hears rank 0's messages: how it is ended."""

from __future__ import annotations

from typing import Any

from distckpt.coordination.listener import Listener
from distckpt.errors import CoordinatorLost


class _Thread:
    def __init__(self) -> None:
        self.joined: list[float] = []

    def join(self, timeout: float) -> None:
        self.joined.append(timeout)

    def is_alive(self) -> bool:
        return False


class _Runtime:
    def __init__(self) -> None:
        self.started = _Thread()

    def thread(self, name: str, target: Any) -> _Thread:
        return self.started


def test_its_end_is_waited_for_when_the_store_is_gone_as_well() -> None:
    """Its own wait fails then. A thread that is still inside the store when the interpreter ends aborts the process, and the
    exit code hides the error that ended it."""
    class Gone:
        def set(self, key: str, value: Any) -> None:
            raise CoordinatorLost("the store is gone")

    runtime: Any = _Runtime()
    gone: Any = Gone()
    Listener(lambda: gone, 1, runtime).stop(gone)
    assert len(runtime.started.joined) == 1
