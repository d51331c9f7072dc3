"""Disks to cut: file systems in image files, on loop devices, in a mount namespace of our own.

Nothing can be left behind: the mounts go with the last process of the namespace, and a loop device clears itself when the
last descriptor on it is closed, also after a SIGKILL. ``isolate`` must have been called in this process first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

from scripts.proof import packages

MIB = 1 << 20
KINDS = {"ext4": 64 * MIB, "xfs": 300 * MIB, "btrfs": 128 * MIB}
"""Each file system that is tried, and the size of its image. XFS and Btrfs make none that are smaller."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x00020000, 0x4000, 0x40000, 2
_GET_FREE, _CONFIGURE, _AUTOCLEAR = 0x4C82, 0x4C0A, 4
_SHUTDOWN, _NOLOGFLUSH = 0x8004587D, 2
_PACKAGES = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs"}
_TRIES = 200


def missing(*needs: str, install: bool = False) -> str | None:
    """What this machine lacks for loop mounts and for ``needs`` (programs that make file systems, devices); None when nothing.
    ``install``: fetch Debian's packages of those programs."""
    if os.geteuid() != 0:
        return "mounting images needs root"
    devices = [name for name in ("/dev/loop-control", *needs) if name.startswith("/") and not os.path.exists(name)]
    if devices:
        return f"there is no {', '.join(devices)} here"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    if done.returncode != 0:
        return f"no mount namespace of our own can be made: {done.stderr.strip()}"
    programs = [name for name in needs if not name.startswith("/")]
    known = Path("/proc/filesystems").read_text(encoding="utf-8").split()
    unknown = [kind for kind in (name.removeprefix("mkfs.") for name in programs) if kind not in known]
    if unknown:
        return f"this kernel has no {', '.join(unknown)}"
    absent = _absent(programs)
    if absent and install:
        return packages.lacking(lambda: _absent(programs), *(_PACKAGES[name] for name in absent))
    return f"{', '.join(absent)} not installed" if absent else None


def _absent(programs: list[str]) -> list[str]:
    return [name for name in programs if _which(name) is None]


def _which(program: str) -> str | None:
    return shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/bin")


def _check(result: int, *what: object) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {' '.join(map(str, what))}")


def isolate() -> None:
    """From now on the mounts of this process, and of those it starts, are seen by nobody else."""
    _check(_LIBC.unshare(_CLONE_NEWNS), "unshare")
    _check(_LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")


def mount(source: str, place: str, kind: str, options: str = "", flags: int = 0) -> None:
    _check(_LIBC.mount(source.encode(), place.encode(), kind.encode(), flags, options.encode()), "mount", kind, source, options)


def unmount(place: str) -> None:
    """Whoever used it has ended; the kernel may need a moment to see that."""
    for _ in range(_TRIES):
        if _LIBC.umount2(place.encode(), 0) == 0:
            return
        if ctypes.get_errno() != errno.EBUSY:
            break
        time.sleep(0.01)
    _check(-1, "umount", place)


def cut(place: str) -> None:
    """The power goes: what was not synced is lost, the journal's pending transactions too. Later operations give EIO."""
    fd = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
    finally:
        os.close(fd)


def write_back(place: str) -> None:
    """The kernel writes what it holds, as it does by itself after some seconds."""
    fd = os.open(place, os.O_RDONLY)
    try:
        _check(_LIBC.syncfs(fd), "syncfs", place)
    finally:
        os.close(fd)


def format_image(kind: str, image: str, size: int, *options: str) -> None:
    """A new file system in a sparse file."""
    with open(image, "wb") as out:
        out.truncate(size)
    quiet = {"ext4": ["-F", "-q", "-m", "0"], "xfs": ["-f", "-q"], "btrfs": ["-f", "-q", "-m", "single"]}[kind]
    program = _which(f"mkfs.{kind}")
    assert program is not None, f"mkfs.{kind} is not installed"
    done = subprocess.run([program, *quiet, *options, image], capture_output=True, text=True)
    assert done.returncode == 0, f"mkfs.{kind}: {done.stderr}"
    subprocess.run(["fallocate", "--dig-holes", image], check=True)  # XFS fills its log with zeros


def copy_image(source: str, target: str) -> None:
    """A copy that takes no more room than the original has data."""
    with open(source, "rb") as here, open(target, "wb") as there:
        size, at = os.fstat(here.fileno()).st_size, 0
        there.truncate(size)
        while at < size:
            try:
                start = os.lseek(here.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            at = os.lseek(here.fileno(), start, os.SEEK_HOLE)
            os.pwrite(there.fileno(), os.pread(here.fileno(), at - start, start), start)


class Loop:
    """A loop device on ``image``; ``path`` names it."""

    def __init__(self, image: str) -> None:
        backing = os.open(image, os.O_RDWR)
        control = os.open("/dev/loop-control", os.O_RDWR)
        try:
            for _ in range(_TRIES):  # somebody else may take the free one first
                self.path = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
                self._fd = os.open(self.path, os.O_RDWR)
                info = struct.pack("=QQQQQIIII64s64s32sQQ", 0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, b"", b"", b"", 0, 0)
                try:
                    fcntl.ioctl(self._fd, _CONFIGURE, struct.pack("=II", backing, 0) + info + bytes(64))
                    return
                except OSError as error:
                    os.close(self._fd)
                    if error.errno != errno.EBUSY:
                        raise
        finally:
            os.close(backing)
            os.close(control)
        raise OSError(errno.EBUSY, "no loop device is free")

    def close(self) -> None:
        os.close(self._fd)


class Disk:
    """One file system, mounted at ``place``. ``reboot`` is what a cut is followed by."""

    def __init__(self, kind: str, folder: str, size: int | None = None, options: str = "") -> None:
        self.kind, self.options = kind, options
        self.image, self.place = f"{folder}/{kind}.img", f"{folder}/{kind}"
        format_image(kind, self.image, size or KINDS[kind])
        self._loop = Loop(self.image)
        os.makedirs(self.place, exist_ok=True)
        mount(self._loop.path, self.place, kind, options)

    def reboot(self) -> None:
        unmount(self.place)
        mount(self._loop.path, self.place, self.kind, self.options)

    def close(self) -> None:
        unmount(self.place)
        self._loop.close()
        os.unlink(self.image)
