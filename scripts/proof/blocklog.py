"""A disk that logs every block write and every flush: one file, served over FUSE by a process of its own, for a loop device.

What dm-log-writes does, in user space and without a module. The kernel's FUSE protocol is spoken directly: a file system that
is a single regular file needs nine messages of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
from dataclasses import dataclass, field

from scripts.proof import disks

_HEADER, _REPLY = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS = 3, 4, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _ACCESS = 18, 20, 25, 26, 34
_SILENT = (2, 36, 42)
_BIG_WRITES, _MAX_PAGES, _DIRECT_IO = 1 << 5, 1 << 22, 1
_MOST = disks.MIB
_PR_SET_PDEATHSIG = 1
_PR_SET_PDEATHSIG = 1
_RECORD = struct.Struct("<QI")
_A_FLUSH = (1 << 64) - 1


class BlockLog:
    """``image`` as a disk, under ``path``, with a log of what reaches it. ``close`` when no loop device uses it any more."""

    def __init__(self, image: str, folder: str) -> None:
        self.path, self.log = f"{folder}/device", f"{folder}/blocks"
        for name in (self.path, self.log):
            open(name, "wb").close()
        channel = os.open("/dev/fuse", os.O_RDWR)
        disks.mount("blocklog", self.path, "fuse", f"fd={channel},rootmode=100000,user_id=0,group_id=0,max_read={_MOST}")
        self._pid = os.fork()
        if self._pid == 0:
            _serve(channel, image, self.log)
        os.close(channel)

    @property
    def size(self) -> int:
        """Bytes of the log so far: what stands in it has reached the disk."""
        return os.stat(self.log).st_size

    def close(self) -> None:
        disks.unmount(self.path)
        os.waitpid(self._pid, 0)


def _serve(channel: int, image: str, log: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 1
    try:
        disk, out = os.open(image, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_APPEND)
        size = os.fstat(disk).st_size
        while True:
            try:
                message = memoryview(os.read(channel, _MOST + 4096))
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                code = 0 if error.errno == errno.ENODEV else 1
                return  # unmounted
            _, op, unique = _HEADER.unpack_from(message)[:3]
            if op in _SILENT:
                continue
            try:
                answer, number = _answer(op, message[_HEADER.size:], disk, out, size), 0
            except OSError as error:
                answer, number = b"", error.errno or errno.EIO
            os.write(channel, _REPLY.pack(_REPLY.size + len(answer), -number, unique) + answer)
    finally:
        os._exit(code)


def _answer(op: int, body: memoryview, disk: int, out: int, size: int) -> bytes:
    if op == _WRITE:
        _, offset, length = struct.unpack_from("<QQI", body)
        data = body[40:40 + length]
        os.pwrite(disk, data, offset)
        os.writev(out, [_RECORD.pack(offset, length), data])
        return struct.pack("<II", length, 0)
    if op == _READ:
        _, offset, length = struct.unpack_from("<QQI", body)
        return os.pread(disk, length, offset)
    if op == _FSYNC:
        os.write(out, _RECORD.pack(_A_FLUSH, 0))
        return b""
    if op in (_GETATTR, _SETATTR):
        mode = stat.S_IFREG | 0o600
        return struct.pack("<QII", 3600, 0, 0) + struct.pack("<QQQQQQIIIIIIIIII", 1, size, size // 512, *[0] * 6, mode, 1,
                                                             0, 0, 0, 4096, 0)
    if op == _OPEN:
        return struct.pack("<QIi", 0, _DIRECT_IO, 0)
    if op == _INIT:
        return struct.pack("<IIIIHHIIHHII24x", 7, 31, _MOST, _BIG_WRITES | _MAX_PAGES, 16, 12, _MOST, 1, _MOST // 4096, 0, 0, 0)
    if op == _STATFS:
        return struct.pack("<QQQQQIIII24x", size // 4096, 0, 0, 1, 0, 4096, 255, 4096, 0)
    if op in (_FLUSH, _RELEASE, _ACCESS):
        return b""
    raise OSError(errno.ENOSYS, "not spoken here")


@dataclass(frozen=True)
class Write:
    """``start``: how long the log was before it reached the disk."""

    offset: int
    data: memoryview
    start: int


@dataclass
class Epoch:
    """The writes between two flushes. ``end``: how long the log was when the second flush came."""

    writes: list[Write] = field(default_factory=list)
    end: int = 0


def read_log(path: str) -> list[Epoch]:
    """One epoch for every pair of flushes, and the last one, which was never flushed."""
    with open(path, "rb") as file:
        whole = memoryview(file.read())
    epochs, at = [Epoch()], 0
    while at < len(whole):
        offset, length = _RECORD.unpack_from(whole, at)
        body = at + _RECORD.size
        if offset == _A_FLUSH:
            epochs[-1].end = at
            epochs.append(Epoch())
        else:
            epochs[-1].writes.append(Write(offset, whole[body:body + length], at))
        at = body + length
    epochs[-1].end = at
    return epochs
