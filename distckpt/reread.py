"""A file whose digest was found right, read again: what comes out is what was digested, whoever writes into it meanwhile.

Nothing of a file is used before its whole digest is known, so its bytes are read twice, and an open file keeps its bytes from
nobody who may write into it in place. So each piece is compared again, before any of it is handed out. This costs no second
digest in the first reading: the state of the digest before a piece and its text after it say which bytes were in between
(``digest.Trail``). The algorithm is the manifest's: SHA-256 holds who does it on purpose as well.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from distckpt.beneath import named
from distckpt.digest import Trail
from distckpt.durable import Opened, read_at

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Seekable(io.RawIOBase):
    """A position in ``size`` bytes, for a reader of them."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class Reread(Seekable):
    """``file``, of ``size`` bytes, closed with this. ``changed``: the error for bytes that are not those of ``trail``.

    It has no ``fileno``: whoever reads by that would pass the comparison by. ``take`` may be called by several threads at once.
    What a reading raised, closing raises again: torch's reader of zips makes "read of closed file" of it.
    """

    def __init__(self, file: Opened, path: str, size: int, trail: Trail, changed: Callable[[], Exception]) -> None:
        super().__init__(size)
        self._file, self._path, self._trail, self._changed = file, path, trail, changed
        self._held, self._view = -1, memoryview(b"")
        self._room: memoryview | None = None
        self._failed: Exception | None = None
        self.piece = trail.piece

    def take(self, index: int, room: memoryview, wait: bool = True) -> memoryview | None:
        """The piece ``index``, read into ``room`` and compared. None, with ``wait=False``, when not all of it is in memory."""
        start = index * self.piece
        room = room[:min(self.piece, self._size - start)]
        with named(self._path):
            count = read_at(self._file, room, start, wait)
        if count < len(room) and not wait:
            return None
        if count < len(room) or not self._trail.passes(index, room):
            raise self._changed()
        return room

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        room = memoryview(buffer).cast("B")
        index, skip = divmod(self._at, self.piece)
        if not len(room) or self._at >= self._size:
            return 0
        if index != self._held:
            if self._room is None:
                self._room = memoryview(bytearray(min(self.piece, self._size)))
            self._held = -1  # while it is filled it holds neither
            try:
                found = self.take(index, self._room)
            except Exception as error:  # raised again by whoever passed it on, and by close
                self._failed = error
                raise
            assert found is not None
            self._held, self._view = index, found
        count = min(len(room), len(self._view) - skip)
        room[:count] = self._view[skip:skip + count]
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            with self._file:
                super().close()
            if self._failed is not None:
                raise self._failed
