"""The system calls that matter; nothing else in the package makes them.

Each method of ``Files`` is one call to the kernel (one operation that can fail, or be the last one before a kill),
so that a test can fail, kill or reorder exactly one of them. What is composed of several stands in ``ordered``.

An fsync that failed condemns its file: the kernel may have dropped the pages and a second fsync would succeed over
them, so nothing here ever retries one. ``close`` is checked too (NFS reports a full disk there).
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import re
import stat as _stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from distckpt import beneath, pagecache
from distckpt.beneath import CLOEXEC, DIRECTORY, LOOKING, NOFOLLOW, READING, UNSUPPORTED, kind_of, load_libc, named
from distckpt.beneath import Item as Item

T = TypeVar("T")
PIECE = 2 << 20
Opened = io.BufferedReader | io.BytesIO
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_PREADV = getattr(os, "preadv", None)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_STALE = 3
_OCTAL = re.compile(r"\\([0-7]{3})")
_NETWORK = ("nfs", "nfs4", "lustre", "ceph", "gpfs", "mmfs", "beegfs", "wekafs", "cifs", "smb3", "smbfs", "9p", "virtiofs",
            "vboxsf", "afs", "coda", "glusterfs", "orangefs", "pvfs2", "panfs", "gfs2", "ocfs2", "acfs", "daos")

GONE = (errno.ENOENT, errno.ENOTDIR)
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)


class Stat(NamedTuple):  # as ``Item`` is
    """``links``: how many names it has."""

    kind: str
    size: int
    inode: int
    device: int
    links: int = 1


@dataclass(frozen=True)
class Access:
    """The owner and permissions of a directory, and who this process is."""

    owner: int
    me: int
    mode: int


@dataclass(frozen=True)
class Mount:
    """``point`` is where it is mounted, ``kind`` the file system, ``options`` as in "rw,relatime"."""

    point: str
    kind: str
    source: str
    options: str


class Output(Protocol):
    """A file being written through the seam."""

    def write(self, data: bytes | bytearray | memoryview) -> int: ...
    def start_writeback(self, offset: int, length: int) -> None: ...
    def await_writeback(self, offset: int, length: int) -> None: ...
    def drop_cache(self, offset: int, length: int) -> None: ...
    def fsync(self) -> None: ...
    def close(self) -> None: ...


class Folder(AbstractContextManager["Folder"], Protocol):
    """A directory that is held open: names in it are removed from this one, wherever its own name leads meanwhile."""

    path: str

    def scan(self) -> list[Item]: ...
    def folder(self, name: str) -> Folder: ...
    def unlink(self, name: str) -> None: ...
    def rmdir(self, name: str) -> None: ...


_LIBC = load_libc()


class _File:
    """One descriptor; every byte is written or an error is raised (a short write is not an error to ``os.write``)."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            with named(self._path):
                done += os.write(self._fd, view[done:])
        return done

    def start_writeback(self, offset: int, length: int) -> None:
        """Ask the kernel to begin writing this range; a pacing hint, and no promise."""
        pagecache.start(self._fd, self._path, offset, length)

    def await_writeback(self, offset: int, length: int) -> None:
        """Wait until the kernel has written this range; no promise either, but an error of it is raised here and nowhere else."""
        pagecache.wait(self._fd, self._path, offset, length)

    def drop_cache(self, offset: int, length: int) -> None:
        """Give the range's pages back, as far as they are written."""
        pagecache.give_back(self._fd, offset, length)

    def fsync(self) -> None:
        with named(self._path):
            os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with named(self._path):
                os.close(fd)


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    """A descriptor for one call, closed in any case."""
    fd = os.open(path, flags, 0o666)
    with named(path):
        try:
            yield fd
        finally:
            os.close(fd)


def _by_name(look: Callable[[], T]) -> T:
    """``look``, which opens a name and reads what it opened; again when that went stale in between.

    Another NFS client removed it, or put something else under the name; what the name says now is the answer. A mount that is
    stale itself says ESTALE each time: that is no proof that anything is gone, and is raised.
    """
    for _ in range(_STALE):
        try:
            return look()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return look()


def _open_below(top: str, below: str, flags: int) -> int:
    def find() -> int:
        with beneath.opened(top) as root:
            return beneath.open_below(root, below, flags)

    try:
        return _by_name(find)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.path.join(top, below)) from None


def read_at(file: Opened, room: memoryview, offset: int, wait: bool = True) -> int:
    """Fill ``room`` with the bytes of ``file`` from ``offset`` on, and say how many there were: fewer only where it ends. By any
    number of threads: the file's own position is neither used nor moved. ``wait=False``: those that are in memory, at most."""
    if isinstance(file, io.BytesIO):
        found = file.getbuffer()[offset:offset + len(room)]
        room[:len(found)] = found
        return len(found)
    if not wait and (_NOWAIT is None or _PREADV is None):
        return 0
    done = 0
    while done < len(room):
        try:
            if _PREADV is not None:
                count: int = _PREADV(file.fileno(), [room[done:]], offset + done, 0 if wait else _NOWAIT)
            else:
                data = os.pread(file.fileno(), len(room) - done, offset + done)
                room[done:done + len(data)] = data
                count = len(data)
        except OSError as error:
            if wait or error.errno not in (errno.EAGAIN, *UNSUPPORTED):
                raise
            return done
        if not count:
            break
        done += count
    return done


def _stat_of(seen: os.stat_result) -> Stat:
    return Stat(kind_of(seen.st_mode), seen.st_size, seen.st_ino, seen.st_dev, seen.st_nlink)


def _require_regular(fd: int, path: str) -> os.stat_result:
    seen = os.fstat(fd)
    if not _stat.S_ISREG(seen.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return seen


class Files:
    """The file system as this library uses it. Paths are absolute strings."""

    # -- reading -------------------------------------------------------------------------------------------------

    def scan(self, path: str) -> list[Item]:
        """The entries of a directory, asked afresh from the file system, sorted by name."""
        return _by_name(lambda: beneath.scan(path))

    def stat(self, path: str) -> Stat:
        """About the entry itself; a symlink is not followed."""
        return _stat_of(os.stat(path, follow_symlinks=False))

    def look(self, top: str, below: str) -> Stat:
        """About the entry ``below`` under the directory ``top``, without opening it. ELOOP when a directory on the way is a
        link; the entry itself may be one."""
        fd = _open_below(top, below, LOOKING)
        try:
            return _stat_of(os.fstat(fd))
        finally:
            os.close(fd)

    def member(self, top: str, below: str) -> Opened:
        """The regular file ``below`` under the directory ``top``, open for reading. ELOOP when it, or a directory on the way,
        is a link. What is checked on it and then read from it is one file, whatever becomes of its name."""
        fd = _open_below(top, below, READING)
        try:
            _require_regular(fd, os.path.join(top, below))
            return os.fdopen(fd, "rb")
        except BaseException:
            os.close(fd)
            raise

    def folder(self, top: str, below: str) -> Folder:
        """The directory ``below`` under ``top``, held open to remove things from it. ELOOP when it, or one on the way, is a
        link; EXDEV when something is mounted on the way."""
        return beneath.open_folder(top, below)

    def access(self, path: str) -> Access:
        """Who may write in the directory at ``path``, links followed."""
        seen = os.stat(path)
        return Access(seen.st_uid, os.geteuid(), _stat.S_IMODE(seen.st_mode))

    def read(self, path: str, limit: int) -> bytes:
        """At most ``limit`` bytes from the start of a regular file."""
        return _by_name(lambda: self._read(path, limit))

    def _read(self, path: str, limit: int) -> bytes:
        with _opened(path, READING) as fd:
            _require_regular(fd, path)
            parts = []
            while limit > 0:
                part = os.read(fd, min(limit, PIECE))
                if not part:
                    break
                parts.append(part)
                limit -= len(part)
            return b"".join(parts)

    def pieces(self, path: str) -> Iterator[memoryview]:
        """The bytes of a regular file, front to back, in pieces that are valid until the next one is asked for."""
        fd = os.open(path, READING)
        try:
            seen = _require_regular(fd, path)
            buffer = bytearray(max(min(PIECE, seen.st_size), 4096))
            view = memoryview(buffer)
            while count := os.readv(fd, [view]):
                yield view[:count]
        except OSError as error:
            if error.errno == errno.ESTALE:
                os.stat(path, follow_symlinks=False)  # removed by another NFS client: FileNotFoundError says so
            error.filename = path
            raise
        finally:
            os.close(fd)

    def free(self, path: str) -> int:
        """Bytes an ordinary user may still write on the file system under ``path``."""
        seen = os.statvfs(path)
        return seen.f_bavail * seen.f_frsize

    def is_dir(self, path: str) -> bool:
        """Whether ``path`` is a directory, links followed (the root itself may be reached through one)."""
        return os.path.isdir(path)

    def real(self, path: str) -> str:
        """``path`` with all links resolved: one name for one directory."""
        return os.path.realpath(path)

    def mount_point(self, path: str) -> str:
        """The mount that holds ``path``."""
        here = os.path.realpath(path)
        while not os.path.ismount(here):
            here = os.path.dirname(here)
        return here

    def is_network(self, path: str) -> bool:
        """Whether another machine may change what is under ``path`` (its absences may be cached for a minute)."""
        mount = self.mount(path)
        return mount is not None and (mount.kind in _NETWORK or mount.kind.startswith("fuse"))

    def mount(self, path: str) -> Mount | None:
        """What is mounted where ``path`` leads to, which need not exist; None where the kernel does not say."""
        path, found = os.path.realpath(path), None
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
                for line in mounts:
                    left, _, right = line.partition(" - ")
                    point, options = left.split(" ")[4:6]
                    point = _OCTAL.sub(lambda m: chr(int(m[1], 8)), point)
                    if (path + "/").startswith(point.rstrip("/") + "/") and (found is None or len(point) >= len(found.point)):
                        kind, source, *more = right.strip().split(" ")
                        of_all = [o for o in ",".join(more).split(",") if o not in ("", "rw", "ro", *options.split(","))]
                        found = Mount(point, kind, source, ",".join([options, *of_all]))
        except OSError:
            return None
        return found

    # -- writing -------------------------------------------------------------------------------------------------

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def open(self, path: str) -> Output:
        """A new file; one that exists already is an error (two writers of one name never share it)."""
        return _File(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC, 0o666), path)

    def overwrite(self, path: str, data: bytes) -> None:
        """Replace the bytes of a small status file in place: for counters that promise nothing after a crash."""
        with _opened(path, os.O_WRONLY | os.O_CREAT | NOFOLLOW | CLOEXEC | _NONBLOCK) as fd:
            os.pwrite(fd, data, 0)

    def append(self, path: str, data: bytes) -> None:
        """Add one record to a log that promises nothing after a crash."""
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NOFOLLOW | CLOEXEC | _NONBLOCK) as fd:
            os.write(fd, data)

    def fsync(self, path: str) -> None:
        """Make the bytes of a file durable that somebody else wrote."""
        with _opened(path, READING) as fd:
            os.fsync(fd)

    @property
    def sees_open(self) -> bool:
        """Whether ``held_open`` knows anything, and ``start_writeback`` does."""
        return pagecache.can_start() and os.path.isdir(pagecache.DESCRIPTORS)

    def held_open(self, directory: str) -> list[str]:
        """The files below ``directory`` that this process has open, as far as the kernel tells; by their descriptors, so that no
        directory is read and no network asked. For hints only."""
        return pagecache.held_open(directory)

    def start_writeback(self, path: str) -> None:
        """Ask the kernel to begin writing a file that somebody else writes, or wrote; a hint, and no promise."""
        try:
            fd = os.open(path, READING)
        except OSError:
            return  # whoever makes the file durable says what is wrong with it
        try:
            pagecache.start(fd, path, 0, 0)  # 0: to its end
        finally:
            os.close(fd)

    def drop_cache(self, path: str) -> None:
        """Give the pages of a file back, as far as they are written; a hint that never fails."""
        try:
            fd = os.open(path, READING)
        except OSError:
            return
        try:
            pagecache.give_back(fd, 0, 0)
        finally:
            os.close(fd)

    def fsync_dir(self, path: str) -> None:
        """Make the entries of a directory durable."""
        with _opened(path, os.O_RDONLY | DIRECTORY | CLOEXEC) as fd:
            os.fsync(fd)

    def rename(self, source: str, target: str) -> None:
        """Atomic. A directory never replaces a non-empty one (ENOTEMPTY; XFS says EEXIST): S13."""
        os.rename(source, target)

    def exchange(self, one: str, other: str) -> bool:
        """Swap two names in one step; False where the file system cannot (NFS)."""
        call = getattr(_LIBC, "renameat2", None)
        if call is None:
            return False
        if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number in UNSUPPORTED:
            return False
        raise OSError(number, os.strerror(number), one, None, other)

    def link(self, source: str, target: str) -> bool:
        """A second, new name for a file; FileExistsError if taken, False where the file system has no hard links, no more of
        this file, or none between these two directories."""
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EMLINK, errno.EXDEV, *UNSUPPORTED):
                return False
            raise
        return True

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)


REAL = Files()
