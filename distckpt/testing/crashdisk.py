"""The platter and the cache of ``CrashFiles``: inodes, pending changes of names, and what makes them durable.

The rules are in ``crashfs``.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn, TypeVar

ROOT = 1
D = TypeVar("D", bound="Disk")


class PowerCut(BaseException):
    """The machine is off (``cut``): raised in whoever still tries to use it."""


@dataclass
class Node:
    """An inode: what is in the cache, and what is on the platter (``kept_*``)."""

    number: int
    kind: str
    data: bytearray = field(default_factory=bytearray)
    kept_data: bytes = b""
    entries: dict[str, int] = field(default_factory=dict)
    kept_entries: dict[str, int] = field(default_factory=dict)
    poisoned: bool = False
    condemned: bytes | None = None

    @property
    def dirty(self) -> bool:
        return self.kind == "file" and bytes(self.data) != self.kept_data


@dataclass
class Change:
    """One pending change of names: {(directory, name): inode or None}, durable when ``waits`` is empty."""

    effects: dict[tuple[int, str], int | None]
    waits: set[int]

    def touches(self, other: Change) -> bool:
        return not self.effects.keys().isdisjoint(other.effects)


def fail(number: int, path: str, other: str | None = None) -> NoReturn:
    raise OSError(number, os.strerror(number), path, None, other)


def apply(entries: dict[str, int], name: str, number: int | None) -> None:
    if number is None:
        entries.pop(name, None)
    else:
        entries[name] = number


class _Guard:
    """The hook first, without the lock; then the operation under it."""

    def __init__(self, files: Disk, op: str, path: str) -> None:
        self._files, self._op, self._path = files, op, path

    def __enter__(self) -> None:
        if self._files.before_op is not None:
            self._files.before_op(self._op, self._path)
        self._files._lock.acquire()
        if self._files._off:
            self._files._lock.release()
            raise PowerCut(f"{self._op} {self._path}")

    def __exit__(self, *exc: object) -> None:
        self._files._lock.release()


class Disk:
    """The state of ``CrashFiles``, and all that a test asks of it besides the calls of ``Files``."""

    def __init__(self, before_op: Callable[[str, str], None] | None = None) -> None:
        self.before_op = before_op
        self.exchange_supported = self.links_supported = True
        self.network = False
        self.room = 1 << 40
        self.nodes: dict[int, Node] = {ROOT: Node(ROOT, "dir")}
        self.pending: list[Change] = []
        self._next = ROOT + 1
        self._off = False
        self._lock = threading.RLock()

    # -- walking -----------------------------------------------------------------------------------------------------

    def _operation(self, op: str, path: str) -> _Guard:
        return _Guard(self, op, path)

    @staticmethod
    @lru_cache(maxsize=1 << 14)
    def _parts(path: str) -> tuple[str, ...]:
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is not absolute")
        return tuple(part for part in os.path.normpath(path).split("/") if part)

    def _find(self, path: str) -> Node:
        node = self.nodes[ROOT]
        for part in self._parts(path):
            if node.kind != "dir":
                fail(errno.ELOOP if node.kind == "link" else errno.ENOTDIR, path)
            number = node.entries.get(part)
            if number is None:
                fail(errno.ENOENT, path)
            node = self.nodes[number]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        parts = self._parts(path)
        if not parts:
            fail(errno.EBUSY, path)
        parent = self._find(os.path.dirname(os.path.normpath(path)))
        if parent.kind != "dir":
            fail(errno.ENOTDIR, path)
        return parent, parts[-1]

    def _make(self, path: str, kind: str) -> Node:
        parent, name = self._parent(path)
        if name in parent.entries:
            fail(errno.EEXIST, path)
        node = Node(self._next, kind)
        self._next += 1
        self.nodes[node.number] = node
        self._change({(parent.number, name): node.number}, {parent.number})
        return node

    def _change(self, effects: dict[tuple[int, str], int | None], waits: set[int]) -> None:
        for (directory, name), number in effects.items():
            apply(self.nodes[directory].entries, name, number)
        self.pending.append(Change(effects, waits))

    # -- durability --------------------------------------------------------------------------------------------------

    def _sync_data(self, node: Node, path: str) -> None:
        if node.poisoned:
            node.poisoned, node.condemned = False, bytes(node.data)
            fail(errno.EIO, path)
        if node.condemned is None:
            node.kept_data = bytes(node.data)

    def _sync_entries(self, directory: int) -> None:
        done = set()
        for index, change in enumerate(self.pending):
            change.waits.discard(directory)
            if not change.waits:
                done.add(index)
        for index in range(len(self.pending) - 1, -1, -1):  # what a durable change builds on is durable with it
            if index in done:
                done |= {i for i in range(index) if self.pending[i].touches(self.pending[index])}
        for index in sorted(done):
            for (where, name), number in self.pending[index].effects.items():
                apply(self.nodes[where].kept_entries, name, number)
        self.pending = [change for index, change in enumerate(self.pending) if index not in done]

    def sync_all(self) -> None:
        """Everything is durable now: the disk of a machine that was shut down in order."""
        with self._lock:
            for node in self.nodes.values():
                node.kept_entries = dict(node.entries)
                if node.condemned is None:
                    node.kept_data = bytes(node.data)
            self.pending = []

    def poison(self, path: str) -> None:
        """The next fsync of this file fails with EIO, and its bytes never reach the platter."""
        self._find(path).poisoned = True

    def condemn(self, path: str) -> None:
        """As if an fsync of this file had failed before: readable from the cache, gone after a cut, whatever is synced."""
        node = self._find(path)
        node.condemned, node.kept_data = bytes(node.data), b""

    # -- what is left ------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Switch this machine off: whoever still runs on it gets ``PowerCut`` at the next operation."""
        self._off = True

    def after_kill(self: D) -> D:
        """A copy as another process finds it after this one died: nothing lost, and nothing more durable than before."""
        with self._lock:
            copy = type(self)()
            copy.nodes = {n: Node(n, x.kind, bytearray(x.data), x.kept_data, dict(x.entries), dict(x.kept_entries),
                                  x.poisoned, x.condemned) for n, x in self.nodes.items()}
            copy.pending = [Change(dict(c.effects), set(c.waits)) for c in self.pending]
            copy._next = self._next
            copy.exchange_supported, copy.links_supported = self.exchange_supported, self.links_supported
            copy.network, copy.room = self.network, self.room
            return copy

    def crash_states(self: D, limit: int = 1000, seed: int = 0, ordered: bool = False) -> Iterator[D]:
        """Disks that a power cut now may leave, each once, at most ``limit``. ``ordered``: entries survive as a prefix,
        as with a metadata journal; else (weak) any subset that respects each name's own order."""
        from distckpt.testing.crashstates import states

        return states(self, limit, seed, ordered)

    def snapshot(self) -> dict[str, bytes | None]:
        """{path: bytes, or None for a directory} as it reads now."""
        found: dict[str, bytes | None] = {}

        def visit(number: int, path: str) -> None:
            for name, child in sorted(self.nodes[number].entries.items()):
                node = self.nodes[child]
                found[f"{path}/{name}"] = None if node.kind == "dir" else bytes(node.data)
                if node.kind == "dir":
                    visit(child, f"{path}/{name}")

        with self._lock:
            visit(ROOT, "")
        return found

    def put(self, top: str, folder: str) -> None:
        """What stands under ``top`` here, as real files in the directory ``folder``, which is made: for readers of real files."""
        os.makedirs(folder)
        for path, data in sorted(self.snapshot().items()):
            if not path.startswith(f"{top}/"):
                continue
            if data is None:
                os.mkdir(folder + path[len(top):])
            else:
                with open(folder + path[len(top):], "xb") as out:
                    out.write(data)
