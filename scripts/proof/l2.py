"""L2, the fault loops: operation n of a rank fails, dies, stops, lies or is slow, for every n, on real ranks.

A run that was made is written down with the code it was made for, so the loops are gone on with until none is left: a short run
meets every kind first and then some that the code's own number picks; a long one walks one program whole, and then the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

from scripts.proof.layer import Budget, Layer, Result, append
from scripts.proof.loops import schedule, traced
from scripts.proof.loops.judge import TRACED, Item, Judged
from scripts.proof.loops.zygote import Pool

WALKED = Path(__file__).resolve().parents[2] / ".cache" / "proof" / "l2.jsonl"
_TAIL = 4.0
"""Seconds that the runs under way may still take."""
_LONG = 300.0


def missing() -> str | None:
    """Without strace it runs, and says that nothing was struck from outside."""
    if not sys.platform.startswith("linux"):
        return "Linux (pidfd, prctl)"
    if traced.missing() is not None:
        from scripts.proof import l1

        l1.missing()  # installs it
    return None


def run(budget: Budget, runs: int | None = None, tell: bool = False, own: Pool | None = None, walked: Path = WALKED) -> Result:
    """What was not walked yet for this code, until the time is up; or ``runs`` from number ``budget.seed`` on, walked or not.
    ``tell``: say each violation as it is found. ``own``: a pool to use, that stays open."""
    from scripts.proof.__main__ import code

    result, began, tested = Result("l2"), time.monotonic(), code()
    tally = _Tally(result, _read(walked, tested))
    walked.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext(own) if own is not None else Pool() as pool, walked.open("a", encoding="utf-8") as out:
        items = schedule.runs(list(pool.known))
        fit = schedule.fitting(items, pool.known)
        if runs is not None:
            todo = [n % len(items) for n in range(budget.seed, budget.seed + runs) if n % len(items) in fit]
        else:
            left = (n for n, item in fit.items() if str(item) not in tally.walked)
            todo = schedule.order(left, items, budget.seconds >= _LONG, (budget.seed + int(tested, 16)) % len(items))
        numbers: dict[Item, int] = {}

        def supply() -> Iterator[Item]:
            for number in todo:
                if budget.left < _TAIL:
                    return
                numbers[fit[number]] = number
                yield fit[number]

        for item, judged in pool.judge(supply()):
            tally.note(item, judged)
            if not judged.violations and not judged.hangs:
                out.write(json.dumps({"code": tested, "run": str(item), "fired": judged.fired}) + "\n")
                out.flush()
            for text in judged.violations:
                result.violations.append(f"{text} - {item} (--seed {numbers[item]} --runs 1)")
                if tell:
                    print(result.violations[-1], flush=True)
            if tell and judged.violations:
                print(judged.logs[-6000:], flush=True)
        result.covers = tally.covers(fit.values())
    result.seconds = time.monotonic() - began
    return result


class _Tally:
    """``walked``: the runs that were made and found good, for this code, at any time: whether the fault fired (beyond the last
    operation none does). A result counts faults, not the jobs that it took."""

    def __init__(self, result: Result, walked: dict[str, bool]) -> None:
        self.result, self.walked, self.jobs = result, walked, 0
        self._kinds: Counter[str] = Counter()
        self._slowest = {"death": 0.0, "stop": 0.0}

    def note(self, item: Item, judged: Judged) -> None:
        result = self.result
        self.jobs += judged.jobs
        result.hangs += judged.hangs
        if judged.fired:
            result.runs += 1
            result.states += 1
            self._kinds[f"{item.strike.kind} {item.strike.number} {item.strike.forever}"] += 1
            result.distinct = len(self._kinds)
        if not judged.violations and not judged.hangs:
            self.walked[str(item)] = judged.fired
        if judged.noticed is not None:
            key = "stop" if item.strike.kind == "stop" else "death"
            self._slowest[key] = max(self._slowest[key], judged.noticed)
            result.slowest = max(result.slowest, judged.noticed)

    def covers(self, fit: Iterable[Item]) -> str:
        """How far the loops are walked in all, program by program, and what this run added."""
        fitted, walked = Counter[str](), Counter[str]()
        for item in fit:
            fitted[item.program] += 1
            walked[item.program] += str(item) in self.walked
        loops = ", ".join(f"{walked[name]:,} of {count:,} of {name} ({count - walked[name]:,} left)"
                          for name, count in fitted.items())
        why = traced.missing()
        twice = sum(fired for run, fired in self.walked.items() if run.endswith(TRACED))
        outside = f"{twice:,} of them by strace as well" + (f" ({why} here)" if why else "")
        return (f"{sum(self.walked.values()):,} faults fired in all, {outside}; walked {loops}; "
                f"now {self.result.states:,} faults, {self.result.distinct} kinds, {self.jobs:,} jobs; slowest notice "
                f"{self._slowest['death']:.2f} s of a death, {self._slowest['stop']:.2f} s of a stop beyond its deadline")


def _read(path: Path, tested: str) -> dict[str, bool]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found["run"]: found["fired"] for found in map(json.loads, lines) if found["code"] == tested}


LAYER = Layer("l2", "fault loops: operation n of each rank fails, dies, stops, lies or is slow, on real ranks", missing, run,
              quick_seconds=55.0, full_seconds=3600.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=LAYER.quick_seconds)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first run")
    parser.add_argument("--runs", type=int, help="how many runs at most, walked or not")
    parser.add_argument("--out", type=Path, help="append the result to this file, as one JSON line")
    options = parser.parse_args()
    result = run(Budget(options.seconds, options.seed), options.runs, tell=True)
    if options.out:
        append(options.out, [result])
    print(f"{result.covers}; {len(result.violations)} violations, {result.hangs} hangs; {result.seconds:.0f} s")
    sys.exit(bool(result.violations or result.hangs))


if __name__ == "__main__":
    main()
