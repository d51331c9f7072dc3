"""L1: the power cut on real processes.

Real ranks run under strace (``l1_program``); their system calls are replayed on a model of the disk (``distckpt.testing``),
which must end equal to the real directory, byte for byte. Then the power is cut after every step, with ranks lagging as far
as their messages allow (``l1_cuts``), every legal disk is enumerated (``l1_survivors``), and on each that the next start can
tell from the others the real library recovers, resumes and goes on (``l1_judge``).

``python -m scripts.proof.l1 FOLDER`` walks a recording again; a run with violations leaves its recordings and says where.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from distckpt.coordination.marks import VARIABLE
from distckpt.testing import trace
from distckpt.testing.checker import tree_of
from distckpt.testing.replay import Mark, Write, compile_run
from scripts.proof import l1_cuts, packages
from scripts.proof.l1_cuts import Recorded, understand
from scripts.proof.l1_judge import judge, judge_job, tree_below
from scripts.proof.l1_scenarios import CHOSEN, Scenario, scenario
from scripts.proof.l1_survivors import Survivor, survivors
from scripts.proof.layer import Budget, Layer, Result

REPOSITORY = Path(__file__).resolve().parents[2]
SEEDS_APART = 1000
"""A seed's scenarios are the numbers from seed * SEEDS_APART on; seed 0 begins with those chosen by hand."""
QUICK = 120.0
QUICK_BATCH = 4
_SECONDS_OF_A_SCENARIO = 40.0
_TURNS = (0, 2, 1, 3)
"""Cuts are walked by their number modulo four: a walk that runs out of time has been everywhere."""


@dataclass(frozen=True)
class Limits:
    """Disks per mode at one cut of the order seen, and at one lagging cut; every ``next_save``-th distinct disk gets another
    save and an end, every ``job``-th a whole job of ranks."""

    seen: int
    lagging: int
    next_save: int = 3
    job: int = 400


def record(scenarios: Sequence[Scenario], folder: Path) -> Path:
    """Run ``scenarios`` under strace, recorded in ``folder``, which is returned. RuntimeError when one goes otherwise."""
    for one in scenarios:
        os.makedirs(one.base)
    (folder / "scenarios.json").write_text(json.dumps([one.to_json() for one in scenarios]))
    env = {**os.environ, VARIABLE: "1", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0"}
    done = trace.capture([trace.program(sys.executable), "-m", "scripts.proof.l1_program", str(folder / "scenarios.json")],
                         folder / "trace", cwd=REPOSITORY, env=env, limit=120 + _SECONDS_OF_A_SCENARIO * len(scenarios))
    if done.returncode:
        raise RuntimeError(f"the traced program ended with {done.returncode}: {done.stderr[-4000:]}")
    return folder


def read(folder: Path) -> Iterator[Recorded]:
    """What ``record`` recorded. RuntimeError unless the model of each disk ends as the real one did."""
    calls = trace.read(folder / "trace", REPOSITORY)
    starts = {call.text: index for index, call in enumerate(calls) if call.call == "mark"}  # one of each of those used here
    scenarios, contents = (json.loads((folder / f"{name}.json").read_text()) for name in ("scenarios", "contents"))
    for one, wanted in zip(map(Scenario.of, scenarios), contents, strict=True):
        run = compile_run(calls[starts[f"SCENARIO {one.base}"]:starts[f"END {one.base}"]], one.base)
        model, real = tree_below(run.end(), one.root), tree_of(one.root)
        if model != real:
            wrong = sorted(path for path in model.keys() | real.keys() if model.get(path) != real.get(path))
            raise RuntimeError(f"{one}: the model of the disk ends unlike the real one in {wrong[:5]}: something wrote unseen")
        ranks = {step.process for step in run.steps if isinstance(step, Mark) and step.text.startswith("RANK ")}
        handed_over = any(save.background and save.payload != "dcp" for phase in one.phases if phase.kill is None
                          for save in phase.saves) and one.writer == "process"
        if handed_over and not any(isinstance(step, Write) and step.process not in ranks for step in run.steps):
            raise RuntimeError(f"{one}: nothing was written by the writer process")
        yield understand(run, one, {int(number): content for number, content in wanted.items()})


@dataclass
class Walk:
    """The disks of one recording, counted and judged. ``until``: monotonic time to stop at, with ``complete`` False then."""

    recorded: Recorded
    limits: Limits
    until: float = float("inf")
    states: int = 0
    complete: bool = True
    seen: set[object] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    by: dict[tuple[str, bool], int] = field(default_factory=dict)

    def go(self, lagging: bool, enough: int = 20) -> Walk:
        """Walk the cuts of the order seen or, with ``lagging``, the others. Ends early after ``enough`` violations."""
        one = self.recorded.scenario
        limit = self.limits.lagging if lagging else self.limits.seen
        for turn in _TURNS:
            for number, cut in enumerate(l1_cuts.cuts(self.recorded, lagging)):
                if cut.lags != lagging or number % len(_TURNS) != turn:
                    continue
                for survivor in survivors(cut.disk, one.root, limit, number):
                    self.states += 1
                    self._look(cut, survivor, number)
                if len(self.violations) >= enough or time.monotonic() > self.until:
                    self.complete = False
                    return self
        return self

    def _look(self, cut: l1_cuts.Cut, survivor: Survivor, number: int) -> None:
        """Judge a disk, unless the next start could not tell it from one that was judged."""
        told, one = cut.told.key, self.recorded.scenario
        if (told, survivor.key) in self.seen:
            return
        self.seen.add((told, survivor.key))
        self.by[survivor.mode, cut.lags] = self.by.get((survivor.mode, cut.lags), 0) + 1
        story, count = self.recorded.story(cut.told), len(self.seen)
        wrong = judge(survivor.build(number), one, story, count % self.limits.next_save == 0)
        if not wrong and count % self.limits.job == 0:
            wrong = judge_job(survivor.build(number), one, story)
        self.violations += [f"{line}; {survivor.mode}, cut {number}: {cut.where}, told {told}" for line in wrong]


def run(budget: Budget) -> Result:
    """Record and walk scenarios until the budget is used, at least one of them."""
    logging.getLogger("distckpt").setLevel(logging.CRITICAL)
    gc.freeze()  # what torch brings along is never garbage, and looking it through was a third of a start's time
    quick = budget.seconds <= QUICK
    limits = Limits(seen=24, lagging=6) if quick else Limits(seen=240, lagging=60)
    batch = QUICK_BATCH if quick else 5
    place = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    home = Path(tempfile.mkdtemp(prefix="distckpt-l1-", dir=place))
    result = Result("l1")
    first = number = budget.seed * SEEDS_APART
    partly: list[int] = []
    totals: dict[tuple[str, bool], int] = {}
    with ThreadPoolExecutor(1) as recorder:
        def order(start: int) -> Future[Path]:
            folder = home / f"from-{start}"
            folder.mkdir()
            wanted = [scenario(n, f"{folder}/s{n}") for n in range(start, start + batch)]
            return recorder.submit(record, wanted, folder)

        coming: Future[Path] | None = order(number)
        while coming is not None:
            folder = coming.result()
            coming = order(number + batch) if budget.left > 4 * _SECONDS_OF_A_SCENARIO else None
            found = list(read(folder))
            for at, one in enumerate(found, number):
                if at < len(CHOSEN) and one.kills < sum(phase.kill is not None for phase in one.scenario.phases):
                    raise RuntimeError(f"scenario {at}: a rank was to be killed and lived: {one.scenario}")
            walks = [Walk(one, limits) for one in found]
            todo = [(walk, lagging) for lagging in (False, True) for walk in walks]
            for done, (walk, lagging) in enumerate(todo):
                walk.until = time.monotonic() + max(budget.left, 5.0) / (len(todo) - done)
                walk.go(lagging)
            for at, walk in enumerate(walks, number):
                result.add(Result("l1", runs=1 + len(walk.seen), states=walk.states, distinct=len(walk.seen),
                                  violations=[f"{line}; scenario {at}: python -m scripts.proof.l1 {folder}"
                                              for line in walk.violations]))
                for kind, count in walk.by.items():
                    totals[kind] = totals.get(kind, 0) + count
                partly += [] if walk.complete else [at]
            number += batch
            if not any(walk.violations for walk in walks):
                shutil.rmtree(folder)
    if not result.violations:
        shutil.rmtree(home)
    kinds = ", ".join(f"{count} {mode}{' lagging' if lags else ''}" for (mode, lags), count in sorted(totals.items()))
    result.seconds = budget.seconds - budget.left
    cut_short = f" ({partly} in part)" if partly else ""
    result.covers = (f"scenarios {first}-{number - 1}{cut_short}, at most {limits.seen} disks a mode and cut and "
                     f"{limits.lagging} a lagging one; distinct: {kinds}")
    return result


def missing() -> str | None:
    """strace, and the right to use it."""
    lacks = packages.lacking(lambda: [] if shutil.which("strace") else ["strace"], "strace")
    if lacks:
        return lacks
    tried = subprocess.run(["strace", "--seccomp-bpf", "-f", "-o", os.devnull, "true"], capture_output=True, text=True,
                           timeout=60)
    return None if tried.returncode == 0 else f"strace does not work here: {tried.stderr.strip()[:200]}"


LAYER = Layer("l1", "power cut on real processes, from their system calls", missing, run, quick_seconds=50, full_seconds=900)


def main(folder: str) -> None:
    logging.getLogger("distckpt").setLevel(logging.CRITICAL)
    for one in read(Path(folder)):
        walk = Walk(one, Limits(seen=240, lagging=60)).go(False).go(True)
        print(f"{one.scenario.base}: {walk.states} states, {len(walk.seen)} distinct, {walk.by}")
        print("\n".join(walk.violations))


if __name__ == "__main__":
    main(sys.argv[1])
