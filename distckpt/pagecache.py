"""Hurrying pages to the disk, and out of memory. Hints, left out where there are none: durability comes from the fsync.

But the kernel tells a write error once: to a call that waits, and then the fsync of this descriptor, or of one opened later,
succeeds over the lost bytes (on XFS; ext4 forgets for the latter). So an error that is told here ends the file; a call that only
starts takes none away (tests/crash/test_lost_writeback.py). Part of the seam ``durable``.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from distckpt.beneath import UNSUPPORTED, load_libc

DESCRIPTORS = "/proc/self/fd"
_SYNC_RANGE = getattr(load_libc(), "sync_file_range", None)
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


def can_start() -> bool:
    return _SYNC_RANGE is not None


def _sync_range(fd: int, path: str, offset: int, length: int, flags: int) -> None:
    if _SYNC_RANGE is not None and _SYNC_RANGE(fd, ctypes.c_int64(offset), ctypes.c_int64(length), flags) != 0:
        number = ctypes.get_errno()
        if number not in UNSUPPORTED:
            raise OSError(number, os.strerror(number), path)


def start(fd: int, path: str, offset: int, length: int) -> None:
    _sync_range(fd, path, offset, length, _WRITE)


def wait(fd: int, path: str, offset: int, length: int) -> None:
    _sync_range(fd, path, offset, length, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)


def give_back(fd: int, offset: int, length: int) -> None:
    """Pages that are on the disk leave the page cache. No write error ever comes of it."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def held_open(directory: str) -> list[str]:
    top, found = os.path.realpath(directory) + os.sep, set()
    for number in os.listdir(DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile
            path = os.readlink(f"{DESCRIPTORS}/{number}")
            if path.startswith(top):
                found.add(os.path.join(directory, path[len(top):]))
    return sorted(found)
