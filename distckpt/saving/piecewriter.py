"""A file of ours while it is written: digested, paced, stopped when another rank has failed, and durable when it is synced."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import IO, Any, cast

from distckpt import digest as _digest
from distckpt.durable import PIECE, Output

PACE = 8 << 20
_BEHIND = 32 << 20
_GATHERED = 64 << 10


class PeerFailed(Exception):
    """Another rank failed, so this one stops writing. Never leaves the library."""


class PieceWriter:
    """A binary file that digests what it is given, paces the kernel, and stops when another rank has failed.

    Bytes pass straight from the caller's memory: digested while they are hot, written, handed to the disk every 8 MB and awaited
    32 MB behind, so that the fsync at the end finds little left. Their pages are given back then, so that a save does not push
    the training's data out of memory, unless they are to be ``kept`` for who reads the file next. Only small writes are copied,
    and passed on by the dozen: an archive makes five of every tensor.

    What is gathered has not been written, so an error of it may come to a later call than the one that brought it, and bytes of
    calls that succeeded are missing then. So the first error is the last thing that happens to the file: whatever is called
    after it raises it again, and nothing more is written (tests/unit/test_piecewriter.py).

    ``held`` is given the closed file and syncs it with others; without it ``close`` does.
    """

    def __init__(self, out: Output, path: str, algorithm: str | None, between: Callable[[int], None], kept: bool = False,
                 held: Callable[[PieceWriter], None] | None = None) -> None:
        self._out, self.path, self._between, self._kept = out, path, between, kept
        self._digest = _digest.Running(algorithm) if algorithm else None
        self.size = 0
        self._small = bytearray()
        self._started = self._awaited = 0
        self._held = held
        self.durable = False
        self._closed = self._released = False
        self.failure: BaseException | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._closed:
            raise OSError(errno.EBADF, "written to after it was closed", self.path)
        view = memoryview(data).cast("B")
        if len(view) + len(self._small) > _GATHERED:
            self.flush()
        if self.failure is not None:
            raise self.failure
        if len(view) > _GATHERED:
            self._write(view)
        else:
            self._small += view  # a copy: the caller may use its memory again
        return len(view)

    def flush(self) -> None:
        """Everything that was given is in the file then, and in front of what comes; durable it is when the file is synced."""
        if self.failure is not None:
            raise self.failure
        small, self._small = self._small, bytearray()
        self._write(memoryview(small))

    def _write(self, view: memoryview) -> None:
        try:
            for start in range(0, len(view), PIECE):
                self._piece(view[start:start + PIECE])
        except BaseException as error:  # a signal's, too: some of these bytes are in the file and some are not
            self.failure = error
            raise

    def _piece(self, piece: memoryview) -> None:
        if self._digest is not None:
            self._digest.update(piece)
        self._out.write(piece)
        self.size += len(piece)
        if self.size - self._started >= PACE:
            self._out.start_writeback(self._started, self.size - self._started)
            self._started = self.size
            behind = self._started - _BEHIND
            if behind > self._awaited:
                self._out.await_writeback(self._awaited, behind - self._awaited)
                if not self._kept:
                    self._out.drop_cache(self._awaited, behind - self._awaited)
                self._awaited = behind
        self._between(self.size)

    def tell(self) -> int:
        return self.size + self.gathered

    @property
    def gathered(self) -> int:
        """Bytes that are not in the file yet. Any thread may ask."""
        return len(self._small)

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    @property
    def digest(self) -> str | None:
        return self._digest.text if self._digest is not None else None

    def close(self) -> None:
        """Nothing more is written; it is durable now, or where it is ``held`` with others when they are."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
            if self._held is not None and self.size > self._started:
                self._out.start_writeback(self._started, self.size - self._started)
        except BaseException as error:
            self.failure = error
            self.release()
            raise
        if self._held is None:
            self.sync()
        else:
            self._held(self)

    def sync(self) -> None:
        """Durable bytes, then a checked close: both may report a full disk, and then the attempt is over."""
        try:
            try:
                self._out.fsync()
            finally:
                self.release()
        except BaseException as error:
            self.failure = error
            raise
        self.durable = True

    def release(self) -> None:
        """Give the descriptor back, once, durable or not."""
        if not self._released:
            self._released = True
            self._out.close()

    @property
    def waiting(self) -> int:
        """Bytes that the disk may not have yet."""
        return self.size - self._awaited

    def abandon(self) -> None:
        if not self._closed:
            self._closed, self._small = True, bytearray()
            self.release()

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None and self.failure is not None:  # whoever wrote has swallowed it and reports success
            self.abandon()
            raise self.failure
        if kind is None:
            self.close()
        else:
            self.abandon()
            if self.failure is not None and value is not self.failure:
                raise self.failure from value  # torch's zip writer hides it behind a complaint about positions


def as_file(writer: PieceWriter) -> IO[bytes]:
    """``writer`` under the type that typed libraries ask for; they use ``write`` and ``flush`` only."""
    return cast("IO[bytes]", writer)
