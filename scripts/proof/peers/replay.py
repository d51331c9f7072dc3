"""A trace played again on the model of a disk, operation by operation."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distckpt.testing.crashdisk import Node
from distckpt.testing.crashfs import CrashFiles
from scripts.proof.peers.trace import Op, TraceError

Tree = dict[str, bytes | None]


class Replay(CrashFiles):
    """``journal``: an fsync of anything makes every earlier change of a name durable, as ext4's journal does."""

    def __init__(self, journal: bool = False) -> None:
        super().__init__("/root", "/tmp")
        self.journal = journal

    def play(self, op: Op, outside: str) -> None:
        """Do ``op``, whose paths are relative to the traced directory ``outside`` (and begin with a slash)."""
        path, other = op.path, op.other
        if op.call == "create":
            if self._missing(path):
                self._make(path, "file")
        elif op.call in ("truncate", "grow"):
            node = self._find(path)
            if op.call == "truncate":
                del node.data[op.size:]
            node.data.extend(bytes(max(op.size - len(node.data), 0)))
        elif op.call == "write":
            self._put(self._find(path), op.data, op.offset)
        elif op.call == "copy":
            source = bytes(self._find(other).data) if not other.startswith("!") else Path(other[1:]).read_bytes()
            self._put(self._find(path), source[op.start:op.start + op.size], op.offset)
        elif op.call == "fsync":
            self.fsync(path)
            if self.journal:
                self._commit_names()
        elif op.call == "sync":
            self.sync_all()
        elif op.call == "symlink":
            link = self._make(path, "link")
            link.data[:] = link.kept_data = op.data
        elif op.call in ("mkdir", "unlink", "rmdir"):
            getattr(self, op.call)(path)
        elif op.call == "rename" and other.startswith("!") or path.startswith("!"):
            raise TraceError(f"line {op.line}: {op.call} across {outside}: {path} {other}")
        elif op.call in ("rename", "exchange", "link"):
            getattr(self, op.call)(path, other)

    def _commit_names(self) -> None:
        for node in self.nodes.values():
            node.kept_entries = dict(node.entries)
        self.pending = []

    def _missing(self, path: str) -> bool:
        parent, name = self._parent(path)
        return name not in parent.entries

    @staticmethod
    def _put(node: Node, data: bytes, offset: int | None) -> None:
        at = len(node.data) if offset is None else offset
        node.data.extend(bytes(max(at - len(node.data), 0)))
        node.data[at:at + len(data)] = data

    def tree(self, below: str) -> Tree:
        """{path below ``below``: bytes, or None for a directory}. A symlink reads as what it says, after an arrow."""
        found: Tree = {}

        def visit(number: int, path: str) -> None:
            for name, child in self.nodes[number].entries.items():
                node = self.nodes[child]
                found[path + name] = {"dir": None, "file": bytes(node.data)}.get(node.kind, b"-> " + bytes(node.data))
                if node.kind == "dir":
                    visit(child, f"{path}{name}/")

        if not self._missing(below):
            visit(self._find(below).number, "")
        return found


@dataclass(frozen=True)
class Recording:
    """The operations under a traced directory, with paths relative to it. ``/root`` in it is what the program saves into."""

    ops: tuple[Op, ...]

    @property
    def saves(self) -> int:
        return sum(op.call == "ack" for op in self.ops)

    def fsyncs(self) -> tuple[int, int]:
        """How many of files, how many of directories."""
        disk, files, folders = Replay(), 0, 0
        for op in self.ops:
            disk.play(op, "")
            if op.call == "fsync":
                kind = disk._find(op.path).kind
                files, folders = files + (kind == "file"), folders + (kind == "dir")
        return files, folders

    def empty_fsyncs(self) -> int:
        """How many fsyncs of files that held no byte yet, and got some later through the same open file."""
        disk, found, waiting = Replay(), 0, set[int]()
        for op in self.ops:
            disk.play(op, "")
            if op.call == "fsync" and disk._find(op.path).kind == "file" and not disk._find(op.path).data:
                waiting.add(disk._find(op.path).number)
            elif op.call == "write" and disk._find(op.path).number in waiting:
                waiting.discard(disk._find(op.path).number)
                found += 1
        return found

    def points(self, journal: bool) -> Iterator[tuple[Replay, int]]:
        """(the disk, how many saves were acknowledged) after each operation, up to the last acknowledgement."""
        disk, acked = Replay(journal), 0
        for op in self.ops:
            if op.call == "ack":
                acked = op.size
            else:
                disk.play(op, "")
            yield disk, acked
            if acked == self.saves:
                return


def confine(ops: Iterable[Op], work: Path) -> Recording:
    """The operations under ``work``; TraceError when their replay does not end with what ``work`` really holds."""
    found = []
    for op in ops:
        path, other = _inside(op.path, work), _inside(op.other, work)
        if op.call in ("ack", "sync") or not path.startswith("!") or other and not other.startswith("!"):
            found.append(Op(op.call, path, other, op.data, op.offset, op.size, op.start, op.line))
    recording, disk = Recording(tuple(found)), Replay()
    for op in recording.ops:
        try:
            disk.play(op, str(work))
        except OSError as error:
            raise TraceError(f"line {op.line}: {op.call} {op.path} {op.other}: {error}") from error
    real, ours = read_tree(work), {path: data for path, data in disk.tree("/root").items()}
    real = {path.removeprefix("root/"): data for path, data in real.items() if path.startswith("root/")}
    if real != ours:
        wrong = sorted(path for path in real.keys() | ours.keys() if real.get(path) != ours.get(path))
        raise TraceError(f"the replay of {work} ends otherwise than the run did: {wrong[:5]}")
    return recording


def _inside(path: str, work: Path) -> str:
    """``path`` relative to ``work`` with a slash before it; marked with ! when it lies elsewhere."""
    if not path:
        return ""
    return path[len(str(work)):] if path.startswith(f"{work}/") else f"!{path}"


def read_tree(folder: Path) -> Tree:
    """What ``folder`` holds, as ``Replay.tree`` has it."""
    found: Tree = {}
    for here, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(here, name)
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = b"-> " + os.fsencode(os.readlink(path))
            else:
                found[key] = None if name in folders else path.read_bytes()
    return found


def write_tree(folder: Path, tree: Tree) -> None:
    """Make ``folder`` with what ``tree`` says."""
    folder.mkdir(parents=True)
    for path, data in sorted(tree.items()):
        if data is None:
            (folder / path).mkdir(exist_ok=True)
        elif data.startswith(b"-> "):
            os.symlink(os.fsdecode(data[3:]), folder / path)
        else:
            (folder / path).write_bytes(data)
