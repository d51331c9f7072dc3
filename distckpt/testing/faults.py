"""The n-th operation fails, kills the process, lies, or lets somebody else go first.

``FaultyFiles`` stands between the library and any other ``Files``. It counts and logs every operation that writes or
orders, so that a test can run a save once, read the log, and then repeat it with operation 1, 2, 3 ... going wrong,
until a run needs no fault any more. A fault that never fired proves nothing: assert ``fired``.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from distckpt.durable import REAL, Access, Files, Folder, Item, Opened, Output, Stat

T = TypeVar("T")
PathTest = str | Callable[[str], bool] | None

WRITES = ("mkdir", "open", "write", "fsync", "close", "overwrite", "append", "fsync_file", "fsync_dir", "rename",
          "exchange", "link", "unlink", "rmdir")
READS = ("scan", "stat", "read")
HINTS = ("start_writeback", "await_writeback", "drop_cache")
RESENT = ("mkdir", "rename", "unlink", "rmdir", "link")
ENVIRONMENT = "DISTCKPT_FAULT"


class Killed(BaseException):
    """The process "died" here (see ``die``): like SIGKILL, no handler of the code under test may repair anything."""


@dataclass(frozen=True)
class Operation:
    """One counted operation. ``other`` is the second name of a rename, an exchange or a link; ``thread`` the native id of
    who did it. ``held``: below a directory that is held open, so that the kernel is asked otherwise."""

    n: int
    op: str
    path: str
    other: str = ""
    thread: int = field(default=0, compare=False)
    held: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.n}: {self.op} {self.path}" + (f" -> {self.other}" if self.other else "")


@dataclass
class Fault:
    """What goes wrong, and where. Made by ``fail``, ``kill``, ``die``, ``lie``, ``shorten``, ``resend``, ``refuse`` and ``call``.

    It fires at the ``at``-th operation that matches ``op`` and ``path`` (all operations, without them), and with
    ``forever`` at every matching one from there on. ``path`` is a part of the name, or a test of it. Reading
    operations (scan, stat, read) and hints to the page cache are not counted; they match only a fault that names them.
    ``note`` hears of each firing before it has an effect: what it writes down outlives a kill.
    """

    kind: str
    at: int = 1
    op: str | tuple[str, ...] | None = None
    path: PathTest = None
    forever: bool = False
    after: bool = False
    number: int = errno.EIO
    hook: Callable[[Operation], None] | None = None
    note: Callable[[Operation], None] | None = None
    seen: int = 0
    fired: int = 0

    def claims(self, operation: Operation) -> bool:
        """Whether this is the operation to go wrong; counts it."""
        named = (self.op,) if isinstance(self.op, str) else self.op
        if operation.op not in (named if named is not None else WRITES):
            return False
        paths = [p for p in (operation.path, operation.other) if p]
        test = self.path
        if isinstance(test, str):
            if not any(test in p for p in paths):
                return False
        elif test is not None and not any(test(p) for p in paths):
            return False
        self.seen += 1
        if self.seen != self.at and not (self.forever and self.seen > self.at):
            return False
        self.fired += 1
        if self.note is not None:
            self.note(operation)
        return True


def fail(number: int, at: int = 1, *, op: str | tuple[str, ...] | None = None, path: PathTest = None,
         forever: bool = False, after: bool = False) -> Fault:
    """Raise OSError(``number``). ``after``: do the operation first, so that only its reply is lost (S14)."""
    return Fault("error", at, op, path, forever, after, number=number)


def kill(at: int = 1, *, op: str | tuple[str, ...] | None = None, path: PathTest = None, after: bool = False) -> Fault:
    """SIGKILL this process before the operation, or right ``after`` it."""
    return Fault("kill", at, op, path, after=after)


def shorten(at: int = 1, *, op: str | tuple[str, ...] | None = ("write", "overwrite", "append"), path: PathTest = None,
            forever: bool = False) -> Fault:
    """Report a whole write and do half of it."""
    return Fault("short", at, op, path, forever)


def die(at: int = 1, *, op: str | tuple[str, ...] | None = None, path: PathTest = None, after: bool = False) -> Fault:
    """Raise ``Killed`` at the operation and at every one after it: a SIGKILL for a test within one process."""
    return Fault("die", at, op, path, after=after)


def lie(at: int = 1, *, op: str | tuple[str, ...] | None = None, path: PathTest = None, forever: bool = False) -> Fault:
    """Report success and do nothing: a lying disk, or a mutant of the code under test that forgot the call."""
    return Fault("skip", at, op, path, forever)


def resend(at: int = 1, *, op: str | tuple[str, ...] = RESENT, path: PathTest = None) -> Fault:
    """Do the operation twice, and answer what the second time says: NFS, when the reply was lost and the server remembers
    nothing, because it was started again. Only for operations that a client sends again as they are (``RESENT``)."""
    return Fault("again", at, op, path)


def refuse(op: str | tuple[str, ...] = ("exchange", "link")) -> Fault:
    """Exchange and hard links are not supported here (NFS): the call returns False."""
    return Fault("refuse", 1, op, None, forever=True)


def call(hook: Callable[[Operation], None], at: int = 1, *, op: str | tuple[str, ...] | None = None,
         path: PathTest = None, forever: bool = False, after: bool = False) -> Fault:
    """Let somebody else act just before (or after) the operation, or block on an event there."""
    return Fault("call", at, op, path, forever, after, hook=hook)


class _Out:
    def __init__(self, files: FaultyFiles, inner: Output | None, path: str) -> None:
        self._files, self._inner, self._path = files, inner, path

    def write(self, data: bytes | bytearray | memoryview) -> int:
        inner, size = self._inner, memoryview(data).nbytes
        half = memoryview(data).cast("B")[:size // 2]

        def write(what: bytes | bytearray | memoryview) -> int:
            if inner:
                inner.write(what)
            return size

        return self._files._do("write", self._path, "", _Write(lambda: write(data), lambda: write(half)), size)

    def start_writeback(self, offset: int, length: int) -> None:
        inner = self._inner
        self._files._do("start_writeback", self._path, "", lambda: inner.start_writeback(offset, length) if inner else None, None)

    def await_writeback(self, offset: int, length: int) -> None:
        inner = self._inner
        self._files._do("await_writeback", self._path, "", lambda: inner.await_writeback(offset, length) if inner else None, None)

    def drop_cache(self, offset: int, length: int) -> None:
        inner = self._inner
        self._files._do("drop_cache", self._path, "", lambda: inner.drop_cache(offset, length) if inner else None, None)

    def fsync(self) -> None:
        self._files._do("fsync", self._path, "", self._inner.fsync if self._inner else _nothing, None)

    def close(self) -> None:
        self._files._do("close", self._path, "", self._inner.close if self._inner else _nothing, None)


class _Folder:
    def __init__(self, files: FaultyFiles, inner: Folder) -> None:
        self._files, self._inner, self.path = files, inner, inner.path

    def __enter__(self) -> _Folder:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._inner.__exit__(*exc)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def scan(self) -> list[Item]:
        return self._files._do("scan", self.path, "", self._inner.scan, [])

    def folder(self, name: str) -> _Folder:
        return self._files._do("stat", self._at(name), "", lambda: _Folder(self._files, self._inner.folder(name)), self)

    def unlink(self, name: str) -> None:
        self._files._do("unlink", self._at(name), "", lambda: self._inner.unlink(name), None, held=True)

    def rmdir(self, name: str) -> None:
        self._files._do("rmdir", self._at(name), "", lambda: self._inner.rmdir(name), None, held=True)


@dataclass(frozen=True)
class _Write(Generic[T]):
    """An operation that can be done by half."""

    whole: Callable[[], T]
    half: Callable[[], T]

    def __call__(self) -> T:
        return self.whole()


def _nothing() -> None:
    return None


class FaultyFiles(Files):
    """``inner`` with ``faults``. ``log`` holds every operation that writes or orders, in order; ``reads`` those that read, and
    ``hints`` those that hurry the page cache."""

    def __init__(self, inner: Files = REAL, *faults: Fault) -> None:
        self.inner = inner
        self.faults = list(faults)
        self.log: list[Operation] = []
        self.reads: list[Operation] = []
        self.hints: list[Operation] = []
        self.dead = False
        self._lock = threading.Lock()

    @property
    def fired(self) -> bool:
        """Whether every fault went off at least once."""
        return all(fault.fired for fault in self.faults)

    @property
    def count(self) -> int:
        return len(self.log)

    def operations(self, op: str, part: str = "") -> list[Operation]:
        """The logged operations ``op`` whose path, or other path, holds ``part``."""
        return [o for o in self.log if o.op == op and (part in o.path or part in o.other)]

    def _do(self, op: str, path: str, other: str, run: Callable[[], T], skipped: T, refused: T | None = None, *,
            held: bool = False) -> T:
        log = self.reads if op in READS else self.hints if op in HINTS else self.log
        with self._lock:
            if self.dead:
                raise Killed(f"{op} {path}")
            operation = Operation(len(log) + 1, op, path, other, threading.get_native_id(), held)
            log.append(operation)
            due = [fault for fault in self.faults if fault.claims(operation)]
        for fault in due:
            if not fault.after:
                self._strike(fault, operation)
        if any(fault.kind == "refuse" for fault in due):
            assert refused is not None, f"{op} cannot be refused"
            return refused
        if any(fault.kind == "short" for fault in due):
            assert isinstance(run, _Write), f"{op} cannot be short"
            run = run.half
        try:
            result = skipped if any(fault.kind == "skip" for fault in due) else run()
            if any(fault.kind == "again" for fault in due):
                result = run()
        except OSError:
            for fault in due:
                if fault.after and fault.kind == "kill":  # the others need an operation that happened
                    self._strike(fault, operation)
            raise
        for fault in due:
            if fault.after:
                self._strike(fault, operation)
        return result

    def _strike(self, fault: Fault, operation: Operation) -> None:
        if fault.kind == "error":
            raise OSError(fault.number, os.strerror(fault.number), operation.path, None, operation.other or None)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "die":
            self.dead = True
            raise Killed(str(operation))
        if fault.hook is not None:
            fault.hook(operation)

    # -- reading: matched only by faults that name it, never counted -----------------------------------------------

    def scan(self, path: str) -> list[Item]:
        return self._do("scan", path, "", lambda: self.inner.scan(path), [])

    def stat(self, path: str) -> Stat:
        return self._do("stat", path, "", lambda: self.inner.stat(path), Stat("file", 0, 0, 0))

    def look(self, top: str, below: str) -> Stat:
        return self._do("stat", os.path.join(top, below), "", lambda: self.inner.look(top, below), Stat("file", 0, 0, 0))

    def member(self, top: str, below: str) -> Opened:
        empty: Opened = io.BytesIO()
        return self._do("read", os.path.join(top, below), "", lambda: self.inner.member(top, below), empty)

    def folder(self, top: str, below: str) -> Folder:
        path, unskippable = os.path.normpath(os.path.join(top, below)), cast("Folder", None)
        return self._do("stat", path, "", lambda: _Folder(self, self.inner.folder(top, below)), unskippable)

    def access(self, path: str) -> Access:
        return self.inner.access(path)

    def read(self, path: str, limit: int) -> bytes:
        return self._do("read", path, "", lambda: self.inner.read(path, limit), b"")

    def pieces(self, path: str) -> Iterator[memoryview]:
        return self._do("read", path, "", lambda: self.inner.pieces(path), iter(()))

    def free(self, path: str) -> int:
        return self.inner.free(path)

    def is_dir(self, path: str) -> bool:
        return self.inner.is_dir(path)

    def real(self, path: str) -> str:
        return self.inner.real(path)

    def mount_point(self, path: str) -> str:
        return self.inner.mount_point(path)

    def is_network(self, path: str) -> bool:
        return self.inner.is_network(path)

    # -- writing ---------------------------------------------------------------------------------------------------

    def mkdir(self, path: str) -> None:
        self._do("mkdir", path, "", lambda: self.inner.mkdir(path), None)

    def open(self, path: str) -> Output:
        return _Out(self, self._do("open", path, "", lambda: self.inner.open(path), None), path)

    def overwrite(self, path: str, data: bytes) -> None:
        half, over = data[:len(data) // 2], self.inner.overwrite
        self._do("overwrite", path, "", _Write(lambda: over(path, data), lambda: over(path, half)), None)

    def append(self, path: str, data: bytes) -> None:
        half = data[:len(data) // 2]
        self._do("append", path, "", _Write(lambda: self.inner.append(path, data), lambda: self.inner.append(path, half)), None)

    def fsync(self, path: str) -> None:
        self._do("fsync_file", path, "", lambda: self.inner.fsync(path), None)

    @property
    def sees_open(self) -> bool:
        return self.inner.sees_open

    def held_open(self, directory: str) -> list[str]:
        return self.inner.held_open(directory)

    def start_writeback(self, path: str) -> None:
        self._do("start_writeback", path, "", lambda: self.inner.start_writeback(path), None)

    def drop_cache(self, path: str) -> None:
        self._do("drop_cache", path, "", lambda: self.inner.drop_cache(path), None)

    def fsync_dir(self, path: str) -> None:
        self._do("fsync_dir", path, "", lambda: self.inner.fsync_dir(path), None)

    def rename(self, source: str, target: str) -> None:
        self._do("rename", source, target, lambda: self.inner.rename(source, target), None)

    def exchange(self, one: str, other: str) -> bool:
        return self._do("exchange", one, other, lambda: self.inner.exchange(one, other), True, False)

    def link(self, source: str, target: str) -> bool:
        return self._do("link", source, target, lambda: self.inner.link(source, target), True, False)

    def unlink(self, path: str) -> None:
        self._do("unlink", path, "", lambda: self.inner.unlink(path), None)

    def rmdir(self, path: str) -> None:
        self._do("rmdir", path, "", lambda: self.inner.rmdir(path), None)


def from_environment(inner: Files = REAL, environment: Mapping[str, str] | None = None) -> Files:
    """``inner``, or with DISTCKPT_FAULT="kill:<n>" in the environment a ``FaultyFiles`` that SIGKILLs this process
    before its n-th operation. For the scripts of kill tests, which hand it to the manager; nothing else reads it."""
    text = (os.environ if environment is None else environment).get(ENVIRONMENT, "")
    if not text:
        return inner
    kind, _, number = text.partition(":")
    if kind != "kill" or not number.isdigit() or int(number) < 1:
        raise ValueError(f"{ENVIRONMENT} must be 'kill:<n>' with n from 1, not {text!r}")
    return FaultyFiles(inner, kill(int(number)))
