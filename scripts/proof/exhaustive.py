"""The part of L0 that is walked whole: every schedule with one delay, every fault at every operation, and every pair of faults.

What the bounds are is ``FAMILIES``: pairs are of one save, on 2 ranks and on 3, and of two saves, on 2; of a first kill, EIO or
lost reply and a later kill, EIO or power cut; of the disks that a power cut may leave, two of at most 24 are judged. Each is cut
into parts of some seconds. A part that was walked is written down with the code it was walked for, so a run that ends early is
gone on with, and one that finds nothing left to do says so.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from distckpt.testing.simjob import Moment
from distckpt.testing.simulation import Run, Strike
from scripts.proof.cases import VALUES, Case, Tally, in_bulk
from scripts.proof.layer import Budget, Layer, Result

WALKED = Path(__file__).resolve().parents[2] / ".cache" / "proof" / "exhaustive.jsonl"
WORKERS = 2

Share = slice
"""Which of a family's first choices: ``slice(2, None, 16)`` is the third of 16 parts."""


@dataclass(frozen=True)
class Family:
    """``walk(tally, share)`` runs the cases of one share; together they are all that ``title`` says."""

    title: str
    walk: Callable[[Tally, Share], None]
    shares: int = 1


def _delays(scenario: str, world: int) -> Family:
    def walk(tally: Tally, share: Share) -> None:
        calm = Case(scenario, world, delays=())
        run, width = calm.watched()
        if share.start == 0:
            tally.note(calm, run)
        choices = [(at, pick) for at, ready in enumerate(width) for pick in range(1, ready)]
        for choice in choices[share]:
            tally.run(Case(scenario, world, delays=(choice,)))

    return Family(f"schedules of {scenario} on {world} ranks with at most 1 delay", walk, 4)


def _singles(scenario: str, world: int) -> Family:
    kinds = [(kind, rank, value) for kind, values in VALUES.items() for value in values
             for rank in range(1 if kind == "power" else world)]

    def walk(tally: Tally, share: Share) -> None:
        for kind, rank, value in kinds[share]:
            for _ in _until_quiet(tally, Case(scenario, world), 0, (Strike(kind, rank, at, value) for at in itertools.count(1))):
                pass

    return Family(f"single faults ({'/'.join(VALUES)}) of {scenario} on {world} ranks, at every operation", walk, len(kinds))


def _until_quiet(tally: Tally, case: Case, number: int, strikes: Iterator[Strike]) -> Iterator[tuple[Strike, Run]]:
    """``case`` with one more fault, the ``number``-th, farther and farther on until it does not fire any more."""
    for strike in strikes:
        struck = Case(case.scenario, case.world, case.seed, (*case.faults, str(strike)))
        run = struck.run()
        if number not in run.struck:
            return
        tally.note(struck, run)
        yield strike, run


def _pairs(scenario: str, world: int, first: tuple[str, int, str], second: tuple[str, int, str]) -> Family:
    """Of ``scenario``: the first at every operation, and the second at every one that follows. Two disk errors of different ranks
    have no order in which they are counted: there the second is at every operation."""
    (kind, rank, value), (later, on, reason) = first, second

    def after(at: int, moment: Moment) -> int:
        if later == "power":
            return moment.total + 1
        if later == "kill":
            return moment.operations[on] + 1
        return at + 1 if (kind, rank) == (later, on) else 1

    def walk(tally: Tally, share: Share) -> None:
        alone = Tally()
        firsts = (Strike(kind, rank, at, value) for at in itertools.count(share.start + 1, share.step))
        for strike, run in _until_quiet(alone, Case(scenario, world), 0, firsts):
            seconds = (Strike(later, on, at, reason) for at in itertools.count(after(strike.at, run.struck[0])))
            for _ in _until_quiet(tally, Case(scenario, world, faults=(str(strike),)), 1, seconds):
                pass

    def name(kind: str, rank: int) -> str:
        return {"power": "power cut"}.get(kind, f"{kind} of rank {rank}")

    return Family(f"pairs of {name(kind, rank)}, then {name(later, on)}, of {scenario} on {world} ranks", walk, 16)


_KILLS, _ERRORS = [("kill", 0, ""), ("kill", 1, "")], [("fail", 0, "EIO"), ("fail", 1, "EIO")]
_FIRSTS = [*_KILLS, *_ERRORS, ("lost", 0, "EIO")]
_SECONDS = [*_KILLS, *_ERRORS, ("kill", 2, ""), ("fail", 2, "EIO"), ("power", 0, "")]
"""The first is of rank 0 or 1: what a third rank meets first, rank 1 meets as well. One that was killed has no second fault."""

FAMILIES: list[Family] = [
    *(_delays(scenario, world) for scenario, world in
      (("two", 2), ("two", 3), ("sync", 2), ("background", 2), ("background", 3), ("options", 2))),
    *(_singles(scenario, world) for scenario, world in
      (("sync", 2), ("background", 2), ("replacing", 2), ("keeping", 2), ("best", 2), ("two", 3), ("sync", 3),
       ("background", 3), ("options", 2), ("undigested", 2))),
    *(_pairs(scenario, world, first, second) for (scenario, world), first, second in itertools.product(
        (("one", 2), ("one", 3), ("two", 2)), _FIRSTS, _SECONDS)
      if second[1] < world and not (first[0] == "kill" and second[0] != "power" and first[1] == second[1])
      and not (first[0] == "fail" and second[0] == "fail" and first[1] > second[1])),
]


def _part(number: tuple[int, int], until: Budget) -> tuple[tuple[int, int], Result, set[int]] | None:
    """One part, begun only while there is time."""
    if until.left <= 0:
        return None
    family, share = FAMILIES[number[0]], number[1]
    tally = Tally()
    with in_bulk():
        family.walk(tally, slice(share, None, family.shares))
    return number, tally.result, tally.outcomes


def run(budget: Budget, path: Path = WALKED) -> Result:
    """Parts that were not walked yet for this code, two at a time, until all are or the budget ends."""
    from scripts.proof.__main__ import code

    tested = code()
    walked = _read(path, tested)
    todo = [(number, share) for number, family in enumerate(FAMILIES) for share in range(family.shares)
            if f"{family.title} {share}" not in walked]
    total, outcomes = Result("l0-exhaustive"), set[int]()
    path.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool, path.open("a", encoding="utf-8") as out:
        for done in pool.imap_unordered(_start, [(number, budget) for number in todo]):
            if done is None:
                continue
            (number, share), result, seen = done
            total.add(result)
            outcomes |= seen
            if not result.violations and not result.hangs:
                name = f"{FAMILIES[number].title} {share}"
                walked[name] = result.runs
                out.write(json.dumps({"code": tested, "part": name, "runs": result.runs}) + "\n")
                out.flush()
    total.distinct = len(outcomes)
    total.covers = covers(walked)
    total.seconds = budget.seconds - budget.left
    return total


def _start(task: tuple[tuple[int, int], Budget]) -> tuple[tuple[int, int], Result, set[int]] | None:
    return _part(*task)


def _read(path: Path, tested: str) -> dict[str, int]:
    """Runs by part, of the parts that were walked without a violation for this code."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found["part"]: found["runs"] for found in map(json.loads, lines) if found["code"] == tested}


def covers(walked: dict[str, int]) -> str:
    """Bound and count, family by family."""
    texts = []
    for family in FAMILIES:
        runs = [walked[name] for share in range(family.shares) if (name := f"{family.title} {share}") in walked]
        if len(runs) == family.shares:
            texts.append(f"all {sum(runs):,} {family.title}")
        elif runs:
            texts.append(f"{sum(runs):,} {family.title} ({len(runs)} of {family.shares} parts)")
        else:
            texts.append(f"no {family.title} yet")
    return "; ".join(texts)


def missing() -> str | None:
    try:
        import greenlet  # noqa: F401
    except ImportError:
        return "the greenlet package (pip install greenlet)"
    return None


LAYER = Layer("l0-exhaustive", "simulation: every schedule with a delay, every fault, every pair", missing, run, 0.0, 25 * 60.0)
