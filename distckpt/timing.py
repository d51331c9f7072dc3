"""What is due by the clock, decided by rank 0 for all: every so many minutes, an operator's wish, the end of the allocation.

Ranks that read clocks of their own cross a limit at different steps and deadlock (FIELD_CASES B56).
"""

from __future__ import annotations

import logging

from distckpt import journal, requests
from distckpt.coordination.gate import Act
from distckpt.durable import GONE
from distckpt.errors import ConfigError
from distckpt.launch.environment import detect
from distckpt.launch.slurm import end_as_set, end_as_told
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
        self._end: float | None = None
        self._warned = False

    def watch(self, owned: OwnedRoot) -> None:
        self._owned = owned
        launch = detect()
        if self._grace is None:
            self._grace = launch.grace
        self._end = end_as_set()
        if self._end is None and launch.job_id:
            # a thread: the controller may take its time, and a start or a close must not wait for it
            owned.runtime.thread("allocation", self._ask_for_the_end)
        now = owned.runtime.monotonic()
        self._next_save = now + (self._interval or 0.0)
        self._compare_with_grace()

    def due(self) -> Act | None:
        owned = self._owned
        assert owned is not None
        now = owned.runtime.monotonic()
        if self._end is not None and self._ends_soon():
            self._end = end_as_told()  # an operator may have given the job more time
            if self._end is None or self._ends_soon():
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

    def _ask_for_the_end(self) -> None:
        self._end = end_as_told()

    def _ends_soon(self) -> bool:
        assert self._owned is not None and self._end is not None
        return self._owned.runtime.time() > self._end - self._margin()

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
