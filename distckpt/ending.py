"""The end of a manager: the goodbye of all ranks, or leaving without a word."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from distckpt.background import Background
from distckpt.behind import Behind
from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Report
from distckpt.errors import DistckptError
from distckpt.owned import OwnedRoot
from distckpt.saving.committer import Committer
from distckpt.saving.hooks import Hooks, journal_failures
from distckpt.series import Series

log = logging.getLogger(__name__)


class Ending:
    """Ends the parts of a manager, in order. ``limit``: seconds for each wait. ``closed``: it has ended."""

    def __init__(self, group: Group, background: Background, behind: Behind, hooks: Hooks, owned: OwnedRoot | None,
                 committer: Committer | None, series: Mapping[str, Series], limit: float) -> None:
        self._group, self._background, self._behind, self._hooks = group, background, behind, hooks
        self._owned, self._committer, self._series, self._limit = owned, committer, series, limit
        self.closed = False

    def goodbye(self) -> None:
        """What ``close`` does. Collective."""
        background = self._background
        try:
            if self._owned is not None:
                self._owned.pace.closing = self._owned.runtime.monotonic()
            self._behind.staged()
            background.last_boundary()
            if not background.wait(self._limit):
                raise background.overdue(self._limit)
            with self._group.rounds.call("close") as call:
                call.round(self._hooks.drain(), self._end, self._limit)
        except DistckptError as error:
            self.leave()
            background.note_unreported(error)
            raise
        self.closed = True
        background.stop(min(self._limit, 30.0))
        self._behind.close(5.0)
        if self._owned is not None:
            self._owned.close(self._limit)
        self._group.close(min(self._limit, 30.0))
        background.face_unreported()

    def _end(self, reports: dict[int, Report]) -> Report:
        """The end-of-run clean-up is the same routine as rotation: what it protects, it protects here (FIELD_CASES B76)."""
        assert self._owned is not None and self._committer is not None
        journal_failures(self._owned.journal.event, reports)
        if not self._owned.afterwards.catch_up(self._limit / 2):  # the other ranks wait for the answer, and not for longer
            log.warning("%s is not cleaned up: its last rotation has not ended within %g s; the next start of the run rotates",
                        self._owned.layout.root, self._limit / 2)
            return {}
        with self._owned.lock:
            try:
                self._owned.sweep()
            except OSError as error:  # no reason to keep the root from its next writer
                log.warning("could not clean up %s: %s; the next start does", self._owned.layout.root, error)
            for name, series in self._series.items() if self._committer.domains is None else ():
                if name in self._committer.series_committed:
                    self._committer.rotate(name, series.policy)
        return {}

    def leave(self) -> None:
        """Give the root back without a word to the others. Local."""
        self.closed = True
        self._background.stop(5.0)
        self._behind.close(1.0)
        if self._owned is not None:
            self._owned.close(min(self._limit, 5.0))
        self._group.abandon(self._background.gate.place[0])

    def leave_after(self, value: BaseException) -> None:
        """``leave``, as ``value`` goes on. Local: the others may be anywhere, and nothing may hide the exception in flight.

        The save in flight ends in a known state first; what it failed with becomes a note.
        """
        try:
            self._behind.staged()
            self._background.wait(self._limit)
            self._background.note_unreported(value)
            self.leave()
        except (DistckptError, OSError) as error:
            log.warning("closing after %s: %s", type(value).__name__, error)
