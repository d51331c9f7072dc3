"""The one background thread of a process that finishes saves: begin, write, fsync, acks, commit.

At most one save is in flight, and the main thread makes no collective call of the manager while one is, so the two never
use the control plane at the same moment and every rank's calls stay in one order.

A second thread watches the program: when that has ended without ``close()``, whether by returning or by an exception, the
save in flight is finished within the deadline, and the process ends. ``atexit`` would come too late: the interpreter joins
threads first. These two are no daemons, so that it waits for them, and so not for ever: a disk that hangs is left behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

Job = TypeVar("Job")

_LOOK = 0.5


class Finaliser(Generic[Job]):
    """Runs ``execute(job)``, one at a time. ``execute`` must not raise; it files the outcome itself.

    ``alive`` tells whether the program still runs (``Runtime.lifeline``). When it does not, ``orphaned`` is called once the
    save in flight has ended, within ``flush`` seconds.
    """

    def __init__(self, runtime: Runtime, alive: Callable[[], bool], execute: Callable[[Job], None],
                 orphaned: Callable[[], None], flush: float) -> None:
        self._runtime, self._program_alive, self._flush = runtime, alive, flush
        self._execute, self._orphaned = execute, orphaned
        self._job: Job | None = None
        self._wake, self._idle, self._over = runtime.event(), runtime.event(), runtime.event()
        self._idle.set()
        self._stopping = self._abandoned = False
        self._thread = runtime.thread("finaliser", self._run, daemon=False)
        self._watcher = runtime.thread("watch", self._watch, daemon=False)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Hand over the one job; the caller has made sure that none is in flight."""
        assert self._idle.is_set() and not self._stopping
        self._idle.clear()
        self._job = job
        self._wake.set()

    def wait(self, timeout: float | None) -> bool:
        """Whether nothing is in flight within ``timeout`` seconds. A thread that died counts as nothing in flight."""
        left = timeout
        while not self._idle.wait(_LOOK if left is None else min(left, _LOOK)):
            if not self._thread.is_alive():
                return True
            if left is not None:
                left -= _LOOK
                if left <= 0:
                    return self._idle.is_set()
        return True

    def stop(self, timeout: float) -> None:
        """End both threads after the job in flight. When that does not end within ``timeout`` seconds, the watch stays, and
        ends the process when the program has come to its end."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._over.set()
            if not self._abandoned:
                self._watcher.join(timeout)

    def _run(self) -> None:
        while True:
            job = self._job
            if job is None:
                if self._stopping:
                    return
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                self._execute(job)
            finally:
                del job
                self._job = None  # no reference to a payload outlives its save (FIELD_CASES B147)
                self._idle.set()

    def _watch(self) -> None:
        while self._program_alive():
            if self._over.wait(_LOOK):
                return
        if not self.wait(0.0 if self._stopping else self._flush):
            log.error("the program has ended, and the save in flight does not; leaving without it")
            self._runtime.exit_now(1)
        if not self._stopping:
            self._abandoned = True
            self._orphaned()
