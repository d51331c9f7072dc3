"""One thread per rank that answers while the main thread is stuck: its stacks when asked, and what a handler is set for.

It blocks in a single wait on its next control key and costs nothing until one is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from distckpt.coordination.store import Client, ClientSource
from distckpt.errors import CoordinationError, CoordinatorLost
from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

_STACKS_LIMIT = 60_000

Handler = Callable[[Client, dict[str, Any]], None]


def control_key(rank: int, number: int) -> str:
    return f"control/{rank}/{number}"


def stacks_key(rank: int, number: int) -> str:
    return f"stacks/{rank}/{number}"


class Listener:
    """Runs until told ``bye``, or until the store is gone."""

    def __init__(self, source: ClientSource, rank: int, runtime: Runtime) -> None:
        self._source, self._rank, self._runtime = source, rank, runtime
        self._number = 0
        self.handlers: dict[str, Handler] = {}
        self.on_lost: Callable[[CoordinatorLost], None] = lambda error: None
        self._thread = runtime.thread("listener", self._run)

    def _run(self) -> None:
        try:
            client = self._source()
            while True:
                number = self._number
                key = control_key(self._rank, number)
                if not client.wait([key], None):
                    continue
                message = self._read(client, key)
                client.delete([key])
                op = message.get("op")
                if op == "bye":
                    return
                if op == "stacks":
                    client.set(stacks_key(self._rank, number), {"stacks": self._runtime.stacks()[-_STACKS_LIMIT:]})
                elif isinstance(op, str) and op in self.handlers:
                    self._handle(client, op, message)
                self._number = number + 1
        except CoordinatorLost as error:
            log.debug("rank %d's listener ends: %s", self._rank, error)
            self.on_lost(error)

    def _read(self, client: Client, key: str) -> dict[str, Any]:
        try:
            return client.get([key])[0]
        except CoordinatorLost:
            raise
        except CoordinationError as error:  # not of our making; this rank must go on answering
            log.warning("rank %d passes over a message: %s", self._rank, error)
            return {}

    def _handle(self, client: Client, op: str, message: dict[str, Any]) -> None:
        try:
            self.handlers[op](client, message)
        except CoordinatorLost:
            raise
        except Exception:  # whatever it is, this rank must go on answering
            log.exception("rank %d cannot answer %.300r", self._rank, message)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def stop(self, client: Client) -> None:
        """End it from this side, whatever rank 0 does. A thread that is still inside the store when the interpreter
        ends aborts the process, and its exit code would hide the error that ended it."""
        try:
            for _ in range(5):  # a request of rank 0's may take the same key at the same moment
                client.set(control_key(self._rank, self._number), {"op": "bye"})
                self._thread.join(0.5)
                if not self._thread.is_alive():
                    return
        except CoordinatorLost:
            self._thread.join(1.0)  # its own wait has failed as well


class Caller:
    """Rank 0's side: numbers the messages to each listener. Several threads send, each with its own client."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.lock()
        self._numbers: dict[int, int] = {}

    def send(self, client: Client, rank: int, op: str, data: dict[str, Any] | None = None) -> int:
        with self._lock:
            number = self._numbers.get(rank, 0)
            self._numbers[rank] = number + 1
        client.set(control_key(rank, number), {"op": op, **(data or {})})
        return number

    def stacks(self, client: Client, ranks: list[int], timeout: float = 2.0) -> dict[int, str]:
        """The stacks of those of ``ranks`` that answer within ``timeout`` seconds; a dead or stopped process does not."""
        asked = {rank: self.send(client, rank, "stacks") for rank in ranks}
        deadline = self._runtime.monotonic() + timeout
        found = {}
        for rank, number in asked.items():
            key = stacks_key(rank, number)
            while not client.has(key) and self._runtime.monotonic() < deadline:
                self._runtime.sleep(0.02)
            if client.has(key):
                found[rank] = str(client.get([key])[0].get("stacks", ""))
                client.delete([key])
        return found
