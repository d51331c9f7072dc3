"""A disk that logs every block write and every flush: one file, served over FUSE by a process of its own, for a loop device.
And the disks that a power cut could have left, built from that log.

What dm-log-writes does, in user space and without a module. The kernel's FUSE protocol is spoken directly: a file system that
is a single regular file needs nine messages of it.

Whatever was written before a flush that was answered is there after a cut. Of what was written after it, any part may be: whole
writes, or some blocks of a long one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from scripts.proof import disks

_HEADER, _REPLY = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS = 3, 4, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _ACCESS = 18, 20, 25, 26, 34
_SILENT = (2, 36, 42)
_BIG_WRITES, _MAX_PAGES, _DIRECT_IO = 1 << 5, 1 << 22, 1
_MOST = disks.MIB
_PR_SET_PDEATHSIG = 1
_RECORD = struct.Struct("<QI")
_A_FLUSH = (1 << 64) - 1
BLOCK = 4096


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


@contextmanager
def recorded(kind: str, base: str, folder: str) -> Iterator[tuple[BlockLog, str]]:
    """A copy of the image ``base``, mounted: (what logs it, where it is mounted)."""
    served, place = f"{folder}/served.img", f"{folder}/mnt"
    disks.copy_image(base, served)
    os.makedirs(place, exist_ok=True)
    log = BlockLog(served, folder)
    try:
        loop = disks.Loop(log.path)
        try:
            disks.mount(loop.path, place, kind)
            try:
                yield log, place
            finally:
                disks.unmount(place)
        finally:
            loop.close()
    finally:
        log.close()
    os.unlink(served)


def read_log(path: str, size: int = -1) -> list[Epoch]:
    """One epoch for every pair of flushes, and the last one, which was never flushed. ``size``: how much of the log to read; a
    record that was just being written at its end is left out."""
    with open(path, "rb") as file:
        whole = memoryview(file.read(size))
    epochs, at = [Epoch()], 0
    while at + _RECORD.size <= len(whole):
        offset, length = _RECORD.unpack_from(whole, at)
        body = at + _RECORD.size
        if body + length > len(whole):
            break
        if offset == _A_FLUSH:
            epochs[-1].end = at
            epochs.append(Epoch())
        else:
            epochs[-1].writes.append(Write(offset, whole[body:body + length], at))
        at = body + length
    epochs[-1].end = at
    return epochs


@dataclass(frozen=True)
class State:
    """One disk after a cut: what reached it for certain, and what survived of the rest. ``at``: the latest time of a cut that
    leaves it, just before the next thing reached the disk."""

    epoch: int
    issued: int
    survivors: tuple[Write, ...]
    at: int

    def __str__(self) -> str:
        return f"flush {self.epoch}, {len(self.survivors)} pieces of {self.issued} writes after it"


def _pieces(write: Write, rng: random.Random) -> Iterator[Write]:
    """All of a write, or some of its blocks."""
    if len(write.data) <= BLOCK or rng.random() < 0.7:
        yield write
        return
    for at in range(0, len(write.data), BLOCK):
        if rng.random() < 0.5:
            yield Write(write.offset + at, write.data[at:at + BLOCK], write.start)


def states(epochs: Sequence[Epoch], rng: random.Random, most: int, since: int = 0) -> list[State]:
    """Disks to judge, in the order of their flushes: every flush has its turn before one has a second. ``since``: of cuts when
    the log was that long, or longer."""
    found, since = list[State](), min(since, epochs[-1].end)
    later = [number for number, epoch in enumerate(epochs) if epoch.end >= since]
    while len(found) < most:
        for number in rng.sample(later, min(len(later), most - len(found))):
            epoch = epochs[number]
            starts = [*(write.start for write in epoch.writes), epoch.end]
            issued = rng.choice([issued for issued, start in enumerate(starts) if start >= since])
            share = rng.choice((0.0, 0.3, 0.7, 0.9))
            kept = [piece for write in epoch.writes[:issued] if rng.random() < share for piece in _pieces(write, rng)]
            found.append(State(number, issued, tuple(kept), starts[issued]))
    return sorted(found, key=lambda state: (state.epoch, state.issued))


class Unmountable(OSError):
    """The file system itself did not survive."""


class Images:
    """The disks of one recording, flush by flush: ask for states in the order of ``states``."""

    def __init__(self, kind: str, base: str, epochs: Sequence[Epoch], folder: str) -> None:
        self.kind, self.epochs, self.folder = kind, epochs, folder
        self._prefix, self._applied = f"{folder}/prefix.img", 0
        disks.copy_image(base, self._prefix)

    @contextmanager
    def mounted(self, state: State) -> Iterator[str]:
        """Where the disk of ``state`` is mounted. Unmountable when it cannot be."""
        assert state.epoch >= self._applied, "what a later flush made certain is in the image already"
        while self._applied < state.epoch:
            _apply(self._prefix, self.epochs[self._applied].writes)
            self._applied += 1
        image, place = f"{self.folder}/state.img", f"{self.folder}/mnt"
        disks.copy_image(self._prefix, image)
        _apply(image, state.survivors)
        loop = disks.Loop(image)
        try:
            try:
                disks.mount(loop.path, place, self.kind)
            except OSError as error:
                raise Unmountable(error.errno, f"the file system itself did not survive: {error}") from error
            try:
                yield place
            finally:
                disks.unmount(place)
        finally:
            loop.close()
            os.unlink(image)


def _apply(image: str, writes: Iterable[Write]) -> None:
    fd = os.open(image, os.O_RDWR)
    try:
        for write in writes:
            os.pwrite(fd, write.data, write.offset)
    finally:
        os.close(fd)
