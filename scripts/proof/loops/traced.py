"""The same faults from outside: strace strikes the system call in place of the seam, so that the seam is not trusted.

The seam only says where: it stops the rank right before its n-th operation and notes who was about to do what. strace is put on
that one thread, and when the rank goes on, the thread's next system call of that name fails, or kills it. Without
``--seccomp-bpf``, which drops an injected signal.
"""

from __future__ import annotations

import os
import platform
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

from scripts.proof.loops.judge import Item, Judged, Known, judge

KINDS = (("error", "EIO"), ("error", "ENOSPC"), ("kill", ""))
PROGRAMS = {"sync": 2, "background": 6, "members": 6, "every option": 12}
"""Every so many-th operation of each is struck from outside as well, the kinds in turn: one run in twenty."""
_CALLS = {"open": "openat", "write": "write", "fsync": "fsync", "close": "close", "fsync_file": "fsync", "fsync_dir": "fsync",
          "overwrite": "openat", "append": "openat", "mkdir": "mkdir", "rename": "rename", "exchange": "renameat2",
          "link": "linkat", "unlink": "unlink", "rmdir": "rmdir"}
"""By operation, the system call that is struck: its only one, or the one that it is named after."""
_ATTACH = 20.0
_TRIES = 4


def missing() -> str | None:
    """Why nothing can be struck from outside here."""
    if platform.machine() != "x86_64":
        return "names of system calls are those of x86_64"
    return None if shutil.which("strace") else "no strace"


def call_of(op: str, held: bool) -> str:
    """The system call that ``op`` makes."""
    return "unlinkat" if held else _CALLS[op]


class _Strace:
    def __init__(self, item: Item, log: str) -> None:
        self._log, self._kills = Path(log), item.strike.kind == "kill"
        self._name = ""
        self._what = "signal=KILL" if self._kills else f"error={item.strike.number}"
        self._process: subprocess.Popen[bytes] | None = None

    def attach(self, thread: int, op: str, path: str, held: bool) -> None:
        """To the thread that is stopped before ``op``."""
        call, self._name = call_of(op, held), os.path.basename(path)
        self._process = subprocess.Popen(
            ["strace", "-y", "-o", str(self._log), "-e", f"trace={call}", "-e", f"inject={call}:{self._what}:when=1",
             "-p", str(thread)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        said = b""
        while b"attached" not in said:
            if not select.select([self._process.stderr], [], [], _ATTACH)[0]:
                raise RuntimeError(f"strace did not attach: {said!r}")
            piece = os.read(self._process.stderr.fileno(), 4096)
            if not piece:
                raise RuntimeError(f"strace has ended: {said!r}")
            said += piece

    def struck(self) -> bool:
        """Whether it was, in the call that the seam spoke of: any other would be luck."""
        if self._process is None:
            return False
        self._process.wait(_ATTACH)
        text = self._log.read_text(errors="replace")
        if self._kills and "killed by SIGKILL" not in text:
            return False
        return any(self._name in line and (self._kills or "(INJECTED)" in line) for line in text.splitlines())

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process is not None and self._process.stderr is not None:
            self._process.stderr.close()
        self._log.unlink(missing_ok=True)


def judge_traced(item: Item, known: Known, folder: str) -> Judged:
    """One run struck by the seam and one by strace: both in order, and of one verdict.

    Which operation is a rank's n-th depends on its threads, so two that differ are run again: a seam that is not what the kernel
    sees differs every time.
    """
    judged = judge(item, known, folder)
    inside, outside = [judged.verdicts], list[Any]()

    def once_more(strike: _Strace | None) -> Any:
        other = judge(item, known, folder, strike) if strike is not None else judge(item, known, folder)
        judged.add(other)
        return other.verdicts

    for _ in range(_TRIES):
        strike = _Strace(item, os.path.join(folder, "strace.log"))
        try:
            outside.append(once_more(strike))
        finally:
            strike.close()
        if judged.violations or any(verdict in inside for verdict in outside):
            return judged
        inside.append(once_more(None))
        if judged.violations or inside[-1] in outside:
            return judged
    judged.violations.append(f"the seam and strace disagree: {inside} and {outside}")
    return judged
