"""The mutants: each ordering rule of the code, and each check of the files that read what others wrote, is broken in turn, in a
copy, and some layer must turn red.

``mutations`` makes them from the code; each is put into a copy of the repository and shown to the detectors, cheapest first,
until one finds it. One that hangs is found. What no detector finds is a violation, unless ``equivalent.toml`` says why the
change changes nothing that any promise rests on. Detectors must be green on the copy as it is.

``python -m scripts.proof.mutants --only 12`` tries one, ``--file durable.py`` those of one file, ``--list`` numbers them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import tomllib

from scripts.proof.detect import family
from scripts.proof.layer import Budget, Layer, Result
from scripts.proof.mutations import FILES, Mutant, made
from scripts.proof.nearest import nearest

REPOSITORY = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
WORKERS = 2
_COPIED = ("distckpt", "scripts", "tests", "pyproject.toml", "README.md")
_PATIENCE = 60.0
"""Seconds that a detector may take beyond four times what it took on the code as it is."""
_LIMIT = 900.0
_FLAKES = 4

def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_{name}.py" for name in names)


def _ranks(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/ranks/test_{name}.py" for name in names)


@dataclass(frozen=True)
class Detector:
    """A layer, or a part of it that takes a minute: what ``scripts.proof.detect`` is told in the copy."""

    name: str
    command: tuple[str, ...] = ()

    def told(self, file: str) -> tuple[str, ...]:
        if self.name != "own":
            return self.command
        return ("pytest", "-k", "not nth_operation and not broken_order", *nearest(file))


DETECTORS = (
    Detector("own"),
    Detector("l0", ("l0",)),
    Detector("power-cut", ("pytest", "-k", "not mutant", *_unit(
        "order", "durable", "recovery", "rotation", "owned", "ownership", "fencing", "leases", "rank_files", "lost_replies",
        "power_cut", "commit", "fault_loops"))),
    Detector("gate", ("pytest", *_unit("gate", "background", "rounds", "signals"))),
    Detector("schedules", ("pytest", "tests/proof/test_schedules.py")),
    Detector("order", ("pytest", "tests/crash/test_strace_order.py")),
    Detector("ranks", ("pytest", *_ranks(
        "decision", "framework_files", "disagreement", "bad_input", "background_failures", "series_and_leases", "dead_storage",
        "one_step", "failures", "missing", "leaving"))),
    Detector("l1", ("l1",)),
    Detector("l2", ("l2",)),
    Detector("rest", ("pytest", "--ignore=tests/proof", "--ignore=tests/crash/test_strace_order.py", "tests")),
)


_NEAR = ("own", "ranks", "gate", "l0", "schedules")
_TALKS = ("saving/committer.py", "saving/transaction.py", "saving/unclaimed.py", "saving/saver.py", "saving/finaliser.py",
          "background.py")


def in_turn(detectors: Sequence[Detector], file: str) -> list[Detector]:
    """What speaks with other ranks, or waits for them, is shown to ranks before it is shown to power cuts."""
    talks = file in _TALKS or file.startswith("coordination/")
    near = _NEAR if talks else ()
    return sorted(detectors, key=lambda one: near.index(one.name) if one.name in near else len(near))


@dataclass
class Finding:
    """``by``: the layer that found it, "hang (layer)", or "" when none did."""

    mutant: str
    by: str
    seconds: float
    how: str = ""


Tell = Callable[[str, Finding | None], None]
"""Called with a line for people, and with the finding when there is one."""


def _silent(line: str, one: Finding | None) -> None: ...


def explained() -> list[dict[str, str]]:
    """What ``equivalent.toml`` says: ``file``, ``where``, ``text``, ``why``; ``with``, of two that change places; ``within``."""
    entries: list[dict[str, str]] = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("equivalent", [])
    return entries


def _flat(text: str) -> str:
    return " ".join(text.split())


def speaks_of(entry: dict[str, str], mutant: Mutant) -> bool:
    """Whether ``entry`` is about ``mutant``; a text may end in " ..." where it stands for more."""
    def same(said: str, is_there: str) -> bool:
        return _flat(is_there).startswith(said[:-4]) if said.endswith(" ...") else _flat(is_there) == said

    return (entry["file"], entry["where"]) == (mutant.file, mutant.where) and same(entry["text"], mutant.original) and (
        same(entry["with"], mutant.mutated) if "with" in entry else mutant.kind != "swapped") and same(
            entry.get("within", mutant.within), mutant.within)


class Copy:
    """A copy of the repository, into which one mutant at a time is put."""

    def __init__(self, home: Path) -> None:
        self.home, self.package = home, home / "distckpt"
        self._server: subprocess.Popen[bytes] | None = None
        for name in _COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, home / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
            else:
                shutil.copy2(source, home / name)

    def put(self, mutant: Mutant) -> None:
        mutant.apply(self.package)
        self._forget(mutant)

    def restore(self, mutant: Mutant) -> None:
        (self.package / mutant.file).write_bytes((REPOSITORY / "distckpt" / mutant.file).read_bytes())
        self._forget(mutant)

    def _forget(self, mutant: Mutant) -> None:
        """What was compiled is known by time and size, and those may be the same."""
        path = self.package / mutant.file
        for old in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            old.unlink()

    def detect(self, told: Sequence[str], limit: float) -> tuple[int | None, str]:
        """(exit code, what it said in short) of one detector; None when it hung."""
        server = self._served()
        assert server.stdin is not None and server.stdout is not None
        temporary = Path(tempfile.mkdtemp(prefix="run-", dir=self.home))
        server.stdin.write(json.dumps({"told": list(told), "folder": str(temporary)}).encode() + b"\n")
        child = int(server.stdout.readline())
        in_time = bool(select.select([server.stdout], [], [], limit)[0])
        if not in_time:
            for each in (*family(child), child):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        code = int(server.stdout.readline())
        text = (temporary / "out.txt").read_text(errors="replace") if (temporary / "out.txt").exists() else ""
        shutil.rmtree(temporary, ignore_errors=True)
        return code if in_time else None, _said(text)

    def _served(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            env = {**os.environ, "PYTHONPATH": str(self.home), "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen(["nice", "-n", "10", sys.executable, "-m", "scripts.proof.detect"], cwd=self.home,
                                            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        return self._server

    def close(self) -> None:
        """End the process behind ``detect``; the next one starts another."""
        if self._server is not None:
            with self._server as ending:
                assert ending.stdin is not None
                ending.stdin.close()
            self._server = None


def _said(text: str) -> str:
    lines = text.splitlines()
    for line in lines:
        if line.startswith(("FAILED ", "ERROR tests/")):
            return line[:400]
    return next((line[:400] for line in reversed(lines) if line.strip()), "")


def _layer(detector: str, said: str) -> str:
    """What found it, as people call it: of the nearest tests, where the red one stands."""
    place = re.match(r"(?:FAILED|ERROR) tests/(\w+)/", said)
    return place.group(1) if detector == "own" and place is not None else detector


def _surely(copy: Copy, told: Sequence[str], limit: float) -> tuple[int | None, str]:
    """As ``Copy.detect``, but a test that is red once and green when it is run again was red for the machine's sake."""
    for _ in range(_FLAKES):
        code, said = copy.detect(told, limit)
        test = re.match(r"FAILED (tests/\S+?\.py::(?:[^\[]+?\[.*\]|\S+))( - |$)", said)
        if not code or test is None or copy.detect(("pytest", test.group(1)), limit)[0] != 0:
            return code, said
        told = (*told, "--deselect", test.group(1))
    return 0, ""


class Hunt:
    """Detectors on copies, ``workers`` at a time. Each is tried on the code as it is before it is shown a mutant: it must be
    green, and what it took sets its limit. ``believed``: they are green, and this is their limit."""

    def __init__(self, home: Path, detectors: Sequence[Detector] = DETECTORS, workers: int = WORKERS, tell: Tell = _silent,
                 believed: float | None = None) -> None:
        self.detectors, self.tell = detectors, tell
        self._workers, self._believed = workers, believed
        self._limits: dict[tuple[str, ...], float] = {}
        self._lock, self._trying = threading.Lock(), threading.Lock()
        self._clean = Copy(home / "clean")
        self._copies = [Copy(home / f"copy-{number}") for number in range(workers)]
        self._broken = threading.Event()

    def _limit(self, told: tuple[str, ...], name: str) -> float:
        if self._believed is not None:
            return self._believed
        with self._trying:  # one at a time: the other worker goes on with mutants meanwhile
            if told not in self._limits:
                begun = time.monotonic()
                code, said = _surely(self._clean, told, _LIMIT)
                if code != 0:
                    raise RuntimeError(f"{name} is not green on the code as it is: {code}, {said}")
                seconds = time.monotonic() - begun
                self._limits[told] = _PATIENCE + 4 * seconds
                self.tell(f"{name} is green on the code as it is: {seconds:.0f} s", None)
            return self._limits[told]

    def find(self, mutants: Iterable[Mutant], go_on: Callable[[], bool]) -> list[Finding]:
        """What became of each, until ``go_on`` says no. RuntimeError when a detector is red without any mutant."""
        taken, found = iter(list(mutants)), list[Finding]()

        def work(copy: Copy) -> None:
            while go_on() and not self._broken.is_set():
                with self._lock:
                    mutant = next(taken, None)
                if mutant is None:
                    return
                one = self._one(copy, mutant, go_on)
                if one is None:
                    return
                with self._lock:
                    found.append(one)
                    self.tell(f"{one.mutant} | {one.by or 'SURVIVED'} | {one.seconds:.0f} s | {one.how[:150]}", one)

        try:
            with ThreadPoolExecutor(self._workers) as pool:
                for done in [pool.submit(work, copy) for copy in self._copies]:
                    done.result()
        finally:
            for copy in (self._clean, *self._copies):
                copy.close()
        return found

    def _one(self, copy: Copy, mutant: Mutant, go_on: Callable[[], bool]) -> Finding | None:
        begun = time.monotonic()
        by, how = "", ""
        for detector in in_turn(self.detectors, mutant.file):
            if not go_on():
                return None  # not found so far, and not to be called a survivor
            told = detector.told(mutant.file)
            try:
                limit = self._limit(told, f"{detector.name} {mutant.file}" if detector.name == "own" else detector.name)
            except RuntimeError:
                self._broken.set()
                raise
            copy.put(mutant)
            try:
                code, said = _surely(copy, told, limit)
            finally:
                copy.restore(mutant)
            if code != 0:
                by, how = (f"hang ({detector.name})", "") if code is None else (_layer(detector.name, said), said)
                break
        return Finding(str(mutant), by, round(time.monotonic() - begun, 1), how)


def ordered(mutants: Sequence[Mutant], seed: int) -> list[Mutant]:
    """All of them, mixed: a run that ends early has been everywhere, and one of another seed begins elsewhere."""
    mixed = list(mutants)
    random.Random(seed).shuffle(mixed)
    return mixed


def run(budget: Budget) -> Result:
    mutants = made(REPOSITORY / "distckpt")
    entries = explained()
    todo = [mutant for mutant in ordered(mutants, budget.seed) if not any(speaks_of(entry, mutant) for entry in entries)]
    found = hunt(todo, budget, lambda line, one: print(line, flush=True))
    result = Result("mutants", runs=len(found), states=len(mutants), distinct=len({one.mutant for one in found}))
    result.violations = [f"nothing finds it: {one.mutant}" for one in found if not one.by]
    result.slowest = max((one.seconds for one in found), default=0.0)
    by = Counter(one.by for one in found if one.by)
    layers = ", ".join(f"{name} {count}" for name, count in by.most_common())
    result.covers = (f"{sum(by.values())} of {len(found)} found ({layers}); {len(mutants) - len(todo)} of {len(mutants)} are "
                     f"explained, {len(todo) - len(found)} not tried")
    return result


def hunt(todo: Sequence[Mutant], budget: Budget, tell: Tell, detectors: Sequence[Detector] = DETECTORS,
         believed: float | None = None, workers: int = WORKERS) -> list[Finding]:
    """Show ``todo`` to the detectors while the budget lasts. ``believed``: that they are green, each within these seconds."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    home = Path(tempfile.mkdtemp(prefix="distckpt-mutants-", dir=place))
    try:
        return Hunt(home, detectors, workers, tell, believed).find(todo, lambda: budget.left > 0)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def missing() -> str | None:
    if not sys.platform.startswith("linux"):
        return "Linux (/proc)"
    return None


LAYER = Layer("mutants", "each ordering rule of the code broken in turn", missing, run, quick_seconds=0.0, full_seconds=1800.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.proof.mutants", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--file", choices=FILES, action="append")
    parser.add_argument("--only", type=int, action="append", help="a number that --list shows")
    parser.add_argument("--explained", action="store_true", help="try those of equivalent.toml as well")
    parser.add_argument("--detector", action="append", choices=[one.name for one in DETECTORS])
    parser.add_argument("--believed", type=float, metavar="SECONDS",
                        help="do not try the detectors on the code as it is, and give each so long")
    parser.add_argument("--workers", type=int, default=WORKERS, help="how many at a time")
    parser.add_argument("--seconds", type=float, default=LAYER.full_seconds)
    parser.add_argument("--out", type=Path, help="append one JSON line for each; those it holds already are not tried")
    asked = parser.parse_args()
    mutants, entries = made(REPOSITORY / "distckpt"), explained()
    numbered = [(number, mutant) for number, mutant in enumerate(mutants)
                if (asked.file is None or mutant.file in asked.file) and (asked.only is None or number in asked.only)
                and (asked.explained or not any(speaks_of(entry, mutant) for entry in entries))]
    if asked.list:
        for number, mutant in numbered:
            print(number, mutant)
        return 0
    chosen = [one for one in DETECTORS if asked.detector is None or one.name in asked.detector]
    before = asked.out.read_text(encoding="utf-8").splitlines() if asked.out and asked.out.exists() else []
    known = {json.loads(line)["mutant"] for line in before}
    todo = [mutant for _, mutant in numbered if str(mutant) not in known]

    def tell(line: str, one: Finding | None) -> None:
        print(line, flush=True)
        if one is not None and asked.out is not None:
            with asked.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(one)) + "\n")

    found = hunt(todo, Budget(asked.seconds), tell, chosen, asked.believed, asked.workers)
    survived = [one for one in found if not one.by]
    print(f"{len(found)} mutants, {len(found) - len(survived)} found, {len(survived)} not")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
