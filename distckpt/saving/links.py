"""``dedup="link"``: a file whose bytes the newest checkpoint has already gets a second name instead of being written again.

Why this is as safe as writing (S25; tests/unit/test_links.py, tests/proof/test_links.py):

* *The same bytes.* The digest is of what is in memory in this save, and is compared with the one in the marker of a committed
  checkpoint; nothing is remembered from the save before. The twin is not read again: where its bytes rotted on the disk, every
  checkpoint that links it is hit, and ``verify`` finds that in each. What is known to be bad (rejected, in doubt, a file of
  another size) is never linked, so the next save writes a fresh copy.
* *Still that checkpoint.* From rank 0's choice to the commit nobody puts another one under its name: a ``replace`` of it is
  refused in this process (``OwnedRoot.sources``; of several domains rank 0 publishes first, or none), and no other process may
  write in the root. Rotation of this process passes over it, too. Who takes it away all the same takes away a name: the link
  fails, and the bytes are written; or it is there, and keeps the file.
* *Durable before the ack.* The bytes are synced through the new name, which costs nothing where they are on the disk and makes
  those durable that were only copied into the root (S8); the directory of the new name is synced with those of the written
  files, before this rank acks. A crash before the commit leaves a second name in staging; to sweep it takes nothing from the
  first.
* *Nobody writes through it.* Only files of our own writer, which carry this rank's number or come from a directory of its own,
  are linked; a name whose path was given out before is written, the path of a linked name is not given out, and every open
  for writing in staging makes a new file (O_EXCL).
"""

from __future__ import annotations

import errno
import logging
import os

from distckpt import catalog
from distckpt.durable import GONE, Files
from distckpt.errors import MarkerError
from distckpt.marker import FileEntry

log = logging.getLogger(__name__)

_PASSED_OVER = (*GONE, errno.ESTALE, errno.ELOOP)


class Twins:
    """The files of one committed checkpoint, to be linked. ``attempt`` is None where there is none yet, or none to be trusted."""

    def __init__(self, directory: str = "", attempt: str | None = None) -> None:
        self._directory, self._attempt = directory, attempt
        self._entries: dict[str, FileEntry] | None = None

    def has(self, files: Files, relative: str) -> bool:
        """Whether there is a file of this name, and so a digest to compare with."""
        if self._entries is None:
            self._entries = self._read(files)
        return relative in self._entries

    def _read(self, files: Files) -> dict[str, FileEntry]:
        if self._attempt is None:
            return {}
        try:
            found = catalog.read_marker(files, self._directory)
        except (OSError, MarkerError) as error:
            log.debug("no file is linked: %s", error)
            return {}
        return {entry.path: entry for entry in found.files} if found.head.attempt == self._attempt else {}

    def link(self, files: Files, relative: str, size: int, digest: str, path: str) -> bool:
        """Whether ``path`` is now a name of the file ``relative``, which has these bytes by its marker; they are durable then.

        False, and nothing stands at ``path``, where they differ, the file is not whole or gone, or the file system has no
        links. FileExistsError when ``path`` is taken.
        """
        entry = (self._entries or {}).get(relative)
        if entry is None or (entry.size, entry.digest) != (size, digest):
            return False
        if catalog.check_file(files, self._directory, entry) is not None:
            return False
        source = os.path.join(self._directory, relative)
        try:
            if not files.link(source, path):
                return False
        except FileExistsError:
            if files.stat(path).inode != files.stat(source).inode:
                raise
            # ours: NFS sent the call again, whose first reply was lost
        except OSError as error:
            if error.errno in _PASSED_OVER:
                return False
            raise
        files.fsync(path)  # what was copied into the root by other means may not be on the disk (S8)
        return True


class Nowhere:
    """Where bytes go that are only digested."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        return len(data)

    def start_writeback(self, offset: int, length: int) -> None:
        return None

    def await_writeback(self, offset: int, length: int) -> None:
        return None

    def drop_cache(self, offset: int, length: int) -> None:
        return None

    def fsync(self) -> None:
        return None

    def close(self) -> None:
        return None
