"""What follows a commit, off the caller's thread: the pointer and the rotation of one save after the other, in the order of
their commits.

They are queued only when the commit is durable and every rank has the verdict (P3), and run under the root's lock, so never
two at once, and never beside a commit. Who needs them done takes what the thread has not begun and does it himself: the next
save before it looks for room (a full disk must have got back what rotation frees), ``resume``, ``wait`` and ``close``. So
nothing waits for a thread that may be gone, and the disk never holds more than retention, one more, and the one in flight
(tests/unit/test_afterwards.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from distckpt.runtime import Lock, Runtime

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Afterwards:
    """One thread, and the queue that it shares with who cannot wait for it. ``lock``: held by whoever does a job."""

    def __init__(self, runtime: Runtime, lock: Lock) -> None:
        self._lock = lock
        self._queue: deque[Job] = deque()
        self._wake = runtime.event()
        self._stopping = False
        self._thread = runtime.thread("afterwards", self._run)

    def add(self, job: Job) -> None:
        """Do ``job`` soon, after those before it. It must say itself what went wrong."""
        self._queue.append(job)
        self._wake.set()

    def done(self) -> bool:
        """Whether every job has ended."""
        return not self._queue

    def catch_up(self, timeout: float | None = None) -> bool:
        """End them all, here where need be. False when one of them runs on the thread and does not end in ``timeout`` seconds."""
        if self.done():
            return True  # neither a lock nor a wait where nothing is to be done: every save and every resume comes here
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return False
        try:
            while self._queue:
                try:
                    self._queue[0]()
                except Exception:  # whoever runs it did not ask for it, and the jobs after it are still owed
                    log.exception("what follows a commit failed in a way that nobody foresaw")
                finally:
                    self._queue.popleft()  # not before: until then it is not done
        finally:
            self._lock.release()
        return True

    def stop(self, timeout: float) -> None:
        """End the thread, after all jobs where they end in time."""
        ended = self.catch_up(timeout)
        self._stopping = True
        self._wake.set()
        if ended:
            self._thread.join(timeout)
        else:
            log.warning("the rotation has not ended within %g s; the next start of the run goes on with it", timeout)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            self.catch_up()
