"""L0, the simulation: all ranks in one process. Seeds here, on every core; every schedule and every fault within a bound is a
layer of its own (``exhaustive``), of which a short run takes a part."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from scripts.proof import exhaustive
from scripts.proof.cases import Case, Tally, delayed, in_bulk, seeded, sweep
from scripts.proof.layer import Budget, Layer, Result

__all__ = ["LAYERS", "Case", "Tally", "delayed", "seeded", "sweep"]


def _seeds(first: int, last: int, seconds: float) -> tuple[Result, set[int], int]:
    """Seeds from ``first`` until ``last`` or the time is up; where it stopped."""
    tally, budget = Tally(), Budget(seconds)
    number = first
    with in_bulk():
        while number < last and budget.left > 0:
            tally.run(seeded(number))
            number += 1
    return tally.result, tally.outcomes, number


_DELAYED = (("options", 2, 23), ("one", 2, 7), ("stopping", 2, 7), ("background", 3, 29))
_SWEPT = (("options", ("kill", "power"), 13), ("sync", ("kill", "power"), 9), ("background", ("fail", "stop"), 11),
          ("replacing-nfs", ("power",), 7))


def run(budget: Budget) -> Result:
    """Seeds. A third of a short budget goes to one schedule of several with a delay, a third to one single fault of several; a
    longer one leaves those to the exhaustive layer."""
    begun = time.monotonic()
    tally = Tally()
    quick = budget.seconds < 300
    covers = _samples(tally, budget) if quick else []
    covers.append(_many(tally, budget, quick))
    tally.result.distinct = len(tally.outcomes)
    tally.result.covers = "; ".join(covers)
    tally.result.seconds = time.monotonic() - begun
    return tally.result


def _samples(tally: Tally, budget: Budget) -> list[str]:
    covers: list[str] = []
    part = Budget(budget.seconds / 3)
    for scenario, world, stride in _DELAYED:
        count = delayed(tally, scenario, world, 1, part, stride, budget.seed)
        covers.append(f"{abs(count)} schedules of {scenario} on {world} ranks with at most 1 delay (1 in {stride})"
                      + (" until the time was up" if count < 0 else ""))
    part = Budget(budget.seconds / 3)
    for scenario, kinds, stride in _SWEPT:
        count, whole = 0, True
        for case in sweep(scenario, 2, kinds, stride, budget.seed, budget.seed):
            whole = part.left > 0
            if not whole:
                break
            tally.run(case)
            count += 1
        covers.append(f"{count} single faults ({'/'.join(kinds)}) of {scenario}" + ("" if whole else " until the time was up"))
    return covers


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


LAYERS = [
    Layer("l0", "simulation: schedules, faults and seeds", exhaustive.missing, run, 60.0, 20 * 60.0),
    exhaustive.LAYER,
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.proof.l0")
    parser.add_argument("--replay", metavar="LINE", help="run one case, as a violation names it")
    parser.add_argument("--trace", action="store_true", help="with --replay: every operation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exhaustive", action="store_true", help="what of the exhaustive part was not walked yet for this code")
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
    result = (exhaustive.run if asked.exhaustive else run)(Budget(asked.seconds, asked.seed))
    print(result)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
