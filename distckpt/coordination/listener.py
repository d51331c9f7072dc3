"""One thread per rank that answers while the main thread is stuck: it sends this rank's stacks when asked.

It blocks in a single wait on its next control key and costs nothing until one is written.
"""

from __future__ import annotations

import logging

from distckpt.coordination.store import Client, ClientSource
from distckpt.errors import CoordinatorLost
from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

_STACKS_LIMIT = 60_000


def control_key(rank: int, number: int) -> str:
    return f"control/{rank}/{number}"


def stacks_key(rank: int, number: int) -> str:
    return f"stacks/{rank}/{number}"


class Listener:
    """Runs until told ``bye``, or until the store is gone."""

    def __init__(self, source: ClientSource, rank: int, runtime: Runtime) -> None:
        self._source, self._rank, self._runtime = source, rank, runtime
        self._number = 0
        self._thread = runtime.thread("listener", self._run)

    def _run(self) -> None:
        try:
            client = self._source()
            while True:
                number = self._number
                key = control_key(self._rank, number)
                if not client.wait([key], None):
                    continue
                message = client.get([key])[0]
                client.delete([key])
                if message.get("op") == "bye":
                    return
                if message.get("op") == "stacks":
                    client.set(stacks_key(self._rank, number), {"stacks": self._runtime.stacks()[-_STACKS_LIMIT:]})
                self._number = number + 1
        except CoordinatorLost as error:
            log.debug("rank %d's listener ends: %s", self._rank, error)

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
    """Rank 0's side: numbers the messages to each listener."""

    def __init__(self, client: Client, runtime: Runtime) -> None:
        self._client, self._runtime = client, runtime
        self._numbers: dict[int, int] = {}

    def send(self, rank: int, op: str) -> int:
        number = self._numbers.get(rank, 0)
        self._numbers[rank] = number + 1
        self._client.set(control_key(rank, number), {"op": op})
        return number

    def stacks(self, ranks: list[int], timeout: float = 2.0) -> dict[int, str]:
        """The stacks of those of ``ranks`` that answer within ``timeout`` seconds; a dead or stopped process does not."""
        asked = {rank: self.send(rank, "stacks") for rank in ranks}
        deadline = self._runtime.monotonic() + timeout
        found = {}
        for rank, number in asked.items():
            key = stacks_key(rank, number)
            while not self._client.has(key) and self._runtime.monotonic() < deadline:
                self._runtime.sleep(0.02)
            if self._client.has(key):
                found[rank] = str(self._client.get([key])[0].get("stacks", ""))
                self._client.delete([key])
        return found
