"""A recorded run (``trace``) as steps on the disk of ``CrashFiles``: what each process did to which inode, in order.

A step names inodes and not paths, so that it means the same when other processes are further on, or less far, than they
were. What the trace cannot show (shared mappings that are written to, io_uring, copies inside the kernel) is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from distckpt.testing import trace
from distckpt.testing.crashdisk import Node
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.trace import Call, TraceError

Effects = dict[tuple[int, str], int | None]


class InvisibleWrite(TraceError):
    """A file is written in a way that the trace does not show."""


@dataclass(frozen=True)
class Step:
    """Something one process did. ``process``: its pid, threads alike. ``line``: where it stands in the trace."""

    process: int
    line: int

    def possible(self, disk: CrashFiles) -> bool:
        """Whether the disk is one on which this can happen."""
        return True

    def apply(self, disk: CrashFiles) -> None:
        return None


@dataclass(frozen=True)
class Mark(Step):
    """A text that the program wrote to ``trace.MARK``."""

    text: str


@dataclass(frozen=True)
class Names(Step):
    """Entries change, in one go: create, mkdir, link, unlink, rmdir, rename, exchange. ``before``: what must stand there.
    ``made``: (inode, kind) of a new one. ``path``: of the entry that the call was about."""

    path: str
    effects: Effects
    waits: frozenset[int]
    before: Effects
    made: tuple[int, str] | None = None

    def possible(self, disk: CrashFiles) -> bool:
        return all(where in disk.nodes and disk.nodes[where].entries.get(name) == number
                   for (where, name), number in self.before.items())

    def apply(self, disk: CrashFiles) -> None:
        if self.made is not None:
            disk.nodes[self.made[0]] = Node(*self.made)
            disk._next = max(disk._next, self.made[0] + 1)
        disk._change(self.effects, set(self.waits))


@dataclass(frozen=True)
class Write(Step):
    node: int
    offset: int
    data: bytes

    def possible(self, disk: CrashFiles) -> bool:
        return self.node in disk.nodes

    def apply(self, disk: CrashFiles) -> None:
        held = disk.nodes[self.node].data
        held.extend(b"\0" * (self.offset - len(held)))
        held[self.offset:self.offset + len(self.data)] = self.data


@dataclass(frozen=True)
class Resize(Step):
    node: int
    size: int

    def possible(self, disk: CrashFiles) -> bool:
        return self.node in disk.nodes

    def apply(self, disk: CrashFiles) -> None:
        held = disk.nodes[self.node].data
        held.extend(b"\0" * (self.size - len(held)))
        del held[self.size:]


@dataclass(frozen=True)
class Sync(Step):
    node: int

    def possible(self, disk: CrashFiles) -> bool:
        return self.node in disk.nodes

    def apply(self, disk: CrashFiles) -> None:
        node = disk.nodes[self.node]
        if node.kind == "dir":
            disk._sync_entries(node.number)
        else:
            disk._sync_data(node, "")


@dataclass
class _Open:
    """An open file: shared by the descriptors that were copied from one another."""

    node: int
    offset: int = 0
    append: bool = False


@dataclass
class Run:
    """``steps`` in an order in which they happened; ``disk``: as it was before them. ``parent``: of each process."""

    base: str
    disk: CrashFiles
    steps: list[Step] = field(default_factory=list)
    parent: dict[int, int] = field(default_factory=dict)

    def end(self) -> CrashFiles:
        """The disk after all steps, with nothing lost."""
        disk = self.disk.after_kill()
        for step in self.steps:
            step.apply(disk)
        return disk


def compile_run(calls: Iterable[Call], base: str) -> Run:
    """The steps under ``base``, an absolute path without links; it was there, empty and durable, when the run began.

    InvisibleWrite when something under ``base`` is written unseen, TraceError when the calls make no sense. Compare
    ``end().snapshot()`` with the real directory: what was missed shows there.
    """
    return _Compiler(base).run(list(calls))


class _Compiler:
    def __init__(self, base: str) -> None:
        self._base = os.path.normpath(base)
        self._run = Run(self._base, CrashFiles(self._base))
        self._disk = self._run.disk.after_kill()
        self._process: dict[int, int] = {}
        self._tables: dict[int, dict[int, _Open]] = {}
        self._next = self._disk._next

    def run(self, calls: list[Call]) -> Run:
        self._family(calls)
        for call in sorted(calls, key=_moment):
            self._take(call)
        return self._run

    def _family(self, calls: list[Call]) -> None:
        """Which threads are one process; a child may be seen before its parent's call has returned."""
        self._born: dict[int, Call] = {}
        for call in calls:
            if call.call in ("clone", "clone3", "fork", "vfork"):
                self._born[call.result] = call

    def _process_of(self, thread: int) -> int:
        if thread not in self._process:
            born = self._born.get(thread)
            if born is not None and "CLONE_THREAD" in born.flags:
                self._process[thread] = self._process_of(born.pid)
            else:
                self._process[thread] = thread
                if born is not None:
                    parent = self._process_of(born.pid)
                    self._run.parent[thread] = parent
                    self._tables.setdefault(thread, dict(self._tables.get(parent, {})))
        return self._process[thread]

    def _inside(self, path: str) -> bool:
        return path == self._base or path.startswith(self._base + "/")

    def _emit(self, step: Step) -> None:
        if not step.possible(self._disk):
            raise TraceError(f"line {step.line}: {step} cannot have happened on the disk that the calls before it made")
        step.apply(self._disk)
        self._run.steps.append(step)

    def _take(self, call: Call) -> None:
        process = self._process_of(call.pid)
        table = self._tables.setdefault(process, {})
        name = call.call
        if name == "mark":
            self._run.steps.append(Mark(process, call.begin, call.text))
        elif name in ("clone", "clone3", "fork", "vfork"):
            self._process_of(call.result)
        elif name in ("dup", "dup2", "dup3") or (name == "fcntl" and "F_DUPFD" in call.flags):
            if call.descriptor in table:
                table[call.result] = table[call.descriptor]
            else:
                table.pop(call.result, None)
        elif name == "close":
            table.pop(call.descriptor, None)
        elif (name == "io_uring_setup" and not _is_libuv(call)) or (name == "io_submit" and call.result):
            raise InvisibleWrite(f"line {call.begin}: {name}: what goes through it cannot be seen here")
        elif name in trace.OPENS:
            self._open(call, process, table)
        elif self._inside(call.path) or self._inside(call.other):
            self._inner(call, process, table)

    def _inner(self, call: Call, process: int, table: dict[int, _Open]) -> None:
        name = call.call
        if name in ("sendfile", "copy_file_range", "splice"):
            if self._inside(call.other if name != "sendfile" else call.path):
                raise InvisibleWrite(f"line {call.begin}: {name} to {call.path} copies inside the kernel")
        elif name == "mmap":
            if "MAP_SHARED" in call.flags and "PROT_WRITE" in call.flags:
                raise InvisibleWrite(f"line {call.begin}: {call.path} is mapped and written to through memory")
        elif name == "ioctl":
            if "FICLONE" in call.flags:
                raise InvisibleWrite(f"line {call.begin}: {call.path} shares the blocks of another file")
        elif name == "lseek":
            if call.descriptor in table:
                table[call.descriptor].offset = call.result
        elif name in trace.SYNCS:
            if not call.deleted:
                self._emit(Sync(process, call.begin, self._node_of(call, table)))
        elif name in trace.WRITES:
            self._write(call, process, table)
        elif name in trace.MKDIRS:
            self._make(call, process, call.path, "dir")
        elif name in trace.RENAMES:
            self._rename(call, process)
        elif name in trace.UNLINKS:
            entry = self._entry(call.path)
            self._names(call, process, {entry: None}, {entry[0]}, {entry: self._standing(call, call.path)})
        elif name in ("link", "linkat"):
            entry, number = self._entry(call.other), self._standing(call, call.path)
            self._names(call, process, {entry: number}, {entry[0]}, {entry: None, self._entry(call.path): number})
        elif name in ("symlink", "symlinkat"):
            self._make(call, process, call.path, "link")

    # -- entries -------------------------------------------------------------------------------------------------

    def _entry(self, path: str) -> tuple[int, str]:
        parent, name = self._disk._parent(path)
        return parent.number, name

    def _standing(self, call: Call, path: str) -> int:
        try:
            return self._disk._find(path).number
        except OSError as error:
            raise TraceError(f"line {call.begin}: {call.call} of {path}, which is not there") from error

    def _names(self, call: Call, process: int, effects: Effects, waits: set[int], before: Effects,
               made: tuple[int, str] | None = None) -> None:
        self._emit(Names(process, call.begin, call.path, effects, frozenset(waits), before, made))

    def _make(self, call: Call, process: int, path: str, kind: str) -> int:
        entry, number = self._entry(path), self._next
        self._next += 1
        self._names(call, process, {entry: number}, {entry[0]}, {entry: None}, (number, kind))
        return number

    def _rename(self, call: Call, process: int) -> None:
        if not (self._inside(call.path) and self._inside(call.other)):
            raise TraceError(f"line {call.begin}: a rename across the border of {self._base}: {call.path} to {call.other}")
        source, target = self._entry(call.path), self._entry(call.other)
        moving, standing = self._standing(call, call.path), self._disk.nodes[target[0]].entries.get(target[1])
        if moving == standing:
            return
        before: Effects = {source: moving, target: standing}
        if "RENAME_EXCHANGE" in call.flags:
            assert standing is not None
            self._names(call, process, {source: standing, target: moving}, {source[0], target[0]}, before)
        else:
            self._names(call, process, {source: None, target: moving}, {target[0]}, before)

    # -- bytes ---------------------------------------------------------------------------------------------------

    def _open(self, call: Call, process: int, table: dict[int, _Open]) -> None:
        table.pop(call.result, None)
        if not self._inside(call.path):
            return
        if "O_TMPFILE" in call.flags:
            raise InvisibleWrite(f"line {call.begin}: a file without a name in {call.path}")
        try:
            number = self._disk._find(call.path).number
        except OSError as error:
            if "O_CREAT" not in call.flags and call.call != "creat":
                raise TraceError(f"line {call.begin}: {call.path} is opened and was never made") from error
            number = self._make(call, process, call.path, "file")
        if ("O_TRUNC" in call.flags or call.call == "creat") and self._disk.nodes[number].data:
            self._emit(Resize(process, call.begin, number, 0))
        table[call.result] = _Open(number, append="O_APPEND" in call.flags)

    def _node_of(self, call: Call, table: dict[int, _Open]) -> int:
        if call.descriptor in table:
            return table[call.descriptor].node
        return self._standing(call, call.path)

    def _write(self, call: Call, process: int, table: dict[int, _Open]) -> None:
        if call.call == "truncate":
            self._emit(Resize(process, call.begin, self._standing(call, call.path), call.numbers[-1]))
            return
        held = table.get(call.descriptor)
        if held is None:
            raise TraceError(f"line {call.begin}: {call.call} to {call.path} through a descriptor whose opening was not seen")
        if call.call == "ftruncate":
            self._emit(Resize(process, call.begin, held.node, call.numbers[-1]))
        elif call.call == "fallocate":
            mode = call.flags.split(", ")[1]
            offset, length = call.numbers[-2:]
            if mode == "0":
                size = max(len(self._disk.nodes[held.node].data), offset + length)
                self._emit(Resize(process, call.begin, held.node, size))
            elif mode != "FALLOC_FL_KEEP_SIZE":
                raise InvisibleWrite(f"line {call.begin}: fallocate of {call.path} with {mode}")
        else:
            data = call.data
            if len(data) != call.result:
                raise TraceError(f"line {call.begin}: {call.result} bytes were written and {len(data)} are in the trace")
            at = call.call.startswith("pwrite")
            size = len(self._disk.nodes[held.node].data)
            offset = call.numbers[-1] if at and not held.append else size if held.append else held.offset
            self._emit(Write(process, call.begin, held.node, offset, data))
            if not at:
                held.offset = offset + len(data)


def _is_libuv(call: Call) -> bool:
    """Whether this ring is the one that libuv, and so torch's store, passes its epoll calls through; its other one, for files,
    is off in a recorded run."""
    return call.flags.startswith("256, ") and "IORING_SETUP_SQPOLL" not in call.flags


def _moment(call: Call) -> int:
    """When a call counts as done, among those that overlap: a sync covers only what had ended before it began, and a child
    has the descriptors that its parent had when it called."""
    early = call.call in (*trace.SYNCS, "clone", "clone3", "fork", "vfork", "mark", "close")
    return call.begin if early else call.end


def prune(disk: CrashFiles) -> None:
    """Forget inodes that no name leads to, now or after any cut."""
    wanted, queue = {1}, [1]
    found: dict[int, set[int]] = {n: {*node.entries.values(), *node.kept_entries.values()} for n, node in disk.nodes.items()}
    for change in disk.pending:
        for (where, _), number in change.effects.items():
            if number is not None:
                found.setdefault(where, set()).add(number)
    while queue:
        for number in found.get(queue.pop(), ()):
            if number not in wanted:
                wanted.add(number)
                queue.append(number)
    disk.nodes = {n: node for n, node in disk.nodes.items() if n in wanted}
