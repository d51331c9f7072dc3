"""The thread that beats and minds deadlines: how it wakes, and how it is ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from distckpt.coordination import pulse as pulses
from distckpt.coordination.pulse import Pulse
from distckpt.errors import CoordinatorLost
from distckpt.testing.clock import VirtualRuntime, VirtualThread


def test_it_is_told_to_stop_and_woken_before_its_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside calls it sleeps until it is woken; nobody may be inside the store when that is closed."""
    source: Any = None
    runtime, joined = VirtualRuntime(), list[tuple[bool, bool]]()
    pulse = Pulse(source, 0, runtime, runtime.identity())
    monkeypatch.setattr(VirtualThread, "join",
                        lambda self, timeout=None: joined.append((pulse._stop.is_set(), pulse._wake.is_set())))
    pulse.stop()
    assert joined == [(True, True)]


class _Wake(threading.Event):
    """``meanwhile`` happens right before it is cleared; nobody may sleep on it when it is not set."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def clear(self) -> None:
        self.meanwhile()
        super().clear()

    def wait(self, timeout: float | None = None) -> bool:
        assert self.is_set(), "it sleeps while a call lasts"
        return True


class _Stop(threading.Event):
    """It does not wait, and is set after some turns."""

    turns = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.turns += 1
        if self.turns > 20:
            self.set()
        return self.is_set()


def test_a_call_that_begins_as_it_falls_asleep_is_minded_and_a_lost_store_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else beats for this rank, and whoever waits asks the pulse what ended it."""
    class Gone:
        def set(self, key: str, value: Any) -> None:
            raise CoordinatorLost("the store is gone")

    monkeypatch.setattr(pulses, "BEAT", 0.0)
    gone: Any = Gone()
    runtime = VirtualRuntime()
    pulse = Pulse(lambda: gone, 1, runtime, runtime.identity())
    pulse._wake, pulse._stop = _Wake(lambda: pulse.enter(1, "save", 1)), _Stop()
    pulse._wake.set()
    pulse._run()
    assert isinstance(pulse.lost, CoordinatorLost)
