"""Where the benchmark writes: which file system that is, and a journaled one in a file, made for one run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.proof import disks

LOOPS = ("ext4", "xfs")
_SCALES = {"M": 1 << 20, "G": 1 << 30}


def describe(place: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The file system of ``place``, with what an fsync means on it."""
    device = os.stat(place).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "an unknown file system"
    for fields in (line.split() for line in reversed(lines)):  # the last mount on a directory is the one that is seen
        if fields[2] == wanted:
            kind, source = fields[fields.index("-") + 1:][:2]
            return f"{kind} on {source} ({_journal(kind, Path(os.path.realpath(source)).name)})"
    return "an unknown file system"


def _journal(kind: str, device: str) -> str:
    if kind == "tmpfs":
        return "memory: nothing is durable, and an fsync costs nothing"
    if kind != "ext4":
        return {"xfs": "journal"}.get(kind, "journal not known")
    try:
        options = Path(f"/proc/fs/ext4/{device}/options").read_text(encoding="utf-8")
    except OSError:
        return "journal not known"
    mode = next((line.partition("=")[2] for line in options.splitlines() if line.startswith("data=")), None)
    return f"journal, data={mode}" if mode else "no journal"


def size_of(text: str) -> int:
    """Bytes of "8G" or "800M"; ValueError for anything else."""
    scale = _SCALES.get(text[-1:].upper())
    if scale is None or not text[:-1].isdecimal() or int(text[:-1]) == 0:
        raise ValueError(f"a size is a number of M or G, such as 8G, not {text!r}")
    return int(text[:-1]) * scale


@contextmanager
def loop(kind: str, size: int, folder: Path) -> Iterator[Path]:
    """A new file system of ``kind`` in an image in ``folder``, mounted for this process and those it starts only. Call it before
    any other process is started. RuntimeError with what is lacking where it cannot be made.

    A killed run leaves the image; mount and loop device go with the last process.
    """
    why = disks.missing(f"mkfs.{kind}")
    if why is None and os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < size:
        why = f"{folder} has no {size >> 20} MB left"
    if why is not None:
        raise RuntimeError(f"no {kind} on a loop device: {why}")
    disks.isolate()
    disk = disks.Disk(kind, str(folder), size)
    try:
        yield Path(disk.place)
    finally:
        disk.close()
        os.rmdir(disk.place)


def at_rest(place: Path | str) -> None:
    """Nothing of ours waits in the page cache when the next variant begins."""
    subprocess.run(["sync", "-f", str(place)], check=True)
