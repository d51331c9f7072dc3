"""A file system in memory that keeps what was fsynced apart from what was not, and can lose the rest.

The rules are POSIX's minimum; an ordinary disk keeps more.

* ``fsync`` of a file makes its bytes durable, not its name. ``fsync_dir`` makes the entries of that one directory durable,
  not those of its parent, and not the bytes of its files.
* Every change of an entry (create, mkdir, link, unlink, rmdir, rename, exchange) is one pending operation until it is
  synced. After a cut any subset of the pending ones may have happened, in any order, as long as two that touch the
  same name happened in their order.
* A rename is one operation, seen in both parents or in neither. It is durable once the *target's* parent is synced;
  an exchange once both parents are.
* Bytes that were not synced are, after a cut, all there, none there, zeros, or half there, file by file.
* An fsync that fails (``poison``) leaves the bytes in the cache, where they can be read, and drops them from the
  queue: a later fsync reports success and still writes nothing (RELIABILITY.md, fsyncgate).

A process that dies loses nothing (``after_kill``). ``crash_states`` gives what a power cut may leave.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

from distckpt.durable import Access, Files, Folder, Item, Opened, Output, Stat
from distckpt.testing.crashdisk import Disk, Node, PowerCut, fail

__all__ = ["CrashFiles", "PowerCut", "write_payload"]


class _Out:
    """An open file keeps writing to its inode, wherever its name goes meanwhile."""

    def __init__(self, files: CrashFiles, node: Node, path: str) -> None:
        self._files, self._node, self._path = files, node, path
        self._open = True

    def _check(self) -> None:
        if not self._open:
            fail(errno.EBADF, self._path)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        with self._files._operation("write", self._path):
            self._check()
            self._node.data += memoryview(data).cast("B")
        return memoryview(data).nbytes

    def start_writeback(self, offset: int, length: int) -> None:
        return None

    def await_writeback(self, offset: int, length: int) -> None:
        """The kernel tells a write error once, and this may be the call that it is told to: a later fsync succeeds."""
        if self._node.poisoned:
            self._files._sync_data(self._node, self._path)

    def drop_cache(self, offset: int, length: int) -> None:
        return None

    def fsync(self) -> None:
        with self._files._operation("fsync", self._path):
            self._check()
            self._files._sync_data(self._node, self._path)

    def close(self) -> None:
        with self._files._operation("close", self._path):
            self._open = False


class _Folder:
    """A directory held open: by inode, so that a rename of it takes nothing away from who holds it."""

    def __init__(self, files: CrashFiles, node: Node, path: str) -> None:
        self._files, self._node, self.path = files, node, path

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def _child(self, name: str) -> Node:
        if name not in self._node.entries:
            fail(errno.ENOENT, f"{self.path}/{name}")
        return self._files.nodes[self._node.entries[name]]

    def scan(self) -> list[Item]:
        with self._files._operation("scan", self.path):
            return self._files._items(self._node)

    def folder(self, name: str) -> _Folder:
        with self._files._operation("stat", f"{self.path}/{name}"):
            return self._files._folder(self._child(name), f"{self.path}/{name}")

    def unlink(self, name: str) -> None:
        with self._files._operation("unlink", f"{self.path}/{name}"):
            if self._child(name).kind == "dir":
                fail(errno.EISDIR, f"{self.path}/{name}")
            self._files._change({(self._node.number, name): None}, {self._node.number})

    def rmdir(self, name: str) -> None:
        with self._files._operation("rmdir", f"{self.path}/{name}"):
            node = self._child(name)
            if node.kind != "dir" or node.entries:
                fail(errno.ENOTEMPTY if node.kind == "dir" else errno.ENOTDIR, f"{self.path}/{name}")
            self._files._change({(self._node.number, name): None}, {self._node.number})


class CrashFiles(Disk, Files):
    """An empty disk with the durable directories ``made``. All paths are absolute; there is one device, mounted at /.

    ``before_op(op, path)`` is called before each operation, reading ones included; it may raise, or let others act.
    ``exchange_supported``, ``links_supported``, ``network`` and ``room`` (free bytes) say what kind of disk this is.
    """

    def __init__(self, *made: str, before_op: Callable[[str, str], None] | None = None) -> None:
        super().__init__(before_op)
        for path in made:
            here = ""
            for part in self._parts(path):
                here += "/" + part
                if not self.is_dir(here):
                    self.mkdir(here)
        self.sync_all()

    # -- Files: reading ----------------------------------------------------------------------------------------------

    def scan(self, path: str) -> list[Item]:
        with self._operation("scan", path):
            node = self._find(path)
            if node.kind != "dir":
                fail(errno.ENOTDIR, path)
            return self._items(node)

    def _items(self, node: Node) -> list[Item]:
        return [Item(name, self.nodes[child].kind) for name, child in sorted(node.entries.items())]

    def _folder(self, node: Node, path: str) -> _Folder:
        if node.kind != "dir":
            fail(errno.ELOOP if node.kind == "link" else errno.ENOTDIR, path)
        return _Folder(self, node, path)

    def folder(self, top: str, below: str) -> Folder:
        path = os.path.normpath(os.path.join(top, below))
        with self._operation("stat", path):
            return self._folder(self._find(path), path)

    def look(self, top: str, below: str) -> Stat:
        return self.stat(os.path.join(top, below))

    def member(self, top: str, below: str) -> Opened:
        return io.BytesIO(self.read(os.path.join(top, below), 1 << 62))

    def access(self, path: str) -> Access:
        return Access(0, 0, 0o755)

    def stat(self, path: str) -> Stat:
        with self._operation("stat", path):
            node = self._find(path)
            return Stat(node.kind, len(node.data), node.number, 1)

    def read(self, path: str, limit: int) -> bytes:
        with self._operation("read", path):
            node = self._find(path)
            if node.kind != "file":
                fail(errno.ELOOP if node.kind == "link" else errno.EINVAL, path)
            return bytes(node.data[:limit])

    def pieces(self, path: str) -> Iterator[memoryview]:
        data = self.read(path, 1 << 62)
        for start in range(0, len(data), 1 << 16):
            yield memoryview(data)[start:start + (1 << 16)]

    def free(self, path: str) -> int:
        return self.room

    def is_dir(self, path: str) -> bool:
        try:
            return self.stat(path).kind == "dir"
        except OSError:
            return False

    def real(self, path: str) -> str:
        return os.path.normpath(path)

    def mount_point(self, path: str) -> str:
        return "/"

    def is_network(self, path: str) -> bool:
        return self.network

    # -- Files: writing ----------------------------------------------------------------------------------------------

    def mkdir(self, path: str) -> None:
        with self._operation("mkdir", path):
            self._make(path, "dir")

    def symlink(self, path: str) -> None:
        """A symlink to somewhere, for tests: it is seen as one and never followed."""
        with self._operation("symlink", path):
            self._make(path, "link")

    def open(self, path: str) -> Output:
        with self._operation("open", path):
            return _Out(self, self._make(path, "file"), path)

    def _in_place(self, path: str) -> Node:
        parent, name = self._parent(path)
        if name not in parent.entries:
            return self._make(path, "file")
        node = self.nodes[parent.entries[name]]
        if node.kind != "file":
            fail(errno.ELOOP if node.kind == "link" else errno.EISDIR, path)
        return node

    def overwrite(self, path: str, data: bytes) -> None:
        with self._operation("overwrite", path):
            self._in_place(path).data[:len(data)] = data

    def append(self, path: str, data: bytes) -> None:
        with self._operation("append", path):
            self._in_place(path).data += data

    def fsync(self, path: str) -> None:
        with self._operation("fsync_file", path):
            node = self._find(path)
            if node.kind == "link":
                fail(errno.ELOOP, path)
            if node.kind == "dir":
                self._sync_entries(node.number)
            else:
                self._sync_data(node, path)

    sees_open = False

    def start_writeback(self, path: str) -> None:
        """Nothing: what is not synced may be on the disk or not, whoever asked."""

    def drop_cache(self, path: str) -> None:
        """Nothing."""

    def fsync_dir(self, path: str) -> None:
        with self._operation("fsync_dir", path):
            node = self._find(path)
            if node.kind != "dir":
                fail(errno.ENOTDIR, path)
            self._sync_entries(node.number)

    def rename(self, source: str, target: str) -> None:
        with self._operation("rename", source):
            here, old = self._parent(source)
            if old not in here.entries:
                fail(errno.ENOENT, source, target)
            there, new = self._parent(target)
            moving = self.nodes[here.entries[old]]
            standing = self.nodes[there.entries[new]] if new in there.entries else None
            if standing is moving:
                return
            if moving.kind == "dir":
                self._refuse_into_itself(source, target)
                if standing is not None and standing.kind != "dir":
                    fail(errno.ENOTDIR, source, target)
                if standing is not None and standing.entries:
                    fail(errno.ENOTEMPTY, source, target)
            elif standing is not None and standing.kind == "dir":
                fail(errno.EISDIR, source, target)
            self._change({(here.number, old): None, (there.number, new): moving.number}, {there.number})

    @staticmethod
    def _refuse_into_itself(source: str, target: str) -> None:
        if (os.path.normpath(target) + "/").startswith(os.path.normpath(source) + "/"):
            fail(errno.EINVAL, source, target)

    def exchange(self, one: str, other: str) -> bool:
        with self._operation("exchange", one):
            if not self.exchange_supported:
                return False
            first, second = self._find(one), self._find(other)
            (here, name), (there, title) = self._parent(one), self._parent(other)
            if first is not second:
                self._refuse_into_itself(one, other)
                self._refuse_into_itself(other, one)
                self._change({(here.number, name): second.number, (there.number, title): first.number},
                             {here.number, there.number})
            return True

    def link(self, source: str, target: str) -> bool:
        with self._operation("link", source):
            node = self._find(source)
            parent, name = self._parent(target)
            if name in parent.entries:
                fail(errno.EEXIST, source, target)
            if not self.links_supported or node.kind == "dir":
                return False
            self._change({(parent.number, name): node.number}, {parent.number})
            return True

    def unlink(self, path: str) -> None:
        with self._operation("unlink", path):
            if self._find(path).kind == "dir":
                fail(errno.EISDIR, path)
            parent, name = self._parent(path)
            self._change({(parent.number, name): None}, {parent.number})

    def rmdir(self, path: str) -> None:
        with self._operation("rmdir", path):
            node = self._find(path)
            if node.kind != "dir":
                fail(errno.ENOTDIR, path)
            if node.entries:
                fail(errno.ENOTEMPTY, path)
            parent, name = self._parent(path)
            self._change({(parent.number, name): None}, {parent.number})


def write_payload(files: Files, path: str, data: bytes, durable: bool = True) -> None:
    """A file with these bytes, its missing directories made on the way; with ``durable`` synced, names included."""
    made, here = [], os.path.dirname(path)
    while not files.is_dir(here):
        made.append(here)
        here = os.path.dirname(here)
    for directory in reversed(made):
        files.mkdir(directory)
    out = files.open(path)
    try:
        out.write(data)
        if durable:
            out.fsync()
    finally:
        out.close()
    for directory in [os.path.dirname(path), *map(os.path.dirname, made)] if durable else []:
        files.fsync_dir(directory)
