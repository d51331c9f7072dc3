"""A directory in memory for what a framework writes before a background save: its own files, not yet in the checkpoint.

Memory must come back although the process is killed, so the files lose their names as soon as the framework has returned:
from then on they live as long as they are open. A process killed in the middle of the framework's writing leaves its
directory; whoever makes the next one on that host removes it, told by a lock that dies with its owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from typing import BinaryIO

_MEMORY = "/dev/shm"
_PREFIX = "distckpt-scratch-"
_LOCK = ".lock"


def default() -> str:
    """Memory where the host has it as a directory, the directory for temporary files elsewhere."""
    return _MEMORY if os.path.isdir(_MEMORY) and os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()


class Scratch:
    """``path``: an empty directory below ``where``. After ``seal`` it is gone, and ``files`` maps each name to its bytes."""

    def __init__(self, where: str) -> None:
        self.where = where
        _sweep(where)
        while True:
            self._top = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=where)
            self._lock = open(os.path.join(self._top, _LOCK), "wb")  # noqa: SIM115 - held until the directory is gone
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.exists(self._lock.name):
                break
            self._lock.close()  # swept by another rank in the moment before it was locked
        self.path = os.path.join(self._top, "files")
        os.mkdir(self.path)
        self.files: dict[str, BinaryIO] = {}

    def full(self) -> bool:
        """Whether there is no room left for even a small file."""
        seen = os.statvfs(self.where)
        return seen.f_bavail * seen.f_frsize < 1 << 20

    def seal(self, source: str, names: list[str]) -> None:
        """Take the files ``names`` of ``source``, a directory below ``path``, and let the directory go."""
        for name in names:
            self.files[name] = open(os.path.join(source, name), "rb")  # noqa: SIM115 - closed by ``close``
        self._remove()

    def close(self) -> None:
        """Give the memory back."""
        self._remove()
        for file in self.files.values():
            file.close()
        self.files = {}

    def _remove(self) -> None:
        if not self._lock.closed:
            shutil.rmtree(self._top, ignore_errors=True)  # what stays, the next sweep removes: the lock goes with this
            self._lock.close()


def _sweep(where: str) -> None:
    """Remove what killed processes of this user left."""
    with os.scandir(where) as entries:
        found = [e.path for e in entries if e.name.startswith(f"{_PREFIX}{os.getuid()}-")]
    for path in found:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(path, _LOCK), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                continue  # its owner lives
            shutil.rmtree(path, ignore_errors=True)
