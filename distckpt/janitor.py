"""Deletes what stands in trash, off everybody's path, with retries.

A removal that fails (busy files on NFS, a full journal, a reader on another client) is a warning with a count and is
tried again: at the next save, at the next start, and a few times in between.
"""

from __future__ import annotations

import logging
import os

from distckpt.durable import GONE, TAKEN, Files
from distckpt.errors import MarkerError
from distckpt.layout import MARKER, Layout
from distckpt.leases import Watch
from distckpt.marker import HEAD_LIMIT, Head, parse_head
from distckpt.ordered import move
from distckpt.ownership import STILL
from distckpt.removal import discard
from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

RETRY = 30.0


class Janitor:
    """One thread that empties ``trash/<g>/``. ``wait`` lets a test or ``close`` know that nothing is queued."""

    def __init__(self, files: Files, layout: Layout, runtime: Runtime, generation: int, watch: Watch) -> None:
        self._files, self._layout, self._runtime = files, layout, runtime
        self._generation, self._watch = generation, watch
        self._wake, self._idle = runtime.event(), runtime.event()
        self._lock = runtime.lock()
        self._queue: list[tuple[float, str]] = []
        self._stopping = False
        self.failures = 0
        self._idle.set()
        self._network = files.is_network(layout.root)
        self._thread = runtime.thread("janitor", self._run)

    def delete(self, paths: list[str]) -> None:
        """Delete these trash entries soon. On a network file system a lease taken on another client may show up late:
        they are looked at once more after 90 s before their bytes go (S22)."""
        due = self._runtime.monotonic() + (STILL if self._network else 0.0)
        with self._lock:
            self._queue += [(due, path) for path in paths]
            self._idle.clear()
        self._wake.set()

    def leftovers(self, files: Files | None = None) -> list[str]:
        """What stands in trash now, as ``files`` sees it."""
        return [self._layout.trash(self._generation, item.name)
                for item in (files or self._files).scan(self._layout.trash(self._generation))]

    def wait(self, timeout: float) -> bool:
        """Whether everything due was deleted, or tried, within ``timeout`` seconds."""
        return self._idle.wait(timeout)

    def stop(self, timeout: float) -> None:
        """End the thread after what is due now; what is not due is left to the next start."""
        with self._lock:
            self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        # Unlinking is the kernel's work, some 50 us of a core for each file, and training must not queue behind it. The threads
        # that help inherit the priority. It changes no order, and who waits for the room, or closes, leaves them its own core.
        self._runtime.give_way()
        while True:
            with self._lock:
                now = self._runtime.monotonic()
                due = [path for when, path in self._queue if when <= now]
                self._queue = [(when, path) for when, path in self._queue if when > now]
                pending = min((when for when, _ in self._queue), default=None)
                if not due:
                    self._idle.set()
                    if self._stopping:
                        return
                self._wake.clear()
            for path in due:
                self._delete(path)
            if not due:
                self._wake.wait(None if pending is None else max(pending - now, 0.05))

    def _head(self, path: str) -> Head | None:
        """Which checkpoint stands at ``path``, whole; None when its removal had begun, or when it never was one.

        Its own marker says so, and not the name in trash: what a replace left there goes by the name of the attempt
        that stands now, and that one's leases must live on.
        """
        try:
            return parse_head(self._files.read(os.path.join(path, MARKER), HEAD_LIMIT))
        except MarkerError:
            return None
        except OSError as error:
            if error.errno not in GONE:
                raise
            return None

    def _delete(self, path: str) -> None:
        """A lease may have been taken between the plan and the move, and the owner killed before it looked again; the
        next one finds it here. So everything that still has its marker is looked at before it goes (S22)."""
        try:
            head = self._head(path)
            if head is not None and self._watch.holders(head.attempt):
                move(self._files, path, self._layout.final(head.name))
                self._files.fsync_dir(self._layout.root)
                self._files.fsync_dir(os.path.dirname(path))
                return
            discard(self._files, self._layout.root, path, MARKER, self._runtime)
            if head is not None:
                self._watch.forget(head.attempt)
        except OSError as error:
            if error.errno in GONE:
                return  # a takeover moved our trash away: it is the next owner's now
            self.failures += 1
            busy = " (somebody still reads it)" if error.errno in TAKEN else ""
            log.warning("could not delete %s: %s%s; %d deletions failed so far, it will be tried again", path, error, busy,
                        self.failures)
            if not self._stopping:
                with self._lock:
                    self._queue.append((self._runtime.monotonic() + RETRY, path))
