"""The same faults from outside: strace strikes the system call in place of the seam, so that the seam is not trusted.

Without ``--seccomp-bpf``, which drops an injected signal. ``when=`` counts the calls of one thread, so that only what the main
thread does is struck.
"""

from __future__ import annotations

import os
import platform
import select
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.proof.loops.judge import Item, Judged, Known, judge
from scripts.proof.loops.strikes import CALLS

KINDS = (("error", "EIO"), ("error", "ENOSPC"), ("kill", ""))
PROGRAMS = ("sync", "members")
_ATTACH = 20.0
_TRIES = 4


def missing() -> str | None:
    """Why nothing can be struck from outside here."""
    if platform.machine() != "x86_64":
        return "names of system calls are those of x86_64"
    return None if shutil.which("strace") else "no strace"


def countable(order: list[tuple[str, str, bool]]) -> list[tuple[str, int]]:
    """(system call, how manieth of the main thread's) of every operation that is one."""
    seen: Counter[str] = Counter()
    found = []
    for op, _, main in order:
        call = next((call for call, ops in CALLS.items() if op in ops), None)
        if main and call is not None:
            seen[call] += 1
            found.append((call, seen[call]))
    return found


class _Strace:
    def __init__(self, item: Item, log: str) -> None:
        strike = item.strike
        what = "signal=KILL" if strike.kind == "kill" else f"error={strike.number}"
        self._command = ["strace", "-f", "-o", log, "-e", f"trace={strike.call}", "-e",
                         f"inject={strike.call}:{what}:when={strike.n}"]
        self._log, self._kills = Path(log), strike.kind == "kill"
        self._process: subprocess.Popen[bytes] | None = None

    def attach(self, pid: int) -> None:
        self._process = subprocess.Popen([*self._command, "-p", str(pid)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
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
        assert self._process is not None
        self._process.wait(_ATTACH)
        text = self._log.read_text(errors="replace")
        return "killed by SIGKILL" in text if self._kills else "(INJECTED)" in text

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
