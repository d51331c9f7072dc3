"""What a program did to its files, as the kernel saw it: runs it under strace and reads the trace. For tests, Linux only.

Run your own training loop under it: ``capture`` and ``read`` give its calls, ``replay.compile_run`` the disk after each of
them, and ``CrashFiles.crash_states`` what a power cut may leave of that.

A line is printed when a call returns, and several processes are printed as strace got round to them. So a call has two
lines, ``begin`` and ``end``, and only "the one had ended before the other began" says anything about their order.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distckpt.coordination.marks import DESCRIPTOR as MARK
from distckpt.coordination.marks import mark as mark

WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "truncate", "fallocate", "sendfile",
          "copy_file_range", "splice")
SYNCS = ("fsync", "fdatasync")
OPENS = ("open", "openat", "openat2", "creat")
RENAMES = ("rename", "renameat", "renameat2")
UNLINKS = ("unlink", "unlinkat", "rmdir")
MKDIRS = ("mkdir", "mkdirat")
LINKS = ("link", "linkat", "symlink", "symlinkat")
DESCRIPTORS = ("lseek", "dup", "dup2", "dup3", "fcntl", "close", "clone", "clone3", "fork", "vfork")
HIDDEN = ("mmap", "io_uring_setup", "io_submit", "ioctl")
CALLS = (*WRITES, *SYNCS, *OPENS, *RENAMES, *UNLINKS, *MKDIRS, *LINKS, *DESCRIPTORS, *HIDDEN)

_CALL = re.compile(r"^(\d+) +(\w+)\((.*)$", re.S)
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$", re.S)
_RESULT = re.compile(r"^(.*)\)\s+=\s+(-?\d+|\?)(.*)$", re.S)
_DESCRIPTOR = re.compile(r"^(\d+)<([^>]*)>(\(deleted\))?")
_TEXT = re.compile(r'(?:AT_FDCWD<([^>]*)>|\d+<([^>]*)>)?,? ?"((?:[^"\\]|\\.)*)"')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\.\.\.)?')
_HEX = re.compile(r"(?:\\x[0-9a-f]{2})*")
_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|[0-7]{1,3}|.)", re.S)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"v": b"\v", b"f": b"\f"}


class TraceError(Exception):
    """The trace cannot be read as what happened, so nothing may be concluded from it."""


def unescape(text: str) -> bytes:
    """The bytes of a string that strace printed, with ``-xx`` or without."""
    if _HEX.fullmatch(text):
        return bytes.fromhex(text.replace("\\x", ""))

    def one(match: re.Match[bytes]) -> bytes:
        what = match.group(1)
        if what[:1] == b"x" and len(what) == 3:
            return bytes([int(what[1:], 16)])
        return bytes([int(what, 8)]) if what.isdigit() else _LETTERS.get(what, what)

    return _ESCAPE.sub(one, text.encode("utf-8", "surrogateescape"))


def _path(text: str) -> str:
    return os.fsdecode(unescape(text))


@dataclass(frozen=True)
class Call:
    """One system call that succeeded, or a mark. It was called at line ``begin`` of the trace and had returned at ``end``.

    ``pid``: the thread. ``path``, ``other``: what it is about, absolute. ``descriptor``: the one it was given, -1 without.
    ``deleted``: that file has no name any more. ``flags``: its arguments as printed.
    """

    call: str
    pid: int
    begin: int
    end: int
    path: str
    other: str = ""
    flags: str = ""
    result: int = 0
    descriptor: int = -1
    deleted: bool = False

    def before(self, later: Call) -> bool:
        return self.end < later.begin

    @property
    def data(self) -> bytes:
        """The bytes of a write. TraceError when the trace was made without them (see ``capture``)."""
        parts = []
        for text, cut in _STRING.findall(self.flags):
            if cut:
                raise TraceError(f"line {self.begin}: the bytes of {self.call} to {self.path} are cut short in the trace")
            parts.append(unescape(text))
        return b"".join(parts)[:self.result]

    @property
    def numbers(self) -> list[int]:
        """The arguments that are plain numbers, in order."""
        return [int(part) for part in self.flags.split(", ") if part.lstrip("-").isdigit()]

    @property
    def text(self) -> str:
        """What a mark says."""
        found = _STRING.search(self.flags)
        return unescape(found.group(1)).decode("utf-8", "replace") if found else ""


def parse(lines: Iterable[str], cwd: str = "/") -> list[Call]:
    """The calls that succeeded, and the marks, in the order in which they were made. A call that another thread cut in two is
    joined; one that its process never came back from, because it was killed, may have happened or not, and is left out.
    """
    calls = []
    halves: dict[int, tuple[int, str, str]] = {}
    killed: set[int] = set()
    for number, line in enumerate(lines):
        line = line.rstrip("\n")
        resumed = _RESUMED.match(line)
        if resumed:
            pid = int(resumed.group(1))
            begin, call, first = halves.pop(pid)
            if call != resumed.group(2):
                raise TraceError(f"line {number}: {resumed.group(2)} of {pid} ends, but {call} had begun")
            rest = first + resumed.group(3)
        else:
            match = _CALL.match(line)
            if match is None:
                head, _, tail = line.partition(" ")
                if head.isdigit() and "+++ killed by" in tail:
                    killed.add(int(head))
                continue
            pid, call, rest, begin = int(match.group(1)), match.group(2), match.group(3), number
            if rest.endswith("<unfinished ...>"):
                halves[pid] = begin, call, rest.removesuffix("<unfinished ...>")
                continue
        result = _RESULT.match(rest)
        if result is None:
            continue
        arguments, value, returned = result.group(1).rstrip(), result.group(2), result.group(3)
        if call == "write" and arguments.startswith(f"{MARK}, "):
            calls.append(Call("mark", pid, begin, number, "", flags=arguments, descriptor=MARK))
        elif value.isdigit():
            calls.append(_call(call, pid, begin, number, arguments, int(value), returned, cwd))
    torn = {pid: half for pid, half in halves.items() if pid not in killed and half[1] not in ("exit", "exit_group", "futex")}
    if torn:
        raise TraceError(f"calls that never returned: {torn}")
    calls.sort(key=lambda c: c.begin)
    return calls


def _call(call: str, pid: int, begin: int, end: int, arguments: str, value: int, returned: str, cwd: str) -> Call:
    found = _DESCRIPTOR.match(arguments)
    descriptor = int(found.group(1)) if found else -1
    if call in OPENS:
        opened = re.match(r"<([^>]*)>", returned)
        name = _path(opened.group(1)) if opened else ""
        return Call(call, pid, begin, end, name, flags=arguments, result=value, descriptor=value)
    if call in (*RENAMES, *UNLINKS, *MKDIRS, *LINKS, "truncate"):
        names = [os.path.normpath(os.path.join(cwd, _path(here or there), _path(text)))
                 for here, there, text in _TEXT.findall(arguments)]
        if call.startswith("symlink"):
            names.reverse()
        return Call(call, pid, begin, end, names[0] if names else "", names[1] if len(names) > 1 else "", arguments, value)
    if call == "mmap":
        mapped = re.search(r"\d+<([^>]*)>", arguments)
        return Call(call, pid, begin, end, _path(mapped.group(1)) if mapped else "", flags=arguments, result=value)
    other = ""
    if call in ("sendfile", "copy_file_range", "splice"):
        ends = [_path(text) for text in re.findall(r"\d+<([^>]*)>", arguments)]
        other = ends[-1] if ends else ""
    path = _path(found.group(2)) if found else ""
    return Call(call, pid, begin, end, path, other, arguments, value, descriptor, bool(found and found.group(3)))


def program(python: str) -> str:
    """``python``, if it is a program. TraceError for a script that starts one: strace would see the script's calls."""
    real = os.path.realpath(python)
    with open(real, "rb") as file:
        if file.read(4) != b"\x7fELF":
            raise TraceError(f"{python} is a script; give the interpreter that it starts")
    return python


def capture(command: Sequence[str], out: str | Path, *, data: bool = True, limit: float = 240.0, cwd: str | Path | None = None,
            env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``command`` under strace with all its threads and children; how it ended. The trace is put in ``out``.

    ``data=False`` leaves the bytes out: quicker, and enough for questions of order. ``limit``: seconds until all of it is
    killed and subprocess.TimeoutExpired raised.
    """
    shown = ["-xx", "-s", str(16 << 20)] if data else ["-s", "64"]
    strace = subprocess.Popen(
        ["strace", "--seccomp-bpf", "-f", "-y", *shown, "-o", str(out), "-e", f"trace={','.join(CALLS)}", "-e", "signal=none",
         *command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**(os.environ if env is None else env), "UV_USE_IO_URING": "0"})  # torch's store would, for its sockets
    try:
        said, complained = strace.communicate(timeout=limit)
    except BaseException:
        os.killpg(strace.pid, signal.SIGKILL)  # strace alone would leave what it traces running
        strace.communicate()
        raise
    return subprocess.CompletedProcess(strace.args, strace.returncode, said, complained)


def read(out: str | Path, cwd: str | Path | None = None) -> list[Call]:
    """The calls of a trace in a file; ``cwd``: where its command was run."""
    with open(out, encoding="utf-8", errors="surrogateescape") as lines:
        return parse(lines, os.path.realpath(cwd or os.getcwd()))
