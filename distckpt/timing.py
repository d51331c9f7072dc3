"""What is due by the clock, decided by rank 0 for all: every so many minutes, an operator's wish, the end of the allocation.

Ranks that read clocks of their own cross a limit at different steps and deadlock (FIELD_CASES B56).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from distckpt import journal, requests
from distckpt.coordination.gate import Act
from distckpt.durable import GONE
from distckpt.errors import ConfigError
from distckpt.owned import OwnedRoot

log = logging.getLogger(__name__)

_LOOK_FOR_REQUESTS = 5.0
_MARGIN = 60.0


class Timing:
    """``due`` is asked once a second on rank 0 and says what is news, once each."""

    def __init__(self, minutes: float | None, grace: float | None) -> None:
        for name, value in (("save_every_minutes", minutes), ("grace", grace)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
                raise ConfigError(f"{name} must be a positive number or None, not {value!r}")
        self._interval = minutes * 60 if minutes else None
        self._grace = grace
        self._owned: OwnedRoot | None = None
        self._next_save = self._next_look = 0.0
        self._end = _end_of_allocation()
        self._warned = False

    def watch(self, owned: OwnedRoot) -> None:
        self._owned = owned
        now = owned.runtime.monotonic()
        self._next_save = now + (self._interval or 0.0)
        self._compare_with_grace()

    def due(self) -> Act | None:
        owned = self._owned
        assert owned is not None
        now = owned.runtime.monotonic()
        if self._end is not None and owned.runtime.time() > self._end - self._margin():
            self._end = None
            return Act("stop", "the allocation ends soon")
        if self._interval is not None and now >= self._next_save:
            self._next_save = now + self._interval
            return Act("save", f"every {self._interval / 60:g} minutes")
        if now >= self._next_look:
            self._next_look = now + _LOOK_FOR_REQUESTS
            self._compare_with_grace()
            return self._request(owned)
        return None

    def _request(self, owned: OwnedRoot) -> Act | None:
        """An operator's file in ``requests/``, taken away when it is seen."""
        try:
            reasons = requests.take(owned.files, owned.layout)
        except OSError as error:
            if error.errno not in GONE:
                log.warning("cannot read the requests of %s: %s", owned.layout.root, error)
            return None
        if not reasons:
            return None
        why = ", ".join(dict.fromkeys(reason for reason in reasons if reason))
        return Act("save", "requested by an operator" + (f": {why}" if why else ""))

    def _margin(self) -> float:
        assert self._owned is not None
        return max(_MARGIN, 1.5 * (p95(self._owned) or 0.0))

    def _compare_with_grace(self) -> None:
        """Say so, once, when saves take longer than the launcher waits before it kills."""
        if self._grace is None or self._warned or self._owned is None:
            return
        usual = p95(self._owned)
        if usual is not None and usual > self._grace:
            self._warned = True
            log.warning("saves take %.0f s (95th percentile), and this job is killed %.0f s after a stop signal: a save begun "
                        "then will not be finished. Raise the launcher's grace, or signal earlier", usual, self._grace)


def p95(owned: OwnedRoot) -> float | None:
    """95th percentile of the seconds that saves of this root took; None when none is recorded."""
    if owned.durations is None:
        owned.durations = [float(e["seconds"]) for e in journal.read(owned.files, owned.layout)
                           if e.get("event") == "committed" and isinstance(e.get("seconds"), (int, float))][-200:]
    if not owned.durations:
        return None
    ordered = sorted(owned.durations)
    return ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)]


def _end_of_allocation() -> float | None:
    text: Any = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isdigit() and int(text) > 0 else None
