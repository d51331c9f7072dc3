"""Several hosts on one network file system, each of which is shown the others' changes late.

``Server(disk)`` stands for the server; ``server.client(host, runtime)`` is one host's mount. What a host does itself it sees at
once. Of what others do, it sees for ``names`` seconds nothing: what they made is not there and not listed, what they removed is
still listed and is ESTALE to the touch, and ``stat`` gives a file for ``sizes`` seconds the size that it had before they wrote
to it, unless this host opens it (close-to-open; not with ``nocto``). That is a client that caches names and attributes, at its
worst: no other question brings the news sooner. ``mkdir`` is answered by the server, so a directory that another host made is
EEXIST, and then for everybody else absent, or with ``directories_as="file"`` a file: "not a directory". ESTALE at the n-th
operation is ``faults.fail(errno.ESTALE, n, op=...)`` on top of it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from distckpt.durable import Access, Files, Folder, Item, Mount, Opened, Output, Stat
from distckpt.runtime import Runtime

T = TypeVar("T")


@dataclass
class _Change:
    """What the server knows of a name: who changed it last, when, and what it was before."""

    host: str
    when: float
    n: int
    gone: bool = False
    kind: str = "file"


@dataclass
class _Size:
    host: str
    when: float
    n: int
    before: int


class Server:
    """The file system that all hosts share, and who changed what when."""

    def __init__(self, disk: Files) -> None:
        self.disk = disk
        self.names: dict[str, _Change] = {}
        self.sizes: dict[str, _Size] = {}
        self.count = 0

    def client(self, host: str, runtime: Runtime, *, names: float = 0.0, sizes: float = 0.0,
               directories_as: str = "absent", nocto: bool = False, over: Files | None = None) -> StaleFiles:
        """The mount of ``host``. ``over``: the same disk, by which this host's operations go (with faults, say)."""
        return StaleFiles(self, over or self.disk, host, runtime, names, sizes, directories_as, nocto)


class StaleFiles(Files):
    """One host's view; see ``Server``. ``met`` counts how often something was kept from it. ``delay`` changes how late it is."""

    sees_open = False

    def __init__(self, server: Server, inner: Files, host: str, runtime: Runtime, names: float, sizes: float,
                 directories_as: str, nocto: bool) -> None:
        self.server, self.inner, self.host, self._runtime = server, inner, host, runtime
        self.name_delay, self.size_delay, self.directories_as, self.nocto = names, sizes, directories_as, nocto
        self.met = 0
        self._since = 0
        self._opened: dict[str, int] = {}

    def delay(self, names: float = 0.0, sizes: float = 0.0, directories_as: str = "absent") -> None:
        """From now on; what it has heard of, it knows."""
        self.name_delay, self.size_delay, self.directories_as = names, sizes, directories_as
        self._since = self.server.count

    def _late(self, change: _Change | _Size, delay: float) -> bool:
        return change.host != self.host and change.n > self._since and self._runtime.monotonic() - change.when < delay

    def _now(self) -> tuple[str, float, int]:
        self.server.count += 1
        return self.host, self._runtime.monotonic(), self.server.count

    # -- what this host knows --------------------------------------------------------------------------------------

    def _news(self, path: str) -> _Change | None:
        """The change of ``path``, or of a directory on the way, that this host has not heard of; the outermost one."""
        parts = path.split("/")
        for depth in range(2, len(parts) + 1):
            change = self.server.names.get("/".join(parts[:depth]))
            if change is not None and self._late(change, self.name_delay):
                return change
        return None

    def _see(self, path: str) -> None:
        """Raise what this host is told when it asks for ``path``."""
        change = self._news(path)
        if change is None:
            return
        self.met += 1
        if change.gone:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        if change.kind == "dir" and self.directories_as == "file" and self.server.names.get(path) is not change:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _known(self, path: str, seen: Stat) -> Stat:
        size = self.server.sizes.get(path)
        if size is None or size.n <= self._opened.get(path, 0) or not self._late(size, self.size_delay):
            return seen
        self.met += 1
        return Stat(seen.kind, size.before, seen.inode, seen.device)

    # -- what this host does ---------------------------------------------------------------------------------------

    def _made(self, path: str, kind: str) -> None:
        self.server.names[path] = _Change(*self._now(), kind=kind)

    def _removed(self, path: str, kind: str) -> None:
        self.server.names[path] = _Change(*self._now(), True, kind)
        self.server.sizes.pop(path, None)

    def _kind(self, path: str) -> str:
        return self.server.disk.stat(path).kind

    def _grown(self, path: str, before: int) -> None:
        known = self.server.sizes.get(path)
        before = known.before if known is not None and known.host == self.host else before
        self.server.sizes[path] = _Size(*self._now(), before)

    # -- reading ---------------------------------------------------------------------------------------------------

    def scan(self, path: str) -> list[Item]:
        self._see(path)
        found = {item.name: item for item in self.inner.scan(path)}
        for name in list(found):
            change = self._news(os.path.join(path, name))
            if change is not None and not change.gone:
                self.met += 1
                del found[name]
        for full, change in self.server.names.items():
            if os.path.dirname(full) == path and change.gone and self._news(full) is change:
                self.met += 1
                found.setdefault(os.path.basename(full), Item(os.path.basename(full), change.kind))
        return sorted(found.values(), key=lambda item: item.name)

    def stat(self, path: str) -> Stat:
        change = self.server.names.get(path)
        if (self.directories_as == "file" and change is not None and change.kind == "dir" and not change.gone
                and self._news(path) is change):
            self.met += 1
            return Stat("file", 0, 0, 0)
        self._see(path)
        return self._known(path, self.inner.stat(path))

    def look(self, top: str, below: str) -> Stat:
        path = os.path.join(top, below)
        self._see(path)
        return self._known(path, self.inner.look(top, below))

    def _open(self, path: str) -> None:
        self._see(path)
        if not self.nocto:
            self._opened[path] = self.server.count

    def member(self, top: str, below: str) -> Opened:
        self._open(os.path.join(top, below))
        return self.inner.member(top, below)

    def folder(self, top: str, below: str) -> Folder:
        self._see(os.path.normpath(os.path.join(top, below)))
        return _Folder(self, self.inner.folder(top, below))

    def read(self, path: str, limit: int) -> bytes:
        self._open(path)
        return self.inner.read(path, limit)

    def pieces(self, path: str) -> Iterator[memoryview]:
        self._open(path)
        return self.inner.pieces(path)

    def access(self, path: str) -> Access:
        return self.inner.access(path)

    def free(self, path: str) -> int:
        return self.inner.free(path)

    def is_dir(self, path: str) -> bool:
        try:
            return self.stat(path).kind == "dir"
        except OSError:
            return False

    def real(self, path: str) -> str:
        return self.inner.real(path)

    def mount_point(self, path: str) -> str:
        return self.inner.mount_point(path)

    def mount(self, path: str) -> Mount | None:
        return Mount("/", "nfs4", self.host, f"rw,acdirmax={self.name_delay:g},acregmax={self.size_delay:g}")

    def is_network(self, path: str) -> bool:
        return True

    # -- writing ---------------------------------------------------------------------------------------------------

    def _above(self, path: str) -> None:
        self._see(os.path.dirname(path))

    def mkdir(self, path: str) -> None:
        self._above(path)
        self.inner.mkdir(path)
        self._made(path, "dir")

    def open(self, path: str) -> Output:
        self._above(path)
        out = self.inner.open(path)
        self._made(path, "file")
        return _Out(self, out, path)

    def overwrite(self, path: str, data: bytes) -> None:
        self._above(path)
        self.inner.overwrite(path, data)
        self.server.names.setdefault(path, _Change(*self._now()))

    def append(self, path: str, data: bytes) -> None:
        self._above(path)
        self.inner.append(path, data)
        self.server.names.setdefault(path, _Change(*self._now()))

    def fsync(self, path: str) -> None:
        self._open(path)
        self.inner.fsync(path)

    def fsync_dir(self, path: str) -> None:
        self._see(path)
        self.inner.fsync_dir(path)

    def rename(self, source: str, target: str) -> None:
        self._see(source)
        self._above(target)
        kind = self._kind(source)
        self.inner.rename(source, target)
        for table in (self.server.names, self.server.sizes):
            for path in [p for p in table if p == target or p.startswith(target + "/")]:
                del table[path]
            for path in [p for p in table if p.startswith(source + "/") or p == source]:
                table[target + path[len(source):]] = table.pop(path)  # type: ignore[assignment]
        self._removed(source, kind)
        self._made(target, kind)

    def exchange(self, one: str, other: str) -> bool:
        return False  # no network file system has it

    def link(self, source: str, target: str) -> bool:
        self._see(source)
        self._above(target)
        if not self.inner.link(source, target):
            return False
        self._made(target, "file")
        return True

    def unlink(self, path: str) -> None:
        self._see(path)
        self.inner.unlink(path)
        self._removed(path, "file")

    def rmdir(self, path: str) -> None:
        self._see(path)
        self.inner.rmdir(path)
        self._removed(path, "dir")


class _Out:
    def __init__(self, files: StaleFiles, inner: Output, path: str) -> None:
        self._files, self._inner, self._path, self._size = files, inner, path, 0
        self.start_writeback, self.await_writeback = inner.start_writeback, inner.await_writeback
        self.drop_cache, self.fsync, self.close = inner.drop_cache, inner.fsync, inner.close

    def write(self, data: bytes | bytearray | memoryview) -> int:
        done = self._inner.write(data)
        self._files._grown(self._path, self._size)
        self._size += done
        return done


class _Folder:
    """Held open: what it lists and removes is asked of the server."""

    def __init__(self, files: StaleFiles, inner: Folder) -> None:
        self._files, self._inner, self.path = files, inner, inner.path

    def __enter__(self) -> _Folder:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._inner.__exit__(*exc)  # type: ignore[arg-type]

    def _ask(self, name: str, do: Callable[[], T]) -> T:
        self._files._see(os.path.join(self.path, name))
        return do()

    def scan(self) -> list[Item]:
        return self._files.scan(self.path)

    def folder(self, name: str) -> _Folder:
        return self._ask(name, lambda: _Folder(self._files, self._inner.folder(name)))

    def unlink(self, name: str) -> None:
        self._ask(name, lambda: self._inner.unlink(name))
        self._files._removed(os.path.join(self.path, name), "file")

    def rmdir(self, name: str) -> None:
        self._ask(name, lambda: self._inner.rmdir(name))
        self._files._removed(os.path.join(self.path, name), "dir")
