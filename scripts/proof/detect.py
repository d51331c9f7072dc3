"""One detector on the copy of the repository in which this runs: exit code 0 when it is green.

``python -m scripts.proof.detect pytest ARGUMENT ...`` or ``l0``, ``l1``, ``l2``: a short part of that layer, always the same.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so that what a broken rank leaves behind stays below this process
    try:
        ended = main(*sys.argv[1:])
    finally:
        for left in family(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
    sys.stdout.flush()
    os._exit(ended)  # a thread that a mutant left hanging must not hold this up
