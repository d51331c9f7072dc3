"""One thread per rank that says "still at it", and on rank 0 watches over whom it waits for.

It sends nothing while no call runs, and nothing in a call shorter than a second but one line at its end. The threads
that wait use single long waits on keys; this thread ends such a wait by *filling* the missing keys, so that nobody
polls: after an abort, when a process on this machine has ended, when a rank has said goodbye, or when a deadline passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distckpt.coordination.store import Client, ClientSource
from distckpt.errors import CoordinationError, CoordinatorLost
from distckpt.runtime import Identity, Runtime

log = logging.getLogger(__name__)

TICK = 0.05
BEAT = 1.0
SAY = 30.0
GRACE = 0.3
TRICKLE = 1 << 16
"""Bytes of a process that are more than its log lines: less is no progress."""


def beat_key(rank: int) -> str:
    return f"beat/{rank}"


def bye_key(rank: int) -> str:
    return f"bye/{rank}"


@dataclass
class Watch:
    """What rank 0 waits for: one key per rank.

    ``abort``: a key that ends the wait, after a short grace in which further causes may arrive. ``timeout`` counts
    for each rank from the start or, with ``progress``, from its last new bytes: slow is no timeout. ``lost``: their process
    has ended; ``left``: they said goodbye, by ``close`` or by an exception of their program, and make no call any more.
    """

    keys: dict[int, str]
    what: str
    timeout: float
    progress: bool = False
    abort: str | None = None
    missing: dict[int, Any] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    timed_out: list[int] = field(default_factory=list)
    beats: dict[int, dict[str, Any]] = field(default_factory=dict)
    began: float = 0.0
    moved: dict[int, float] = field(default_factory=dict)
    seen_abort: float | None = None
    next_look: float = 0.0
    next_line: float = 0.0

    def absent(self) -> list[int]:
        return sorted({*self.lost, *self.left, *self.timed_out})


class Pulse:
    """Enter and leave around every collective call; ``phase`` and ``moved`` say what this rank is doing."""

    def __init__(self, source: ClientSource, rank: int, runtime: Runtime, identity: Identity) -> None:
        self._source, self._rank, self._runtime, self._identity = source, rank, runtime, identity
        self._wake, self._stop = runtime.event(), runtime.event()
        self._lock = runtime.lock()
        self._state: dict[str, Any] = {"phase": "starting", "call": 0, "moves": 0}
        self._probe: Callable[[], int] | None = None
        self._moved = 0
        self._active = False
        self._watch: Watch | None = None
        self.identities: dict[int, Identity] = {}
        self.lost: CoordinatorLost | None = None
        self._thread = runtime.thread("pulse", self._run)

    # -- what the main thread says -------------------------------------------------------------------------------

    def enter(self, call: int, op: str, step: int | None) -> None:
        with self._lock:
            self._state = {"phase": op, "call": call, "op": op, "step": step, "moves": self._state["moves"] + 1,
                           "host": self._identity.host, "pid": self._identity.pid}
            self._active = True
        self._wake.set()

    def leave(self, client: Client) -> None:
        with self._lock:
            self._active = False
            self._probe = None
            self._state = {**self._state, "phase": f"outside, after {self._state.get('op')}"}
            state = dict(self._state)
        try:
            client.set(beat_key(self._rank), state)
        except CoordinatorLost as error:  # a courtesy must not hide how the call ended
            log.debug("rank %d left its call unseen: %s", self._rank, error)

    def phase(self, name: str) -> None:
        with self._lock:
            self._state["phase"] = name
            self._state["moves"] += 1

    @property
    def current_phase(self) -> str:
        return str(self._state["phase"])

    def probe(self, bytes_so_far: Callable[[], int] | None) -> None:
        """How this thread learns how many bytes the rank has written, whoever writes them."""
        with self._lock:
            self._probe = bytes_so_far

    def watch(self, watch: Watch | None) -> None:
        with self._lock:
            if watch is not None:
                watch.began, watch.next_line = self._runtime.monotonic(), SAY
            self._watch = watch
        self._wake.set()

    @property
    def running(self) -> bool:
        """Whether somebody minds the deadlines."""
        return not self._stop.is_set() and self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(5)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        client = self._source()
        beaten = self._runtime.monotonic()
        try:
            while not self._stop.is_set():
                if not self._active and self._watch is None:
                    self._wake.wait()
                    self._wake.clear()
                    beaten = self._runtime.monotonic()
                    continue
                # only rank 0 has a watch, which may begin at any moment; the others sleep until there is something to say
                self._stop.wait(TICK if self._rank == 0 else max(0.0, beaten + BEAT - self._runtime.monotonic()))
                now = self._runtime.monotonic()
                with self._lock:
                    watch = self._watch
                if watch is not None:
                    self._tick(client, watch, now)
                if now - beaten >= BEAT and self._active:
                    beaten = now
                    self._beat(client)
        except CoordinatorLost as error:
            self.lost = error

    def _beat(self, client: Client) -> None:
        probe = self._probe
        written = probe() if probe is not None else None
        moved = self._runtime.bytes_moved()
        with self._lock:
            if not self._active:
                return
            if moved - self._moved >= TRICKLE:
                self._moved = moved
                self._state["moves"] += 1
            if written is not None and written != self._state.get("bytes"):
                self._state["bytes"] = written
                self._state["moves"] += 1
            if self._watch is not None:
                self._state["moves"] += 1
            state = dict(self._state)
        client.set(beat_key(self._rank), state)

    def _tick(self, client: Client, watch: Watch, now: float) -> None:
        if watch.abort is not None and client.has(watch.abort):
            watch.seen_abort = now if watch.seen_abort is None else watch.seen_abort
            if now - watch.seen_abort >= GRACE:
                missing = self._still_missing(client, watch)
                self._find_lost(client, watch, missing)  # whose end may be what the abort is about
                self._fill(client, watch, missing)
                return
        if now < watch.next_look:
            return
        watch.next_look = now + max(0.25, len(watch.keys) / 2000)
        missing = self._still_missing(client, watch)
        if not missing:
            return
        self._find_lost(client, watch, missing)
        if now - watch.began >= min(watch.timeout, BEAT):
            self._read_beats(client, watch, missing, now)
        watch.timed_out = [r for r in missing if now - watch.moved.get(r, watch.began) > watch.timeout]
        if watch.absent():
            self._fill(client, watch, missing)
        elif now - watch.began > watch.next_line:
            watch.next_line += SAY
            log.info("%s: still waiting for %s", watch.what, describe({r: watch.beats.get(r) for r in missing}))

    def _find_lost(self, client: Client, watch: Watch, missing: list[int]) -> None:
        for rank in missing:
            identity = self.identities.get(rank)
            if identity is not None and self._runtime.alive(identity) is False:
                watch.lost.append(rank)
            elif client.has(bye_key(rank)) and not client.has(watch.keys[rank]):  # what it reported came before its goodbye
                watch.left.append(rank)

    def _still_missing(self, client: Client, watch: Watch) -> list[int]:
        return [rank for rank, key in watch.keys.items() if not client.has(key)]

    def _read_beats(self, client: Client, watch: Watch, missing: list[int], now: float) -> None:
        for rank in missing:
            beat = _heard(client, rank)
            if beat is None:
                continue
            before = watch.beats.get(rank)
            watch.beats[rank] = beat
            if watch.progress and before is not None and before.get("moves") != beat.get("moves"):
                watch.moved[rank] = now

    def _fill(self, client: Client, watch: Watch, missing: list[int]) -> None:
        for rank in missing:
            client.claim(watch.keys[rank], {"filled": True})
        with self._lock:
            if self._watch is watch:
                self._watch = None


def _heard(client: Client, rank: int) -> dict[str, Any] | None:
    try:
        return client.peek(beat_key(rank))
    except CoordinatorLost:
        raise
    except CoordinationError as error:  # not of our making; the deadlines must still be minded
        log.debug("the heartbeat of rank %d cannot be read: %s", rank, error)
        return None


def describe(beats: dict[int, dict[str, Any] | None], limit: int = 8) -> str:
    """Ranks with host and last phase, for people."""
    parts = []
    for rank in sorted(beats)[:limit]:
        beat = beats[rank] or {}
        text = f"rank {rank}"
        if beat.get("host"):
            text += f" on {beat['host']} (pid {beat.get('pid')})"
        text += f", last seen: {beat.get('phase', 'never')}"
        if beat.get("step") is not None:
            text += f" at step {beat['step']}"
        if beat.get("bytes"):
            text += f", {beat['bytes']} bytes so far"
        parts.append(text)
    if len(beats) > limit:
        parts.append(f"and {len(beats) - limit} more")
    return "; ".join(parts)
