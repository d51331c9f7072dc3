"""One thread's way to the store. The only place that speaks to ``torch.distributed.Store``.

A blocking wait holds its client, so every thread that waits has one of its own. TCPStore's client waits for ever for the
reply of a server that was stopped or whose host went dark; ``Sentry`` ends that (P4).
"""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from distckpt.coordination import marks
from distckpt.coordination.collector import held_off
from distckpt.errors import CoordinationError, CoordinatorLost
from distckpt.runtime import Runtime

VALUE_LIMIT = 64 << 20
SILENCE = 60.0
"""Seconds after which a store that does not answer counts as gone."""
_FOREVER = timedelta(days=30)
_JSON = json.JSONDecoder()


class RawStore(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def num_keys(self) -> int: ...
    def add(self, key: str, amount: int, /) -> int: ...


def encode(value: dict[str, Any]) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    if len(text) > VALUE_LIMIT:
        raise CoordinationError(f"a report of {len(text)} bytes is over the control plane's limit of {VALUE_LIMIT}; "
                                "write fewer, larger files per rank")
    return text


def decode(data: bytes) -> dict[str, Any]:
    """What ``encode`` was given. JSON and nothing else: a value that somebody else put there is an error, and no code."""
    if len(data) > VALUE_LIMIT:
        raise CoordinationError(f"a report of {len(data)} bytes came, over the control plane's limit of {VALUE_LIMIT}: no rank "
                                f"of this job sends that: {data[:80]!r}")
    try:
        text = data.decode()
        value, end = _JSON.raw_decode(text)  # ``loads`` takes twice as long: it looks for spaces, which ``encode`` puts nowhere
        if end != len(text):
            raise ValueError(f"more follows at character {end}")
    except (ValueError, RecursionError) as error:
        raise CoordinationError(f"a report is not JSON ({error}): {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise CoordinationError(f"a report is not an object: {data[:80]!r}")
    return value


class Client:
    """Keys live under ``prefix``, which carries the run's random token."""

    def __init__(self, raw: RawStore, prefix: str, where: str = "", sentry: Sentry | None = None) -> None:
        self._raw: RawStore = marks.around(raw)
        self._prefix, self._where, self._sentry = prefix, where, sentry

    @contextmanager
    def _asking(self, timeout: float | None = 0.0) -> Iterator[None]:
        """Around every call into the store; ``timeout``: how long the server itself may take (None: for ever)."""
        sentry = self._sentry if timeout is not None else None
        if sentry is not None:
            sentry.enter((timeout or 0.0) + SILENCE)
        try:
            yield
        except dist.DistStoreError as error:
            if timeout == 0.0 or "timeout" not in str(error).lower():
                raise self._lost(error) from error
            raise
        except dist.DistError as error:
            raise self._lost(error) from error
        finally:
            if sentry is not None:
                sentry.leave()

    def _lost(self, error: Exception) -> CoordinatorLost:
        return CoordinatorLost(f"the store of rank 0{self._where} is gone ({str(error).splitlines()[0][:200]}): rank 0 has "
                               "ended, or the network to it failed; see rank 0's log for why. A save in flight is settled "
                               "at the next start")

    def set(self, key: str, value: dict[str, Any]) -> None:
        text = encode(value)
        with self._asking():
            self._raw.set(self._prefix + key, text)

    def claim(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Put ``value`` under ``key`` if nothing stands there; what stands there afterwards. The first writer wins."""
        text = encode(value)
        with self._asking():
            standing = self._raw.compare_set(self._prefix + key, "", text)
        return decode(standing)

    def get(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """The values of keys that are known to exist."""
        with self._asking():
            found = self._raw.multi_get([self._prefix + key for key in keys])
        with held_off(len(keys)):
            return [decode(data) for data in found]

    def has(self, key: str) -> bool:
        with self._asking():
            return bool(self._raw.check([self._prefix + key]))

    def peek(self, key: str) -> dict[str, Any] | None:
        """The value of ``key`` if it exists now. Only for keys that nobody deletes."""
        return self.get([key])[0] if self.has(key) else None

    def wait(self, keys: Sequence[str], timeout: float | None) -> bool:
        """Whether all ``keys`` exist within ``timeout`` seconds (None: as long as it takes)."""
        timeout = None if timeout is None else max(timeout, 0.001)
        span = _FOREVER if timeout is None else timedelta(seconds=timeout)
        try:
            with self._asking(timeout):
                self._raw.wait([self._prefix + key for key in keys], span)
        except dist.DistStoreError:
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        with self._asking():
            for key in keys:
                self._raw.delete_key(self._prefix + key)

    def ticket(self, name: str) -> int:
        """A number that nobody else gets: 0, 1, 2 ... The order of messages that several ranks send to one."""
        with self._asking():
            return int(self._raw.add(f"{self._prefix}ticket/{name}", 1)) - 1

    def tickets(self, name: str) -> int:
        """How many were given out."""
        with self._asking():
            return int(self._raw.add(f"{self._prefix}ticket/{name}", 0))

    def key_count(self) -> int:
        """How many keys the whole store holds."""
        return int(self._raw.num_keys())


ClientSource = Callable[[], Client]

_connecting = threading.Lock()


def sockets_to(port: int, connect: Callable[[], Any]) -> tuple[Any, list[int]]:
    """The store that ``connect`` made, and the descriptors of its sockets to ``port``; none on a system that lists none."""
    with _connecting:
        before = _sockets(port)
        raw = connect()
        return raw, [fd for inode, fd in _sockets(port).items() if inode not in before]


def _sockets(port: int) -> dict[int, int]:
    """{inode: descriptor} of the sockets of this process that are connected to ``port``."""
    found = {}
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        try:
            seen = os.fstat(int(name))
            if stat.S_ISSOCK(seen.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.getpeername()[1] == port:
                        found[seen.st_ino] = int(name)
        except (OSError, IndexError):
            continue  # closed meanwhile, not connected, or not of the internet
    return found


class Sentry:
    """Watches one client: a call that outlasts its limit has its socket shut down under it, and so fails."""

    def __init__(self, descriptors: Sequence[int], runtime: Runtime, line: str) -> None:
        self._descriptors, self._runtime, self.line = descriptors, runtime, line
        self._until: float | None = None
        self._watchman = Watchman.of_this_process(runtime)
        self._watchman.sentries.add(self)

    def enter(self, limit: float) -> None:
        self._until = self._runtime.monotonic() + limit
        self._watchman.wake()

    def leave(self) -> None:
        self._until = None

    def overdue(self, now: float) -> bool | None:
        """Whether the call under way is over its limit; None when there is none."""
        until = self._until
        return None if until is None else now > until

    def cut(self) -> None:
        descriptors, self._descriptors = self._descriptors, ()
        port = int(self.line.rpartition(":")[2])
        for fd in descriptors:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
                if found.getpeername()[1] == port:  # and not what took the number of a client that was closed meanwhile
                    found.shutdown(socket.SHUT_RDWR)


class Watchman:
    """The one thread of a process that looks after its sentries, once a second. It sleeps while no call is under way."""

    _present: Watchman | None = None

    def __init__(self, runtime: Runtime) -> None:
        self.sentries: weakref.WeakSet[Sentry] = weakref.WeakSet()
        self._runtime, self._pid = runtime, os.getpid()
        self._awake = runtime.event()
        runtime.thread("sentry", self._run)

    @classmethod
    def of_this_process(cls, runtime: Runtime) -> Watchman:
        if cls._present is None or cls._present._pid != os.getpid():
            cls._present = cls(runtime)
        return cls._present

    def wake(self) -> None:
        if not self._awake.is_set():
            self._awake.set()

    def _run(self) -> None:
        while True:
            self._awake.wait()
            self._awake.clear()
            busy = True
            while busy:
                self._runtime.sleep(1.0)
                now = self._runtime.monotonic()
                asking = [(sentry, overdue) for sentry in list(self.sentries) if (overdue := sentry.overdue(now)) is not None]
                busy = bool(asking)
                dead = {sentry.line for sentry, overdue in asking if overdue}
                for sentry in list(self.sentries) if dead else ():
                    if sentry.line in dead:  # the listener as well, which may wait for ever: it must end before its process
                        sentry.cut()
