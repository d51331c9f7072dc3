"""What one rank of ``distckpt doctor`` finds out: about itself, and by trying what a save does in the probe directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distckpt import trust
from distckpt.durable import GONE, TAKEN, Files
from distckpt.ordered import is_listed, write_new
from distckpt.patience import PASSING, Patience
from distckpt.runtime import Runtime

Facts = dict[str, Any]
NONCE = "nonce"


def standing(files: Files, root: str) -> str:
    """``root``, or the nearest directory above it that exists."""
    while not files.is_dir(root) and root != os.path.dirname(root):
        root = os.path.dirname(root)
    return root


def facts(files: Files, runtime: Runtime, root: str) -> Facts:
    """What this rank sees of its machine and of ``root`` without touching it; JSON."""
    here = standing(files, root)
    found: Facts = {"root": root, "exists": here == root, "standing": here, "real": files.real(root), "uid": os.geteuid(),
                    "mount": None, "network": files.is_network(root),
                    "trust": trust.sharers(files, root) if here == root else None}
    mount = files.mount(root)
    if mount is not None:
        found["mount"] = {"point": mount.point, "kind": mount.kind, "source": mount.source, "options": mount.options}
    if here != root:
        found["blocked"] = _in_the_way(files, root, here)
    for name, value in (("space", lambda: _space(here)), ("files", _open_files), ("largest", _largest_file), ("memory", _memory),
                        ("shm", lambda: _space("/dev/shm"))):
        with suppress(OSError, ValueError, ImportError):  # what a machine does not tell is not judged
            found[name] = value()
    return found


def _in_the_way(files: Files, root: str, here: str) -> str | None:
    """What is not a directory on the way to a root that is still to be made."""
    first = os.path.join(here, os.path.relpath(root, here).split(os.sep)[0])
    try:
        return f"{first} is a {files.stat(first).kind}, not a directory"
    except OSError as error:
        return None if error.errno in GONE else f"{first}: {error.strerror}"


def _space(path: str) -> Facts:
    seen = os.statvfs(path)
    return {"free": seen.f_bavail * seen.f_frsize, "size": seen.f_blocks * seen.f_frsize, "inodes": seen.f_favail,
            "of_inodes": seen.f_files}


def _limit(name: str) -> int | None:
    """The soft limit; None when there is none."""
    import resource

    soft = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _open_files() -> int | None:
    return _limit("RLIMIT_NOFILE")


def _largest_file() -> int | None:
    return _limit("RLIMIT_FSIZE")


def _memory() -> int:
    """Bytes that this machine, or the job's share of it, can still give."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used in (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
                        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # "max", or no such controller
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(free, 0)


def attempt(files: Files, runtime: Runtime, probe: str, nonce: str, rank: int, wait: float, moving: Callable[[], None]) -> Facts:
    """Look for what rank 0 wrote in ``probe``, then do once what a save does there. ``seen``: seconds until this rank saw it."""
    begun, last = runtime.monotonic(), "it is not there"
    patience = Patience.towards(files, runtime, probe, wait, moving)
    for _ in patience.looks(at_least=min(wait, 2.0)):
        try:
            if not is_listed(files, probe):
                continue
            if files.read(os.path.join(probe, NONCE), 64).decode("ascii", "replace") == nonce:
                return {"seen": round(runtime.monotonic() - begun, 3), "tried": operations(files, probe, rank)}
            last = "something else stands there"
        except OSError as error:
            last = error.strerror or str(error)
            if error.errno not in PASSING:
                break
    return {"unseen": last, "waited": runtime.monotonic() - begun}


def operations(files: Files, probe: str, rank: int) -> dict[str, str]:
    """{operation: "ok", or what came instead}, in the order of a save; what needs a step that failed is left out."""
    mine, told = os.path.join(probe, f"of-rank-{rank}"), {}
    a, b = os.path.join(mine, "a"), os.path.join(mine, "b")
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("mkdir", lambda: _each(files.mkdir, mine, a, b)),
        ("write and fsync a file", lambda: _each(lambda path: write_new(files, f"{path}/file", b"distckpt doctor"), a, b)),
        ("fsync a directory", lambda: files.fsync_dir(mine)),
        ("exclusive create", lambda: _refused(lambda: files.open(os.path.join(a, "file")), (errno.EEXIST,))),
        ("rename a directory", lambda: files.rename(b, os.path.join(mine, "c"))),
        ("rename never overwrites", lambda: _refused(lambda: files.rename(os.path.join(mine, "c"), a), TAKEN)),
        ("exchange two names", lambda: None if files.exchange(a, os.path.join(mine, "c")) else "not there"),
        ("hard link", lambda: None if files.link(os.path.join(a, "file"), os.path.join(mine, "d")) else "not there"),
        ("unlink", lambda: files.unlink(os.path.join(a, "file"))),
        ("be seen", lambda: write_new(files, os.path.join(probe, f"rank-{rank}"), b"%d" % rank)),
    ]
    for name, step in steps:
        try:
            answer = step()
            told[name] = answer if isinstance(answer, str) else "ok"
        except OSError as error:
            told[name] = error.strerror or str(error)
            if name in ("mkdir", "write and fsync a file", "rename a directory"):
                break
    return told


def _each(do: Callable[[str], None], *paths: str) -> None:
    for path in paths:
        do(path)


def _refused(do: Callable[[], object], expected: tuple[int, ...]) -> str | None:
    try:
        do()
    except OSError as error:
        if error.errno in expected:
            return None
        raise
    return "it was done, and must not be"


def others(files: Files, runtime: Runtime, probe: str, ranks: list[int], wait: float,
           moving: Callable[[], None]) -> dict[int, float | None]:
    """Seconds until this rank saw the file of each of ``ranks``; None for those that it never saw."""
    begun = runtime.monotonic()
    seen: dict[int, float | None] = dict.fromkeys(ranks)
    for _ in Patience.towards(files, runtime, probe, wait, moving).looks(at_least=min(wait, 2.0)):
        try:
            names = {item.name for item in files.scan(probe)}
        except OSError as error:
            if error.errno not in PASSING:
                raise
            continue
        for rank in ranks:
            if seen[rank] is None and f"rank-{rank}" in names:
                seen[rank] = round(runtime.monotonic() - begun, 3)
        if None not in seen.values():
            break
    return seen
