"""What is due by the clock, decided by rank 0 for all: every so many minutes, an operator's wish, the end of the allocation.

Ranks that read clocks of their own cross a limit at different steps and deadlock (FIELD_CASES B56).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

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
_WINDOW = 3.0
"""Seconds over which quick steps are averaged: a look once a second says no more of a single one."""


class Timing:
    """``due`` is asked once a second on rank 0 and says what is news, once each. ``polls`` gives how often this rank polled."""

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
        self.polls: Callable[[], int] = lambda: 0
        self._polled = (0, 0.0, 0.0)
        self._begun: float | None = None

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
        self._watch_steps(owned, now)
        if self._end is not None and self._ends_soon():
            self._end = end_as_told()  # an operator may have given the job more time
            if self._end is None or self._ends_soon():
                self._explain_stop(owned, now)
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

    def heard(self, act: Act) -> None:
        """Rank 0 is told of ``act``, which its rank may have waited for a ``poll`` to tell."""
        owned, waited = self._owned, act.data.get("waited", 0.0)
        if act.kind == "stop" and owned is not None:
            owned.pace.stopped = owned.runtime.monotonic() - (waited if isinstance(waited, float) else 0.0)

    def _watch_steps(self, owned: OwnedRoot, now: float) -> None:
        """How long steps take, from how far ``poll`` has come since the last look: exact enough, and it costs no step anything.

        The first ones compile, and fill caches: they are left out.
        """
        pace, polls = owned.pace, self.polls()
        before, since, blocked = self._polled
        if polls <= before or (self._begun is not None and now - since < _WINDOW):
            return
        self._polled = (polls, now, pace.blocked)
        if self._begun is None:
            self._begun, pace.setup = now, owned.runtime.age()
        elif since > self._begun:
            pace.step(max(now - since - (pace.blocked - blocked), 0.0) / (polls - before))

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

    # -- what a stop takes -----------------------------------------------------------------------------------------

    def _stop_seconds(self) -> float | None:
        assert self._owned is not None
        pace = self._owned.pace
        if not pace.recalled:
            pace.recall(journal.read(self._owned.files, self._owned.layout))
        return pace.stop_seconds()

    def _margin(self) -> float:
        return max(_MARGIN, 1.5 * (self._stop_seconds() or 0.0))

    def _explain_stop(self, owned: OwnedRoot, now: float) -> None:
        """How early the run is stopped, and why; a warning where an allocation is spent on beginning and ending."""
        margin, pace = self._margin(), owned.pace
        known = f", {pace.explain()}" if self._stop_seconds() is not None else ""
        log.info("the allocation ends %s, and %.0f s are kept for the stop: the least is %.0f s%s",
                 "soon" if self._end is None else f"in {self._end - owned.runtime.time():.0f} s", margin, _MARGIN, known)
        setup = pace.setup if pace.setup is not None else owned.runtime.age()
        trained = now - self._begun if self._begun is not None else 0.0
        if trained < setup + margin:
            log.warning("this run is stopped after %.0f s of training: its set-up took %.0f s, and %.0f s are kept for the stop; "
                        "every restart costs that again, so ask for a longer allocation", trained, setup, margin)

    def _compare_with_grace(self) -> None:
        """Say so, once and as soon as it is known, when a stop takes longer than the launcher waits before it kills."""
        if self._grace is None or self._warned or self._owned is None:
            return
        takes = self._stop_seconds()
        if takes is not None and takes > self._grace:
            self._warned = True
            log.warning("this job is killed %.0f s after a stop signal, and %s: the save of a stop may not be finished. Raise "
                        "the launcher's grace, signal earlier, or poll more often", self._grace, self._owned.pace.explain())
