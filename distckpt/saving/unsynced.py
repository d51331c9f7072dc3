"""Files that were closed and are not durable yet: synced by the dozen, since a disk that is asked one by one is idle in between.

Each is synced by the descriptor that wrote it, which is held open until then: an error of its bytes is told to that one even
where the kernel has dropped what it knew of the file (``pagecache``). Nothing is acknowledged before: ``RankFiles.finish`` syncs
what is left, and refuses a file that is not durable (tests/unit/test_unsynced.py).
"""

from __future__ import annotations

import logging

from distckpt.runtime import Runtime
from distckpt.saving.piecewriter import PieceWriter
from distckpt.together import together

log = logging.getLogger(__name__)

_FILES = 64
_BYTES = 32 << 20


class Unsynced:
    """Held until there are 64 of them, or 32 MB that may not be on the disk: neither descriptors nor memory run out."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._writers: list[PieceWriter] = []
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._writers)

    def hold(self, writer: PieceWriter) -> None:
        self._writers.append(writer)
        self._waiting += writer.waiting
        if len(self._writers) >= _FILES or self._waiting > _BYTES:
            self.sync()

    def sync(self) -> None:
        """Every file that was held is durable, or the error of one that is not is raised; none is held then."""
        writers = self._taken()
        try:
            together(self._runtime, PieceWriter.sync, writers)
        finally:
            _release(writers)

    def release(self) -> None:
        """Their attempt is over, and nobody will ask whether they are durable."""
        _release(self._taken())

    def _taken(self) -> list[PieceWriter]:
        writers, self._writers, self._waiting = self._writers, [], 0
        return writers


def _release(writers: list[PieceWriter]) -> None:
    """All of them, whatever a close has to say: what ended the attempt is told already, and by that the file."""
    for writer in writers:
        try:
            writer.release()
        except OSError as error:
            log.debug("closing what is given up: %s", error)
