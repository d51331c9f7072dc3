"""What goes wrong in one run: the n-th operation of one rank, and how."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from distckpt.testing import faults
from distckpt.testing.faults import READS, WRITES, Fault, Operation

ERRNOS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "EACCES", "ESTALE", "EINTR", "EMFILE")
LIES = ("open", "write", "fsync", "close", "overwrite", "append", "fsync_file", "fsync_dir", "mkdir")
"""A disk that says yes and did nothing. No file system lies about names it has taken, moved or removed."""
SLOW = 0.3

KINDS = ("error", "late error", "read error", "kill", "kill after", "stop", "short", "partial", "lie", "slow")


@dataclass(frozen=True)
class Strike:
    """``kind``: one of KINDS. "late error": the operation happened and its reply was lost. "short": half of a write is on
    disk and the whole was reported. "partial": the kernel takes half of a write at a time, as it may. ``forever``: every
    operation from the n-th on."""

    rank: int
    kind: str
    n: int
    number: str = ""
    forever: bool = False

    @property
    def counts(self) -> tuple[str, ...]:
        """The operations among which the n-th is struck."""
        return {"read error": READS, "lie": LIES, "short": ("write", "overwrite", "append"), "partial": ("write", "append"),
                }.get(self.kind, WRITES)

    def among(self, operations: Mapping[str, int]) -> int:
        """How many of ``operations``, by name, it is counted among."""
        return sum(operations.get(op, 0) for op in self.counts)

    def fault(self, note: Callable[[Operation], None]) -> Fault:
        """For ``FaultyFiles``. ``note`` hears of every operation that is struck, before it is."""
        number = getattr(errno, self.number) if self.number else errno.EIO
        ops = self.counts
        made = {
            "error": lambda: faults.fail(number, self.n, op=ops, forever=self.forever),
            "late error": lambda: faults.fail(number, self.n, op=ops, after=True),
            "read error": lambda: faults.fail(number, self.n, op=ops, forever=self.forever),
            "kill": lambda: faults.kill(self.n, op=ops),
            "kill after": lambda: faults.kill(self.n, op=ops, after=True),
            "short": lambda: faults.shorten(self.n, op=ops),
            "lie": lambda: faults.lie(self.n, op=ops, forever=self.forever),
            "stop": lambda: faults.call(lambda _: os.kill(os.getpid(), signal.SIGSTOP), self.n, op=ops),
            "partial": lambda: faults.call(lambda _: _write_in_halves(), self.n, op=ops),
            "slow": lambda: faults.call(lambda _: time.sleep(SLOW), self.n, op=ops),  # the fault itself, it orders nothing
        }[self.kind]()
        made.note = note
        return made

    def stop_there(self, note: Callable[[Operation], None]) -> Fault:
        """In its place, for somebody else to strike: the thread that is about to do the n-th operation stops its process."""
        made = faults.call(lambda _: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP), self.n, op=self.counts)
        made.note = note
        return made

    def __str__(self) -> str:
        what = " ".join(part for part in (self.kind, self.number, "from then on" if self.forever else "") if part)
        return f"{what} at operation {self.n} of rank {self.rank}"


def every() -> Iterator[tuple[str, str, bool]]:
    """(kind, errno, forever) of all there are."""
    for number in ERRNOS:
        yield "error", number, False
        yield "error", number, True
    for number in ("EIO", "ESTALE"):
        yield "late error", number, False
    for number in ("EIO", "ESTALE", "EACCES"):
        yield "read error", number, False
    yield "read error", "EMFILE", True
    yield "lie", "", True
    for kind in ("kill", "kill after", "stop", "short", "partial", "lie", "slow"):
        yield kind, "", False


def _write_in_halves() -> None:
    """The next ``os.write`` of this thread takes half of what it is given. For the rest of this process's life, which is
    one run's."""
    real, me = os.write, threading.get_ident()
    armed = [True]

    def write(fd: int, data: bytes | memoryview) -> int:
        if armed and threading.get_ident() == me and len(data) > 1:
            armed.clear()
            return real(fd, data[:len(data) // 2])
        return real(fd, data)

    os.write = write  # type: ignore[assignment]
