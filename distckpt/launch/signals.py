"""Stop signals: a handler that sets a flag, and nothing else.

A Python handler runs between any two bytecodes, in the middle of a backward pass or of another write; whatever is done
there (I/O, a lock, a save) stops half-way at random (FIELD_CASES B113). The flag is acted on at the next ``poll``.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from distckpt.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT = ("SIGTERM", "SIGUSR1")


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    found = tuple(names)
    for name in found:
        if not isinstance(name, str) or not hasattr(signal.Signals, "SIGTERM") or name not in signal.Signals.__members__:
            raise ConfigError(f"stop_signals must be names such as 'SIGTERM', not {name!r}")
        if name in ("SIGKILL", "SIGSTOP"):
            raise ConfigError(f"{name} cannot be handled by any process")
    return found


class StopSignals:
    """``raised`` is the name of a stop signal that arrived, or empty, ``at`` the monotonic time when it did. ``install`` once,
    ``restore`` at the end.

    ``untouched``: not installed, or not any more; what ``poll`` looks at before it goes on without a check.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = check_names(names)
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self.raised = ""
        self.at = 0.0
        self.untouched = True

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def install(self) -> None:
        """Take the signals over; whoever handled them before is called as well. From the main thread only."""
        self.untouched = False
        if not self._names or self._before:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning("poll runs outside the main thread, where Python installs no signal handlers: %s will not stop this run; "
                        "poll from the main thread, or pass stop_signals=()", ", ".join(self._names))
            self._names = ()
            return
        for name in self._names:
            number = int(signal.Signals[name])
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if not self._names or os.getpid() != self._pid:  # closed, and somebody kept us; or a forked child: not ours to handle
            if before == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif not self.raised:
            self.at = time.monotonic()
            self.raised = signal.Signals(number).name
        if callable(before):
            before(number, frame)

    def restore(self) -> None:
        """Give the signals back; one that somebody else took over meanwhile is left to them."""
        self._names, self.untouched = (), True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle and before is not None:
                signal.signal(number, before)


def ignore_stop_signals(worker_id: int = 0) -> None:
    """For ``DataLoader(worker_init_fn=...)``: a stop signal to the whole process group must not kill a data worker first."""
    for name in DEFAULT:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
