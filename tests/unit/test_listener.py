"""The thread that hears rank 0's messages: how it is ended."""

from __future__ import annotations

from typing import Any

import pytest

from distckpt.coordination.listener import Listener
from distckpt.errors import CoordinatorLost
from distckpt.testing.clock import VirtualRuntime, VirtualThread


def test_its_end_is_waited_for_when_the_store_is_gone_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own wait fails then. A thread that is still inside the store when the interpreter ends aborts the process, and the
    exit code hides the error that ended it."""
    class Gone:
        def set(self, key: str, value: Any) -> None:
            raise CoordinatorLost("the store is gone")

    gone: Any = Gone()
    joined: list[float | None] = []
    monkeypatch.setattr(VirtualThread, "join", lambda self, timeout=None: joined.append(timeout))
    Listener(lambda: gone, 1, VirtualRuntime()).stop(gone)
    assert len(joined) == 1
