"""One simulated run as one line, many of them added up, and the ways to walk them that L0 and its exhaustive part share."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from distckpt.testing.explore import first_job, schedules
from distckpt.testing.simjob import quiet
from distckpt.testing.simulation import Run, Strike
from scripts.proof.layer import Budget, Result
from scripts.proof.scenarios import SCENARIOS, UNKNOWN, noticed

VALUES = {"kill": [""], "power": [""], "stop": ["", "45"], "slow": ["0.5"], "fail": ["EIO", "ENOSPC"], "lost": ["EIO"]}
_SEEDED = ("sync", "background", "background", "skipping", "stopping", "replacing", "replacing-nfs", "framework", "leaving",
           "two", "uneven", "local", "local-3", "local-background", "local-replacing", "local-replacing-nfs", "local-framework",
           "local-leaving", "linking", "relinking", "local-linking", "keeping")


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
        run.violations += scenario.judge(run, self.faults, self.apart)
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
        if SCENARIOS[case.scenario].prompt and SCENARIOS[case.scenario].nodes == 1 and not case.apart:
            strikes = [Strike.parse(fault) for fault in case.faults]
            if all(strike.kind in ("kill", "fail", "lost") and strike.at > UNKNOWN for strike in strikes):
                result.slowest = max(result.slowest, noticed(run, strikes) or 0.0)
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
            for value in VALUES[kind]:
                for at in range(1 + offset % stride, top + 1, stride):
                    yield Case(scenario, world, seed, (str(Strike(kind, rank, at, value)),))


def seeded(number: int) -> Case:
    """The ``number``-th random case: scenario, ranks, schedule and up to two faults."""
    draw = random.Random(number)
    scenario, world = draw.choice(_SEEDED), draw.choice((2, 2, 2, 3))
    nodes = SCENARIOS[scenario].nodes
    world = max(world, nodes)
    committers = {node * world // nodes + bool(node * world % nodes) for node in range(nodes)}
    faults = []
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        kind = draw.choice((*VALUES, "node") if nodes > 1 else tuple(VALUES))
        rank = draw.randrange(world)
        value = draw.choice(VALUES.get(kind, [""]))
        top = (420 if rank in committers else 95) if kind != "power" else 480 if nodes == 1 else 950
        faults.append(str(Strike(kind, rank, draw.randrange(1, top), value)))
    return Case(scenario, world, number, tuple(faults), apart=nodes == 1 and draw.random() < 0.25)


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


@contextmanager
def in_bulk() -> Iterator[None]:
    """A tenth less for each run: what is loaded is not searched for garbage again, and nobody is asked about log lines."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_500, 20, 50)  # 20,000 made a run a twentieth longer
    try:
        with quiet():
            yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
