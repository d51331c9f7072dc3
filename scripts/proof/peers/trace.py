"""What a program did to the files under one directory, as the kernel saw it: strace, parsed to operations.

An operation takes its place where its call had returned, an fsync where it was called: it makes durable what had returned
by then, and nothing that ran beside it. What strace cannot show (writes through memory, io_uring) is found by the
caller, who compares the replay's end with the directory itself.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CALLS = ("open,openat,creat,close,dup,dup2,dup3,fcntl,lseek,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,"
         "fsync,fdatasync,sync,syncfs,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,link,linkat,symlink,symlinkat,"
         "sendfile,copy_file_range,clone,clone3,fork,vfork")
_CALL = re.compile(r"^(\d+) +(\w+)\((.*)$", re.S)
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$", re.S)
_RESULT = re.compile(r"\)\s+=\s+(-?\d+|0x[0-9a-f]+|\?)([^=]*)$")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_NAMED = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"(\d+)<([^>]*)>")
_ACK = re.compile(rb"ACK (\d+)\n")


class TraceError(Exception):
    """A trace that cannot be replayed: the verdict would be worth nothing."""


@dataclass(frozen=True)
class Op:
    """``call``: create, truncate, write, copy, fsync, sync, mkdir, rename, exchange, link, symlink, unlink, rmdir, or ack.

    ``offset`` None: at the end of the file. ``copy``: ``size`` bytes of ``other`` from ``start``. Paths are absolute.
    """

    call: str
    path: str = ""
    other: str = ""
    data: bytes = b""
    offset: int | None = 0
    size: int = 0
    start: int = 0
    line: int = 0


@dataclass
class _Open:
    """An open file description: descriptors that were duplicated or inherited share it."""

    offset: int = 0
    append: bool = False


@dataclass
class _Parser:
    tables: dict[int, dict[int, _Open]] = field(default_factory=dict)
    leader: dict[int, int] = field(default_factory=dict)

    def table(self, thread: int) -> dict[int, _Open]:
        return self.tables.setdefault(self.leader.get(thread, thread), {})

    def parse(self, line: int, thread: int, call: str, rest: str) -> Iterator[Op]:
        found = _RESULT.search(rest)
        if found is None or not found.group(1)[0].isdigit():
            return
        result, arguments = int(found.group(1), 0), rest[:found.start()]
        table = self.table(thread)
        if call in ("clone", "clone3", "fork", "vfork"):
            self._clone(thread, result, arguments)
        elif call in ("open", "openat", "creat"):
            yield from self._opened(line, table, call, arguments, result, found.group(2))
        elif call in ("dup", "dup2", "dup3") or call == "fcntl" and "F_DUPFD" in arguments:
            here = _DESCRIPTOR.match(arguments)
            if here is not None and int(here.group(1)) in table:
                table[result] = table[int(here.group(1))]
        elif call == "close":
            here = _DESCRIPTOR.match(arguments)
            if here is not None:
                table.pop(int(here.group(1)), None)
        elif call == "sync" or call == "syncfs":
            yield Op("sync", line=line)
        elif call == "truncate":
            yield Op("truncate", _names(arguments)[0], size=int(arguments.rsplit(", ", 1)[1]), line=line)
        elif call != "fcntl" and call not in _BY_NAME and _DESCRIPTOR.match(arguments):
            yield from self._on_descriptor(line, table, call, arguments, result)
        elif call in _BY_NAME:
            yield from _by_name(line, call, arguments)

    def _clone(self, thread: int, child: int, arguments: str) -> None:
        here = self.leader.get(thread, thread)
        if "CLONE_THREAD" in arguments or "CLONE_FILES" in arguments:
            self.leader[child] = here
        else:
            self.leader[child] = child
            self.tables[child] = dict(self.table(thread))

    @staticmethod
    def _opened(line: int, table: dict[int, _Open], call: str, arguments: str, result: int, shown: str) -> Iterator[Op]:
        table[result] = _Open(append="O_APPEND" in arguments)
        path = _text(shown.strip()[1:].split(">")[0])
        if "O_TMPFILE" in arguments:
            raise TraceError(f"line {line}: a file without a name in {path}")
        if call == "creat" or "O_CREAT" in arguments:
            yield Op("create", path, line=line)
        if call == "creat" or "O_TRUNC" in arguments:
            yield Op("truncate", path, line=line)

    def _on_descriptor(self, line: int, table: dict[int, _Open], call: str, arguments: str, result: int) -> Iterator[Op]:
        here = _DESCRIPTOR.match(arguments)
        assert here is not None
        number, path = int(here.group(1)), _text(here.group(2))
        opened = table.setdefault(number, _Open())
        last = arguments.rsplit(", ", 1)[-1]
        if call == "lseek":
            opened.offset = result
        elif call in ("fsync", "fdatasync"):
            yield Op("fsync", path, line=line)
        elif call == "ftruncate":
            yield Op("truncate", path, size=int(last), line=line)
        elif call == "fallocate":
            _, mode, begin, length = arguments.split(", ")
            if mode == "0":
                yield Op("grow", path, size=int(begin) + int(length), line=line)
            elif "KEEP_SIZE" not in mode or "PUNCH" in mode:
                raise TraceError(f"line {line}: fallocate {mode}")
        elif call in ("sendfile", "copy_file_range"):
            yield from self._copied(line, table, call, arguments, result)
        else:
            texts = _TEXT.findall(arguments)
            if any(cut for _, cut in texts):
                raise TraceError(f"line {line}: strace cut a write short")
            data = b"".join(_bytes(text) for text, _ in texts)[:result]
            ack = _ACK.fullmatch(data)
            if ack:
                yield Op("ack", size=int(ack.group(1)), line=line)
            elif call in ("write", "writev"):
                yield Op("write", path, data=data, offset=None if opened.append else opened.offset, line=line)
                opened.offset += result
            else:
                at = arguments.rsplit(", ", 2)[1] if call == "pwritev2" else last
                yield Op("write", path, data=data, offset=int(at), line=line)

    @staticmethod
    def _copied(line: int, table: dict[int, _Open], call: str, arguments: str, result: int) -> Iterator[Op]:
        """Both give the two descriptors, each with an offset that is NULL (the description's own) or ``[before] => [after]``."""
        (one, a), (two, b) = _DESCRIPTOR.findall(arguments)[:2]
        offsets = re.findall(r"[,>] (NULL|\[\d+\])(?: => \[\d+\])?", arguments)
        if call == "sendfile":
            target, source, at, begin = (one, a), (two, b), "NULL", offsets[0]
        else:
            source, target, begin, at = (one, a), (two, b), offsets[0], offsets[1]
        places = []
        for (number, _), shown in ((target, at), (source, begin)):
            opened = table.setdefault(int(number), _Open())
            if shown == "NULL":
                places.append(opened.offset)
                opened.offset += result
            else:
                places.append(int(shown.strip("[]")))
        yield Op("copy", _text(target[1]), _text(source[1]), offset=places[0], start=places[1], size=result, line=line)


_BY_NAME = {"mkdir": "mkdir", "mkdirat": "mkdir", "rename": "rename", "renameat": "rename", "renameat2": "rename",
            "unlink": "unlink", "unlinkat": "unlink", "rmdir": "rmdir", "link": "link", "linkat": "link", "symlink": "symlink",
            "symlinkat": "symlink"}


def _by_name(line: int, call: str, arguments: str) -> Iterator[Op]:
    kind = _BY_NAME[call]
    if kind == "unlink" and "AT_REMOVEDIR" in arguments:
        kind = "rmdir"
    if kind == "rename" and "RENAME_EXCHANGE" in arguments:
        kind = "exchange"
    if kind == "symlink":  # what it says is text, not a path of ours
        said = _TEXT.search(arguments)
        assert said is not None
        yield Op("symlink", _names(arguments[said.end() + 2:])[0], data=_bytes(said.group(1)), line=line)
        return
    names = _names(arguments)
    yield Op(kind, names[0], names[1] if len(names) > 1 else "", line=line)


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _text(shown: str) -> str:
    return os.fsdecode(_bytes(shown)) if shown.startswith("\\x") else shown


def _names(arguments: str) -> list[str]:
    return [os.path.normpath(os.path.join(_text(folder) or "/", _text(name))) for folder, name in _NAMED.findall(arguments)]


def parse(lines: Iterable[str]) -> list[Op]:
    """The operations of a trace, wherever their files are, in the order in which they took effect."""
    parser, halves = _Parser(), dict[int, tuple[int, str]]()
    found: list[tuple[int, Op]] = []
    for number, line in enumerate(lines):
        line = line.rstrip("\n")
        resumed, match = _RESUMED.match(line), _CALL.match(line)
        begin = number
        if resumed:
            thread, call = int(resumed.group(1)), resumed.group(2)
            begin, first = halves.pop(thread)
            rest = first + resumed.group(3)
        elif match:
            thread, call, rest = int(match.group(1)), match.group(2), match.group(3)
            if rest.endswith("<unfinished ...>"):
                halves[thread] = number, rest.removesuffix("<unfinished ...>").rstrip()
                continue
        else:
            continue  # a signal, or an exit
        for op in parser.parse(number, thread, call, rest):
            found.append((begin if op.call in ("fsync", "sync") else number, op))
    return [op for _, op in sorted(found, key=lambda pair: pair[0])]


def record(command: Sequence[str], out: Path, env: Mapping[str, str], limit: float) -> list[Op]:
    """Run ``command`` under strace; TraceError with what it printed when it fails or is not done in ``limit`` seconds."""
    strace = ["strace", "--seccomp-bpf", "-f", "-y", "-xx", "-s", str(1 << 23), "-o", str(out), "-e", f"trace={CALLS}"]
    with open(f"{out}.log", "w+b") as log:
        child = subprocess.Popen([*strace, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(env))
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            child.terminate()  # strace ends its children with it
            child.wait()
            code = -1
        log.seek(0)
        if code != 0:
            raise TraceError(f"{' '.join(command)} ended with {code}:\n{log.read()[-3000:].decode(errors='replace')}")
    with open(out, encoding="ascii", errors="replace") as lines:
        return parse(lines)
