"""One thread's way to the store. The only place that speaks to ``torch.distributed.Store``.

A blocking wait holds its client, so every thread that waits has one of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from distckpt.errors import CoordinationError, CoordinatorLost

VALUE_LIMIT = 64 << 20
_FOREVER = timedelta(days=30)


class RawStore(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def num_keys(self) -> int: ...


def encode(value: dict[str, Any]) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    if len(text) > VALUE_LIMIT:
        raise CoordinationError(f"a report of {len(text)} bytes is over the control plane's limit of {VALUE_LIMIT}; "
                                "write fewer, larger files per rank")
    return text


def decode(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise CoordinationError(f"a report is not an object: {data[:80]!r}")
    return value


class Client:
    """Keys live under ``prefix``, which carries the run's random token."""

    def __init__(self, raw: RawStore, prefix: str, where: str = "") -> None:
        self._raw, self._prefix, self._where = raw, prefix, where

    def _lost(self, error: Exception) -> CoordinatorLost:
        return CoordinatorLost(f"the store of rank 0{self._where} is gone ({str(error).splitlines()[0][:200]}): rank 0 has "
                               "ended, or the network to it failed; see rank 0's log for why. A save in flight is settled "
                               "at the next start")

    def set(self, key: str, value: dict[str, Any]) -> None:
        try:
            self._raw.set(self._prefix + key, encode(value))
        except dist.DistError as error:
            raise self._lost(error) from error

    def claim(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Put ``value`` under ``key`` if nothing stands there; what stands there afterwards. The first writer wins."""
        try:
            return decode(self._raw.compare_set(self._prefix + key, "", encode(value)))
        except dist.DistError as error:
            raise self._lost(error) from error

    def get(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """The values of keys that are known to exist."""
        try:
            return [decode(data) for data in self._raw.multi_get([self._prefix + key for key in keys])]
        except dist.DistError as error:
            raise self._lost(error) from error

    def has(self, key: str) -> bool:
        try:
            return bool(self._raw.check([self._prefix + key]))
        except dist.DistError as error:
            raise self._lost(error) from error

    def peek(self, key: str) -> dict[str, Any] | None:
        """The value of ``key`` if it exists now. Only for keys that nobody deletes."""
        return self.get([key])[0] if self.has(key) else None

    def wait(self, keys: Sequence[str], timeout: float | None) -> bool:
        """Whether all ``keys`` exist within ``timeout`` seconds (None: as long as it takes)."""
        span = _FOREVER if timeout is None else timedelta(seconds=max(timeout, 0.001))
        try:
            self._raw.wait([self._prefix + key for key in keys], span)
        except dist.DistNetworkError as error:
            raise self._lost(error) from error
        except dist.DistStoreError as error:
            if "timeout" not in str(error).lower():
                raise self._lost(error) from error
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        try:
            for key in keys:
                self._raw.delete_key(self._prefix + key)
        except dist.DistError as error:
            raise self._lost(error) from error

    def key_count(self) -> int:
        """How many keys the whole store holds."""
        return int(self._raw.num_keys())


ClientSource = Callable[[], Client]
