"""What L1 records: by number, the first ones chosen by hand, the rest at random."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Save:
    """``payload``: "members", "shards", "linked" (shards of which one file is the same in all saves), "dcp", "deepspeed" (ZeRO-2;
    its rank 1 is slow) or "plug" (somebody else's writer). ``fails``: the rank whose writer raises."""

    step: int
    payload: str = "members"
    background: bool = False
    on_exists: str = "error"
    fails: int | None = None


@dataclass(frozen=True)
class Phase:
    """One job on the root. ``kill``: (rank, n): that rank dies before its n-th operation."""

    saves: tuple[Save, ...]
    kill: tuple[int, int] | None = None


@dataclass(frozen=True)
class Scenario:
    base: str
    world: int
    keep: int
    phases: tuple[Phase, ...]
    writer: str = "thread"
    mutant: str = ""
    dedup: str | None = None

    @property
    def root(self) -> str:
        return f"{self.base}/run"

    @property
    def saves(self) -> list[Save]:
        return [save for phase in self.phases for save in phase.saves]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, value: dict[str, Any]) -> Scenario:
        phases = tuple(Phase(tuple(Save(**s) for s in p["saves"]), tuple(p["kill"]) if p["kill"] else None)
                       for p in value["phases"])
        return cls(**{**value, "phases": phases})


def _line(*steps: int, payload: str = "members", background: bool = False) -> tuple[Save, ...]:
    """Saves of these steps; one that came before is replaced."""
    return tuple(Save(step, payload, background, "replace" if step in steps[:at] else "error") for at, step in enumerate(steps))


CHOSEN: tuple[Scenario, ...] = (
    Scenario("", 2, 1, (Phase((*_line(1, 2), Save(2, "plug", on_exists="replace"))),)),
    Scenario("", 1, 2, (Phase(_line(1, 2, 3, 3, payload="shards")),)),
    # Among the first three, which are all that a quick run records.
    *([Scenario("", 2, 2, (Phase((*_line(1, 2, payload="deepspeed"), *_line(3, payload="deepspeed", background=True))),))]
      if find_spec("deepspeed") else []),
    Scenario("", 2, 2, (Phase(_line(1, 2, 3), kill=(0, 70)), Phase(_line(4, 5)))),
    Scenario("", 4, 2, (Phase(_line(1, 2, 3)),)),
    Scenario("", 2, 2, (Phase(_line(1, 2, 3, payload="dcp")),)),
    Scenario("", 2, 2, (Phase(_line(1, 2, 3, 3, background=True, payload="shards")),)),
    Scenario("", 1, 1, (Phase(_line(1, 2, background=True)),), writer="process"),
    Scenario("", 2, 3, (Phase((*_line(1, 2), Save(3, "plug", fails=1), *_line(3, 4, 5))),)),
    Scenario("", 4, 1, (Phase(_line(1, 2, background=True), kill=(2, 9)), Phase(_line(3, 4, payload="dcp")))),
    Scenario("", 2, 2, (Phase(_line(1, 2, 3), kill=(0, 55)), Phase(_line(4), kill=(0, 30)), Phase(_line(5, 6)))),
    Scenario("", 2, 1, (Phase(_line(1, 2, 3, 3, payload="linked"), kill=(0, 130)), Phase(_line(4, 5, payload="linked"))),
             dedup="link"),
)


def scenario(number: int, base: str) -> Scenario:
    """The scenario of this number, in ``base``. The same number is the same scenario."""
    if number < len(CHOSEN):
        return replace(CHOSEN[number], base=base)
    dice = random.Random(number)
    world, keep = dice.choice((1, 2, 2, 3, 4)), dice.choice((1, 2, 3))
    phases: list[Phase] = []
    step = 0
    for phase in range(dice.choice((1, 1, 2, 3))):
        saves: list[Save] = []
        for _ in range(dice.choice((2, 3, 3, 4))):
            again = step > 0 and bool(saves) and dice.random() < 0.25
            step += 0 if again else dice.choice((1, 10))
            kind = dice.choice(("members", "shards", "dcp", "plug"))
            fails = dice.randrange(world) if kind == "plug" and not again and dice.random() < 0.3 else None
            saves.append(Save(step, kind, kind != "plug" and dice.random() < 0.5, "replace", fails))
        phases.append(Phase(tuple(saves)))
        if phase:
            victim = dice.randrange(world)
            phases[-2] = replace(phases[-2], kill=(victim, dice.randrange(12, 60) if victim == 0 else dice.randrange(4, 9)))
    return Scenario(base, world, keep, tuple(phases), writer="process" if dice.random() < 0.15 else "thread")
