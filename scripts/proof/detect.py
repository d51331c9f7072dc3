"""One detector on the copy of the repository in which this runs: exit code 0 when it is green.

``python -m scripts.proof.detect pytest ARGUMENT ...`` or ``l0``, ``l1``, ``l2``: a short part of that layer, always the same.
Without arguments it serves: a child for each line of stdin, forked after torch was imported, which takes longer than most tests.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from scripts.proof.layer import Budget

HERE = Path(__file__).resolve().parents[2]
ELSEWHERE = 66
"""The exit code when the package that was imported is not the one of this copy."""


_SET_CHILD_SUBREAPER = 36


def family(ancestor: int) -> list[int]:
    """Every process below ``ancestor``, children before their own."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found = list(children.get(ancestor, ()))
    for one in found:
        found += children.get(one, ())
    return found


def _l0() -> list[str]:
    """A few hundred runs of the simulation: single faults, schedules, seeds."""
    from scripts.proof.l0 import Case, Tally, seeded, sweep

    def cases() -> Iterator[Case]:
        yield from (seeded(number) for number in range(100))
        yield from sweep("sync", 2, ("power", "kill"), 7)
        yield from sweep("background", 2, ("fail", "stop"), 13)
        yield from sweep("replacing-nfs", 2, ("power", "fail"), 11)
        yield from sweep("replacing", 2, ("power",), 11)
        yield from sweep("framework", 2, ("power", "kill"), 13)
        yield from sweep("options", 2, ("power", "kill"), 17)
        yield from sweep("best", 2, ("power", "fail"), 17)
        yield from (Case(name, seed=seed) for name in ("stopping", "skipping", "leaving") for seed in range(40))
        yield from (seeded(number) for number in range(100, 300))

    tally = Tally()
    for case in cases():
        tally.run(case)
        if tally.result.violations:
            break
    return tally.result.violations


def _l1() -> list[str]:
    from scripts.proof import l1

    return l1.run(Budget(40.0)).violations


def _l2() -> list[str]:
    from scripts.proof import l2

    result = l2.run(Budget(150.0), runs=40)
    return [*result.violations, *(["hangs"] if result.hangs else [])]


def main(what: str, *arguments: str) -> int:
    import distckpt

    if HERE not in Path(distckpt.__file__).resolve().parents:
        print(f"{distckpt.__file__} is not in {HERE}")
        return ELSEWHERE
    if what == "pytest":
        import pytest

        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=line", "--rootdir", str(HERE), *arguments]))
    logging.disable(logging.CRITICAL)
    found = {"l0": _l0, "l1": _l1, "l2": _l2}[what]()
    for line in found:
        print(f"FAILED {line}")
    return 1 if found else 0


def _detect(*told: str) -> NoReturn:
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that what a broken rank leaves behind stays below this process
    ended = 1
    try:
        ended = main(*told)
    finally:
        for left in family(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)  # a thread that a mutant left hanging must not hold this up


def _serve() -> None:
    """For each line ``{"told": [...], "folder": "..."}``: say the child's pid, then its exit code. What it says is in
    ``out.txt`` in the folder, which is also its place for temporary files."""
    for name in ("hypothesis", "numpy", "pytest", "torch", "torch.distributed"):  # and nothing that a mutant may be in
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.environ["TMPDIR"] = tempfile.tempdir = asked["folder"]
            out = os.open(os.path.join(asked["folder"], "out.txt"), os.O_WRONLY | os.O_CREAT, 0o666)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (out, 1), (out, 2)):
                os.dup2(source, target)
            _detect(*asked["told"])
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _detect(*sys.argv[1:])
    _serve()
