"""Pins and leases: files that say "someone reads this checkpoint".

A lease is keyed by attempt, so that it can never protect another checkpoint that took the same name. The reader
writes it, makes it durable, then looks again whether the checkpoint still stands; the rotator looks before the move
*and after it*. Whichever comes second sees the other (S22): either the reader finds the checkpoint gone, or the
rotator finds the lease and moves it back. Clocks of two hosts are never compared: the rotator counts its own time
since it last saw the lease's counter move.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Any

from distckpt import catalog
from distckpt.durable import GONE, Files
from distckpt.errors import ConfigError, LeaseLost, MarkerError, StepNotFound
from distckpt.layout import MARKER, Layout
from distckpt.marker import HEAD_LIMIT, parse_head
from distckpt.ordered import is_listed, make_dir, unlink_if_there, write_new
from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

_TRIES = 10


@dataclass(frozen=True)
class Held:
    """One lease as the rotator sees it. ``ttl`` None: a pin, which never expires."""

    id: str
    attempt: str
    reason: str
    host: str
    ttl: float | None
    beat: str


def listing(files: Files, layout: Layout, attempt: str) -> list[Held]:
    """The leases on ``attempt``, expired or not, read afresh.

    Its directory may have been looked for before it was made, and NFS remembers the absence; so the parent is listed first.
    """
    try:
        if not is_listed(files, layout.leases(attempt)):
            return []
        items = files.scan(layout.leases(attempt))
    except OSError as error:
        if error.errno in GONE:
            return []
        raise
    found = []
    for item in items:
        if not item.name.endswith(".json"):
            continue
        value = catalog.read_json(files, layout.leases(attempt, item.name))
        if value is None:
            value = {"reason": "unreadable lease", "ttl": None}
        ident = item.name[:-5]
        found.append(Held(ident, attempt, str(value.get("reason", "")), str(value.get("host", "")),
                          _ttl_of(value.get("ttl")),
                          _beat(files, layout.leases(attempt, f"{ident}.beat"))))
    return found


def _ttl_of(value: Any) -> float | None:
    """A ttl that cannot be read is none at all: what is held stays held until somebody unpins it."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e12 else None


def _beat(files: Files, path: str) -> str:
    try:
        return files.read(path, 64).decode("ascii", "replace")
    except OSError as error:
        if error.errno in GONE:
            return ""
        raise


def leased_attempts(files: Files, layout: Layout) -> list[str]:
    """Attempts that have a lease directory."""
    try:
        return [i.name for i in files.scan(layout.leases()) if i.kind == "dir"]
    except OSError as error:
        if error.errno in GONE:
            return []
        raise


class Watch:
    """The rotator's view: who holds what, with expiry by its own monotonic time."""

    def __init__(self, files: Files, layout: Layout, runtime: Runtime) -> None:
        self._files = files
        self._layout = layout
        self._runtime = runtime
        self._seen: dict[str, tuple[str, float]] = {}

    def holders(self, attempt: str) -> list[str]:
        """Why ``attempt`` may not go; empty when nobody holds it."""
        reasons = []
        now = self._runtime.monotonic()
        for held in listing(self._files, self._layout, attempt):
            if held.ttl is None:
                reasons.append(f"pinned: {held.reason}")
                continue
            beat, since = self._seen.get(held.id, ("\0", now))
            if beat != held.beat:
                since = now
            self._seen[held.id] = (held.beat, since)
            if now - since <= held.ttl:
                reasons.append(f"leased by {held.host}: {held.reason}")
            else:
                log.warning("the lease %s on %s (%s, %s) expired: not renewed for %.0f s", held.id, attempt, held.host,
                            held.reason, now - since)
        return reasons

    def forget(self, attempt: str) -> None:
        """Remove the lease directory of a checkpoint that is gone."""
        path = self._layout.leases(attempt)
        try:
            for item in self._files.scan(path):
                self._seen.pop(item.name.partition(".")[0], None)
                unlink_if_there(self._files, os.path.join(path, item.name))
            self._files.rmdir(path)
        except OSError as error:
            if error.errno not in GONE:
                log.warning("could not remove the leases of a removed checkpoint %s: %s", attempt, error)


class Lease:
    """A checkpoint that stays while this is held. A context manager; ``check()`` raises LeaseLost when it lapsed.

    With a ``ttl`` (seconds) a thread renews it three times per ttl while this process lives; without, it is a pin
    that stays until ``release()`` or ``distckpt unpin``.
    """

    def __init__(self, files: Files, layout: Layout, runtime: Runtime, name: str, attempt: str, ident: str,
                 ttl: float | None) -> None:
        self.name, self.attempt, self.id = name, attempt, ident
        self.path = layout.final(name)
        self._files, self._layout, self._runtime, self._ttl = files, layout, runtime, ttl
        self._lost: str | None = None
        self._stop = runtime.event()
        self._renewed = runtime.monotonic()
        self._pid = os.getpid()
        if ttl is not None:
            runtime.thread("lease", self._renew)

    def _renew(self) -> None:
        assert self._ttl is not None
        count = 1
        while not self._stop.wait(self._ttl / 3):
            count += 1
            if self._lapsed():
                return  # this process was stopped for too long: rotation may have begun, a late beat must not hide it
            try:
                self._files.stat(self._layout.leases(self.attempt, f"{self.id}.json"))
                self._files.overwrite(self._layout.leases(self.attempt, f"{self.id}.beat"), b"%020d" % count)
                self._renewed = self._runtime.monotonic()
            except OSError as error:
                if error.errno in GONE:
                    self._lost = f"its file is gone ({error})"
                    return
                log.warning("could not renew the lease on %s: %s", self.name, error)

    def _lapsed(self) -> bool:
        if self._ttl is not None:
            late = self._runtime.monotonic() - self._renewed
            if late > self._ttl:
                self._lost = f"it was not renewed for {late:.0f} s, its ttl is {self._ttl:.0f} s"
        return self._lost is not None

    def check(self) -> None:
        """Raise LeaseLost if the checkpoint may have been removed meanwhile. Local."""
        if self._lost is None and not self._stop.is_set():
            self._lapsed()
        if self._lost is not None:
            raise LeaseLost(f"the lease on {self.name} is lost: {self._lost}; what was read since may be incomplete: "
                            "take a new lease and read again")

    def release(self) -> None:
        """Let the checkpoint go; LeaseLost if it may have gone before. Local; a second call does nothing, and so does one
        in a forked child."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        try:
            self.check()
        finally:
            self._stop.set()
            drop(self._files, self._layout, self.attempt, self.id)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: Any, value: BaseException | None, trace: Any) -> None:
        try:
            self.release()
        except LeaseLost as error:
            if value is None:
                raise
            if hasattr(value, "add_note"):
                value.add_note(str(error))


def drop(files: Files, layout: Layout, attempt: str, ident: str) -> None:
    """Remove one lease."""
    unlink_if_there(files, layout.leases(attempt, f"{ident}.beat"))
    unlink_if_there(files, layout.leases(attempt, f"{ident}.json"))
    try:
        files.rmdir(layout.leases(attempt))
    except OSError:
        return  # another lease holds the directory, or the rotator took it away: both are fine


def take(files: Files, layout: Layout, runtime: Runtime, name: str, attempt: str, reason: str,
         ttl: float | None) -> Lease:
    """A lease on the checkpoint ``name`` of ``attempt``; StepNotFound if it went meanwhile."""
    if ttl is not None and not ttl > 0:
        raise ConfigError(f"ttl must be a positive number of seconds or None, not {ttl!r}")
    ident = runtime.token(8)
    me = runtime.identity()
    record = {"reason": reason, "host": me.host, "pid": me.pid, "time": runtime.time(), "ttl": ttl, "name": name}
    for _ in range(_TRIES):
        try:
            for path in (layout.home(), layout.leases(), layout.leases(attempt)):  # a root that was copied may lack all of it
                if make_dir(files, path):
                    files.fsync_dir(os.path.dirname(path))
            write_new(files, layout.leases(attempt, f"{ident}.json"), json.dumps(record).encode())
            files.fsync_dir(layout.leases(attempt))
            break
        except FileNotFoundError:
            continue  # another reader's release, or the rotator, removed the directory in between
    else:
        raise StepNotFound(f"a lease on {name} could not be written: its directory is removed again and again", step=None)
    try:
        there = any(item.name == name and item.kind == "dir" for item in files.scan(layout.root))
        head = parse_head(files.read(os.path.join(layout.final(name), MARKER), HEAD_LIMIT)) if there else None
    except MarkerError:
        head = None
    except OSError as error:
        if error.errno not in GONE:
            drop(files, layout, attempt, ident)
            raise
        head = None
    if head is None or head.attempt != attempt:
        drop(files, layout, attempt, ident)
        raise StepNotFound(f"{name} was removed or replaced while a lease on it was taken; choose again", step=None)
    return Lease(files, layout, runtime, name, attempt, ident, ttl)
