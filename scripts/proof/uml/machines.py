"""Inside the guest: the two client machines, the server, and what can be done to them."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DISK = "/run/disk"
MOUNT = "/mnt"
ROOT = f"{MOUNT}/run"
BALLAST = f"{DISK}/ballast"
NODES = (0, 1)
_SHUTDOWN, _NO_FLUSH = 0x8004587D, 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def command(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.returncode}: {done.stderr.strip()}")


def _anchor(node: int) -> str:
    """The process that keeps the node's namespaces."""
    return Path(f"/run/node{node}").read_text().strip()


def enter(node: int) -> None:
    """This process becomes one of the node's. It must have one thread."""
    for kind in ("net", "uts", "mnt"):
        fd = os.open(f"/proc/{_anchor(node)}/ns/{kind}", os.O_RDONLY)
        if _LIBC.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.close(fd)
    os.chdir("/")


def _on(node: int, *words: str, check: bool = True) -> None:
    command("nsenter", "-t", _anchor(node), "-n", "-u", "-m", *words, check=check)


def mount(node: int, version: str, more: str = "") -> None:
    """The export at ``MOUNT``, with the defaults of that version, ``more``, and no lock daemon, which nothing here needs."""
    how = f"vers={version},proto=tcp" + (",nolock" if version.startswith("3") else "") + more
    _on(node, "mount", "-t", "nfs", "-o", how, f"10.0.{node}.1:{DISK if version.startswith('3') else '/'}", MOUNT)


def remount(node: int, version: str, more: str = "") -> None:
    """An empty cache: what is read next is what the server has."""
    _on(node, "umount", MOUNT)
    mount(node, version, more)


def inside(node: int, look: Callable[[], Any]) -> Any:
    """What ``look`` returns (JSON) in a process of its own on the node."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        try:
            enter(node)
            text = json.dumps(look())
        except BaseException:  # whatever it was, the parent must read it and not wait
            text = json.dumps([f"the judge failed: {traceback.format_exc(limit=4)}"])
        with os.fdopen(send, "w") as out:
            out.write(text)
        sys.stderr.flush()
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as source:
        text = source.read()
    os.waitpid(pid, 0)
    return json.loads(text)


# -- the server ----------------------------------------------------------------------------------------------------


def stop_server() -> None:
    command("rpc.nfsd", "0")


def start_server() -> None:
    command("rpc.nfsd", "8")


def crash_server() -> None:
    """The server loses power under live clients: what it had not written is gone, and no client hears an error for it.

    The links go first, so that no reply leaves the dying file system; requests on their way get a moment to be done.
    """
    for node in NODES:
        command("ip", "link", "set", f"veth{node}", "down")
    time.sleep(0.05)
    disk = os.open(DISK, os.O_RDONLY)
    fcntl.ioctl(disk, _SHUTDOWN, _NO_FLUSH.to_bytes(4, "little"))
    os.close(disk)
    stop_server()
    command("exportfs", "-f")
    command("umount", DISK)
    command("mount", "/dev/ubda", DISK)
    os.listdir(DISK)  # EIO if something kept the dead file system
    Path(f"{DISK}/alive").write_text("")


def revive_server() -> None:
    """After ``crash_server``."""
    start_server()
    for node in NODES:
        command("ip", "link", "set", f"veth{node}", "up")


def mute_server() -> None:
    """Requests arrive and are carried out; no reply leaves."""
    for node in NODES:
        command("ip", "route", "add", "blackhole", f"10.0.{node}.2/32")


def unmute_server() -> None:
    for node in NODES:
        command("ip", "route", "del", "blackhole", f"10.0.{node}.2/32")


def leave_free(size: int) -> None:
    """Fill the server's disk until ``size`` bytes are free."""
    empty_ballast()
    seen = os.statvfs(DISK)
    fd = os.open(BALLAST, os.O_WRONLY | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, max(seen.f_bavail * seen.f_frsize - size, 1))
    os.close(fd)


def empty_ballast() -> None:
    if os.path.exists(BALLAST):
        os.unlink(BALLAST)
