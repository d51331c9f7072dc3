"""L2, the fault loops: operation n of a rank fails, dies, stops, lies or is slow, for every n, on real ranks."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from scripts.proof.layer import Budget, Layer, Result, append
from scripts.proof.loops import schedule
from scripts.proof.loops.judge import Item, Judged
from scripts.proof.loops.zygote import Pool

_TAIL = 4.0
"""Seconds that the runs under way may still take."""


def missing() -> str | None:
    if not sys.platform.startswith("linux"):
        return "Linux (pidfd, prctl)"
    return None


def run(budget: Budget, runs: int | None = None, tell: bool = False, own: Pool | None = None) -> Result:
    """Run number ``budget.seed`` and on, round and round, until the time is used up, or ``runs`` of them are made. ``tell``:
    say each violation as it is found. ``own``: a pool to use, that stays open."""
    result, began = Result("l2"), time.monotonic()
    kinds: Counter[str] = Counter()
    slowest = {"death": 0.0, "stop": 0.0}
    with nullcontext(own) if own is not None else Pool() as pool:
        items = schedule.runs(list(pool.known))
        first = budget.seed % len(items)
        numbers: dict[Item, int] = {}
        last = first - 1

        def supply() -> Iterator[Item]:
            nonlocal last
            for number in range(first, first + (len(items) if runs is None else runs)):
                if budget.left < _TAIL:
                    return
                last = seed = number % len(items)
                item = schedule.fitted(items[seed], seed, pool.known[items[seed].program])
                if item is not None:
                    numbers[item] = seed
                    yield item

        for item, judged in pool.judge(supply()):
            _count(result, kinds, slowest, item, judged)
            for text in judged.violations:
                result.violations.append(f"{text} - {item} (--seed {numbers[item]} --runs 1)")
                if tell:
                    print(result.violations[-1], flush=True)
            if tell and judged.violations:
                print(judged.logs[-6000:], flush=True)
    result.distinct = len(kinds)
    result.seconds = time.monotonic() - began
    result.covers = (f"seeds {first}-{last} of {len(items)}; {result.states} faults of {len(kinds)} kinds; slowest notice "
                     f"{slowest['death']:.2f} s of a death, {slowest['stop']:.2f} s of a stop beyond its deadline")
    return result


def _count(result: Result, kinds: Counter[str], slowest: dict[str, float], item: Item, judged: Judged) -> None:
    result.runs += judged.jobs
    result.hangs += judged.hangs
    if judged.fired:
        result.states += 1
        kinds[f"{item.strike.kind} {item.strike.number} {item.strike.forever}"] += 1
    if judged.noticed is not None:
        key = "stop" if item.strike.kind == "stop" else "death"
        slowest[key] = max(slowest[key], judged.noticed)
        result.slowest = max(result.slowest, judged.noticed)


LAYER = Layer("l2", "fault loops: operation n of each rank fails, dies, stops, lies or is slow, on real ranks", missing, run,
              quick_seconds=55.0, full_seconds=3600.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=LAYER.quick_seconds)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first run")
    parser.add_argument("--runs", type=int, help="how many runs at most")
    parser.add_argument("--out", type=Path, help="append the result to this file, as one JSON line")
    options = parser.parse_args()
    result = run(Budget(options.seconds, options.seed), options.runs, tell=True)
    if options.out:
        append(options.out, [result])
    print(f"{result.runs} jobs, {result.covers}; {len(result.violations)} violations, {result.hangs} hangs; "
          f"{result.seconds:.0f} s")
    sys.exit(bool(result.violations or result.hangs))


if __name__ == "__main__":
    main()
