"""L0, the simulation: all ranks in one process, every schedule within a bound, every fault at every operation, then seeds."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from distckpt.testing.explore import first_job, schedules
from distckpt.testing.simjob import quiet
from distckpt.testing.simulation import Run, Strike
from scripts.proof.layer import Budget, Layer, Result
from scripts.proof.scenarios import SCENARIOS

_VALUES = {"kill": [""], "power": [""], "stop": ["", "45"], "slow": ["0.5"], "fail": ["EIO", "ENOSPC"], "lost": ["EIO"]}
_SEEDED = ("sync", "background", "background", "skipping", "stopping", "replacing", "replacing-nfs", "framework", "leaving",
           "two", "uneven")


@dataclass(frozen=True)
class Case:
    """One simulated run, as one line: ``world=2 scenario=background seed=17 fault=kill:1@83 delay=12:1 apart=1``."""

    scenario: str
    world: int = 2
    seed: int = 0
    faults: tuple[str, ...] = ()
    delays: tuple[tuple[int, int], ...] | None = None
    apart: bool = False

    @classmethod
    def parse(cls, line: str) -> Case:
        fields = dict(part.split("=", 1) for part in line.split())
        unknown = set(fields) - {"world", "scenario", "seed", "fault", "delay", "apart"}
        if unknown or fields.get("scenario") not in SCENARIOS:
            raise ValueError(f"{line!r}: unknown {sorted(unknown) or 'scenario'}; scenarios are {', '.join(SCENARIOS)}")
        delays = None
        if "delay" in fields:
            pairs = [part.split(":") for part in fields["delay"].split(",") if part]
            delays = tuple((int(at), int(pick)) for at, pick in pairs)
        return cls(fields["scenario"], int(fields.get("world", 2)), int(fields.get("seed", 0)),
                   tuple(part for part in fields.get("fault", "").split(",") if part), delays, fields.get("apart") == "1")

    def __str__(self) -> str:
        parts = [f"world={self.world} scenario={self.scenario} seed={self.seed}"]
        if self.faults:
            parts.append("fault=" + ",".join(self.faults))
        if self.delays is not None:
            parts.append("delay=" + ",".join(f"{at}:{pick}" for at, pick in self.delays))
        if self.apart:
            parts.append("apart=1")
        return " ".join(parts)

    def run(self, traced: bool = False) -> Run:
        """The run, with the scenario's own rule asked as well."""
        return self.watched(traced)[0]

    def watched(self, traced: bool = False) -> tuple[Run, list[int]]:
        """The run; and, of one with ``delays``, how many threads could have gone on at each point."""
        scenario = SCENARIOS[self.scenario]
        more = {}
        width: list[int] = []
        if self.delays is not None:
            policy, seen = first_job(dict(self.delays))
            more, width = {"policy": policy}, seen.width
        run = scenario.simulation(self.world, self.seed, faults=self.faults, apart=self.apart, traced=traced, **more
                                  ).run(scenario.program)
        run.violations += scenario.judge(run, self.faults)
        return run, width


@dataclass
class Tally:
    """What many runs add up to."""

    result: Result = field(default_factory=lambda: Result("l0"))
    outcomes: set[int] = field(default_factory=set)

    def note(self, case: Case, run: Run) -> None:
        result = self.result
        result.runs += 1
        result.states += 1
        result.slowest = max(result.slowest, run.seconds if case.faults else 0.0)
        result.hangs += len(run.hung)
        self.outcomes.add(hash((case.scenario, case.world, run.outcome)))
        if run.violations and len(result.violations) < 50:
            result.violations.append(f"{run.violations[0]} -- python -m scripts.proof.l0 --replay \"{case}\"")
            if len(run.violations) > 1:
                result.violations[-1] += f" ({len(run.violations) - 1} more)"

    def run(self, case: Case) -> Run:
        run = case.run()
        self.note(case, run)
        return run


def sweep(scenario: str, world: int, kinds: Sequence[str], stride: int, seed: int = 0, offset: int = 0) -> Iterator[Case]:
    """One fault at every ``stride``-th operation of every rank, under the schedule of ``seed``."""
    base = Case(scenario, world, seed).run()
    for kind in kinds:
        for rank in range(world if kind != "power" else 1):
            top = base.total if kind == "power" else base.operations[rank]
            for value in _VALUES[kind]:
                for at in range(1 + offset % stride, top + 1, stride):
                    yield Case(scenario, world, seed, (str(Strike(kind, rank, at, value)),))


def seeded(number: int) -> Case:
    """The ``number``-th random case: scenario, ranks, schedule and up to two faults."""
    draw = random.Random(number)
    scenario, world = draw.choice(_SEEDED), draw.choice((2, 2, 2, 3))
    faults = []
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        kind = draw.choice(tuple(_VALUES))
        rank = draw.randrange(world)
        top = 480 if kind == "power" else 420 if rank == 0 else 95
        value = draw.choice(_VALUES[kind])
        faults.append(str(Strike(kind, rank, draw.randrange(1, top), value)))
    return Case(scenario, world, number, tuple(faults), apart=draw.random() < 0.25)


def delayed(tally: Tally, scenario: str, world: int, bound: int, left: Budget, stride: int = 1, offset: int = 0) -> int:
    """Every schedule with at most ``bound`` delays; how many there were."""
    count = 0

    def width(delays: object) -> list[int]:
        case = Case(scenario, world, delays=tuple(sorted(dict(delays).items())))  # type: ignore[call-overload]
        run, seen = case.watched()
        tally.note(case, run)
        return seen

    for _ in schedules(bound, width, stride, offset):
        count += 1
        if left.left <= 0:
            return -count
    return count


def _seeds(first: int, last: int, seconds: float) -> tuple[Result, set[int], int]:
    """Seeds from ``first`` until ``last`` or the time is up; where it stopped."""
    tally, budget = Tally(), Budget(seconds)
    number = first
    with _in_bulk():
        while number < last and budget.left > 0:
            tally.run(seeded(number))
            number += 1
    return tally.result, tally.outcomes, number


@contextmanager
def _in_bulk() -> Iterator[None]:
    """A tenth less for each run: what is loaded is not searched for garbage again, and nobody is asked about log lines."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        with quiet():
            yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


_DELAYED = (("one", 2, 7), ("stopping", 2, 7), ("background", 3, 29))
_SWEPT = (("sync", ("kill", "power"), 9), ("background", ("fail", "stop"), 11), ("replacing-nfs", ("power",), 7))


def run(budget: Budget) -> Result:
    """A third of a short budget goes to schedules within the bound, a third to single faults, the rest to seeds; a long one walks
    both whole on the small scenarios and spends what is left on seeds, on every core."""
    begun = time.monotonic()
    tally = Tally()
    quick = budget.seconds < 300
    covers: list[str] = []
    part = Budget(budget.seconds / (3 if quick else 8))
    for scenario, world, stride in _DELAYED:
        count = delayed(tally, scenario, world, 1, part, stride if quick else 1, budget.seed)
        covers.append(f"{abs(count)} schedules of {scenario} on {world} ranks with at most 1 delay"
                      + (f" (1 in {stride})" if quick else "") + (" until the time was up" if count < 0 else ""))
    part = Budget(budget.seconds / (3 if quick else 4))
    for scenario, kinds, stride in _SWEPT:
        count, whole = 0, True
        for case in sweep(scenario, 2, kinds, stride if quick else 1, budget.seed, budget.seed):
            whole = part.left > 0
            if not whole:
                break
            tally.run(case)
            count += 1
        covers.append(f"{count} single faults ({'/'.join(kinds)}) of {scenario}" + ("" if whole else " until the time was up"))
    covers.append(_many(tally, budget, quick))
    tally.result.distinct = len(tally.outcomes)
    tally.result.covers = "; ".join(covers)
    tally.result.seconds = time.monotonic() - begun
    return tally.result


def _many(tally: Tally, budget: Budget, quick: bool) -> str:
    """Seeds on every core until the budget ends, each worker from a start of its own."""
    left = budget.left
    if left <= 0:
        return "no seeds"
    workers = min(os.cpu_count() or 1, 2 if quick else 8)
    starts = [(budget.seed * workers + worker) * 100_000_000 for worker in range(workers)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        parts = pool.starmap(_seeds, [(start, start + 100_000_000, left) for start in starts])
    for result, outcomes, _ in parts:
        tally.result.add(result)
        tally.outcomes |= outcomes
    return "seeds " + ", ".join(f"{start}-{stopped - 1}" for start, (_, _, stopped) in zip(starts, parts, strict=True))


def _missing() -> str | None:
    try:
        import greenlet  # noqa: F401
    except ImportError:
        return "the greenlet package (pip install greenlet)"
    return None


LAYER = Layer("l0", "simulation: schedules, faults and seeds", _missing, run, 60.0, 20 * 60.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.proof.l0")
    parser.add_argument("--replay", metavar="LINE", help="run one case, as a violation names it")
    parser.add_argument("--trace", action="store_true", help="with --replay: every operation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.replay:
        case = Case.parse(asked.replay)
        found = case.run(asked.trace)
        print("\n".join(found.trace), end="\n" if found.trace else "")
        print(f"{case}: {found.outcome}")
        for rank, error in sorted(found.errors.items()):
            print(f"rank {rank}: {type(error).__name__}: {error}")
        print(found.stacks, end="")
        print("\n".join(found.violations) or "no violation")
        return 1 if found.violations else 0
    result = run(Budget(asked.seconds, asked.seed))
    print(result)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
