"""The thread that beats and minds deadlines: how it wakes, and how it is ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from distckpt.coordination import pulse as pulses
from distckpt.coordination.pulse import Pulse
from distckpt.errors import CoordinatorLost
from distckpt.runtime import SYSTEM, SystemRuntime


class _Runtime(SystemRuntime):
    """``joined`` notes what the thread could know when its end was waited for."""

    def __init__(self) -> None:
        self.joined: list[tuple[bool, bool]] = []
        self.pulse: Any = None

    def thread(self, name: str, target: Any, nice: int = 0) -> Any:
        return self

    def join(self, timeout: float) -> None:
        self.joined.append((self.pulse._stop.is_set(), self.pulse._wake.is_set()))


def test_it_is_told_to_stop_and_woken_before_its_end_is_waited_for() -> None:
    """Outside calls it sleeps until it is woken; nobody may be inside the store when that is closed."""
    runtime, source = _Runtime(), Any
    runtime.pulse = Pulse(source, 0, runtime, SYSTEM.identity())  # type: ignore[arg-type]
    runtime.pulse.stop()
    assert runtime.joined == [(True, True)]


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
    pulse = Pulse(lambda: gone, 1, _Runtime(), SYSTEM.identity())
    pulse._wake, pulse._stop = _Wake(lambda: pulse.enter(1, "save", 1)), _Stop()
    pulse._wake.set()
    pulse._run()
    assert isinstance(pulse.lost, CoordinatorLost)
