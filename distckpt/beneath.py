"""Opening below a directory without following a link, and a directory held open while things are removed from it.

By ``openat2`` where the kernel has it, else component by component. What is below the directory may belong to somebody
who swaps a name while we look: what was checked on a descriptor is used on the same descriptor. Part of the seam
``durable``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat as _stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

CLOEXEC = getattr(os, "O_CLOEXEC", 0)
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# Neither a FIFO nor a device may block a rank, or become its terminal, by being opened.
READING = os.O_RDONLY | NOFOLLOW | CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
# To look at something without opening it: no permission is asked and no driver hears of it.
LOOKING = getattr(os, "O_PATH", os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)) | NOFOLLOW | CLOEXEC
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""How a kernel, or a file system, says that it does not have a call."""
DEPTH = 64
"""Directories in directories, at most: neither recursion nor descriptors run out below a hostile tree."""

_OPENAT2 = 437
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 1, 2, 4, 8
_TRIES = 8


class Item(NamedTuple):  # not a dataclass, which takes twice as long to make: rank 0 makes one for every file of all ranks
    """One directory entry; ``kind`` is "dir", "file", "link" or "other"."""

    name: str
    kind: str


def kind_of(mode: int) -> str:
    if _stat.S_ISDIR(mode):
        return "dir"
    if _stat.S_ISREG(mode):
        return "file"
    return "link" if _stat.S_ISLNK(mode) else "other"


class named:
    """The kernel's complaint about a descriptor says nothing of the file, and one below a directory only its last name: whoever
    reads it must know which (I9). Not a ``contextmanager``, which takes four times as long, around each call for each file."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            error.filename = self._path


class _How(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def load_libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


_SYSCALL = getattr(load_libc(), "syscall", None) if sys.platform == "linux" else None


def _openat2(top: int, below: str, flags: int, resolve: int) -> int | None:
    """The descriptor; None where this kernel, or this container's filter, does not have the call."""
    if _SYSCALL is None:
        return None
    how = _How(flags, 0, resolve)
    for _ in range(_TRIES):
        found = _SYSCALL(ctypes.c_long(_OPENAT2), ctypes.c_long(top), ctypes.c_char_p(os.fsencode(below)), ctypes.byref(how),
                         ctypes.c_size_t(ctypes.sizeof(how)))
        if found >= 0:
            return int(found)
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EPERM):
            return None
        if number not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: something was renamed meanwhile
            break
    raise OSError(number, os.strerror(number), below)


def _walk(top: int, below: str, flags: int, one_mount: bool) -> int:
    here = os.dup(top)
    try:
        mount = _mount(here) if one_mount else None
        parts = below.split("/")
        for index, part in enumerate(parts):
            if part in ("", "..", ".") and below != ".":
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), below)
            last = index == len(parts) - 1
            found = os.open(part, flags if last else LOOKING | DIRECTORY, dir_fd=here)
            os.close(here)
            here = found
            if mount is not None and _mount(here) != mount:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), below)
    except BaseException:
        os.close(here)
        raise
    return here


def _mount(fd: int) -> tuple[int, str]:
    """What tells the mount of ``fd`` from others: the device, and a number, since a bind mount has its source's device."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
            number = next((line for line in info if line.startswith("mnt_id:")), "")
    except OSError:
        number = ""
    return os.fstat(fd).st_dev, number


def open_below(top: int, below: str, flags: int, one_mount: bool = False) -> int:
    """A descriptor of ``below``, a relative path, under the directory ``top``. ELOOP when a component is a link, EXDEV when it
    leads out, or with ``one_mount`` across a mount point. With ``LOOKING`` the last component may be a link: it is looked at."""
    resolve = _BENEATH | _NO_SYMLINKS | _NO_MAGICLINKS | (_NO_XDEV if one_mount else 0)
    try:
        found = _openat2(top, below, flags, resolve)
        return _walk(top, below, flags, one_mount) if found is None else found
    except NotADirectoryError:
        if _has_link(top, below):  # with O_DIRECTORY a link is "not a directory"; without it, it would pass for an absence
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), below) from None
        raise


def _has_link(top: int, below: str) -> bool:
    parts = below.split("/")
    for depth in range(1, len(parts) + 1):
        try:
            if _stat.S_ISLNK(os.stat("/".join(parts[:depth]), dir_fd=top, follow_symlinks=False).st_mode):
                return True
        except OSError:
            return False
    return False


@contextmanager
def opened(top: str) -> Iterator[int]:
    """A descriptor of the directory ``top`` itself, which may be reached through links: it is what the caller named."""
    fd = os.open(top, getattr(os, "O_PATH", os.O_RDONLY) | DIRECTORY | CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def scan(where: int | str) -> list[Item]:
    """The entries of a directory, asked afresh from the file system, sorted by name."""
    found = []
    with os.scandir(where) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                kind = "file"
            elif entry.is_dir(follow_symlinks=False):
                kind = "dir"
            else:
                kind = "link" if entry.is_symlink() else "other"
            found.append(Item(entry.name, kind))
    found.sort(key=attrgetter("name"))
    return found


class OpenFolder:
    """A directory that is held by descriptor: whatever its name leads to meanwhile, this is the one that was opened."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self.path = fd, path

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *exc: Any) -> None:
        os.close(self._fd)

    def scan(self) -> list[Item]:
        with named(self.path):
            return scan(self._fd)

    def folder(self, name: str) -> OpenFolder:
        """The directory ``name`` in this one. ELOOP or ENOTDIR when it is none, EXDEV when something is mounted there."""
        path = os.path.join(self.path, name)
        try:
            return OpenFolder(open_below(self._fd, name, READING | DIRECTORY, one_mount=True), path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None

    def unlink(self, name: str) -> None:
        try:  # ``named`` would take as long as the unlink, once for each of thousands
            os.unlink(name, dir_fd=self._fd)
        except OSError as error:
            error.filename = os.path.join(self.path, name)
            raise

    def rmdir(self, name: str) -> None:
        with named(os.path.join(self.path, name)):
            os.rmdir(name, dir_fd=self._fd)


def open_folder(top: str, below: str) -> OpenFolder:
    path = os.path.join(top, below)
    try:
        with opened(top) as root:
            return OpenFolder(open_below(root, below or ".", READING | DIRECTORY, one_mount=True), path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
