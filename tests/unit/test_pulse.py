"""The thread that beats and minds deadlines: how it is ended."""

from __future__ import annotations

from typing import Any

from distckpt.coordination.pulse import Pulse
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
