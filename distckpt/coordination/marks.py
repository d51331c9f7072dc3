"""Which message came before which, for a trace of system calls: with DISTCKPT_TRACE_MARKS=1, and only then.

A trace of several ranks shows one interleaving, and not which orders were necessary. So each message leaves a mark: a write
to a descriptor that is never open, which fails, does nothing, and stands in the trace with its text. "HB send KEY" comes
before the message goes; "HB recv KEY ..." after it is known; "HB lost KEY" after a claim that somebody else had won.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

VARIABLE = "DISTCKPT_TRACE_MARKS"
DESCRIPTOR = 1023
"""Never open: a write to it fails, costs nothing, and stands in the trace with its text."""


def mark(text: str) -> None:
    """Put ``text`` into the trace. Local, at any time, on any thread."""
    with suppress(OSError):  # EBADF is what makes it harmless
        os.write(DESCRIPTOR, text.encode())


def around(raw: Any) -> Any:
    """``raw``, or in a traced run the same store with a mark for each message."""
    return _Marked(raw) if os.environ.get(VARIABLE) == "1" else raw


class _Marked:
    """A ``RawStore``. What it does not know goes to the store without a mark."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def set(self, key: str, value: str | bytes) -> None:
        mark(f"HB send {key}")
        self._raw.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        mark(f"HB send {key}")
        standing: bytes = self._raw.compare_set(key, expected, desired)
        if standing != desired.encode():
            mark(f"HB lost {key}")
        return standing

    def add(self, key: str, amount: int) -> int:
        mark(f"HB send {key}")
        total = int(self._raw.add(key, amount))
        mark(f"HB recv {key}")
        return total

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found: list[bytes] = self._raw.multi_get(keys)
        mark(f"HB recv {' '.join(keys)}")
        return found

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._raw.wait(keys, timeout)
        mark(f"HB recv {' '.join(keys)}")

    def check(self, keys: list[str]) -> bool:
        there = bool(self._raw.check(keys))
        if there:
            mark(f"HB recv {' '.join(keys)}")
        return there
