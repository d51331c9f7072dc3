"""What L1 records: by number, the first ones chosen by hand, the rest at random."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

ROLLING = "rolling"
ROLLING_KEEP = 1
"""The second series, and how many of it stay."""


@dataclass(frozen=True)
class Save:
    """``payload``: "members", "shards", "linked" (shards of which one file is the same in all saves), "trained" (a module and its
    optimizer, which steps as soon as it may, beside such a file and members), "dcp", "deepspeed" (ZeRO-2; its rank 1 is slow) or
    "plug" (somebody else's writer). ``fails``: the rank whose writer raises. ``loss``: its metric."""

    step: int
    payload: str = "members"
    background: bool = False
    on_exists: str = "error"
    fails: int | None = None
    staging: str = "copy"
    series: str = "main"
    loss: float | None = None


@dataclass(frozen=True)
class Phase:
    """One job on the root. ``kill``: (rank, n): that rank dies before its n-th operation."""

    saves: tuple[Save, ...]
    kill: tuple[int, int] | None = None


@dataclass(frozen=True)
class Scenario:
    """``best``: ``keep_best``. A phase in which a rank is killed writes by threads: it is the files' seam that counts."""

    base: str
    world: int
    keep: int
    phases: tuple[Phase, ...]
    writer: str = "thread"
    mutant: str = ""
    dedup: str | None = None
    digest: str | None = "xxh3-128"
    best: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What every manager of this root is given, that of the next start as well: one without ``best`` would rotate it."""
        return {"keep_last": self.keep, "keep_best": self.best, "dedup": self.dedup, "digest": self.digest}

    @property
    def protected(self) -> frozenset[int]:
        """The step that its policy keeps once it is committed, whatever comes later."""
        losses = {save.loss: save.step for save in self.saves if save.loss is not None and save.series == "main"}
        return frozenset({losses[min(losses)]} if self.best and losses else ())

    @property
    def verify(self) -> str:
        return "size" if self.digest is None else "digest"

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


def _trained(*steps: tuple[int, str, float | None]) -> tuple[Save, ...]:
    """(step, series, loss) each, copied beside the training."""
    return tuple(Save(step, "trained", True, staging="overlap", series=series, loss=loss) for step, series, loss in steps)


EVERY_OPTION = Scenario("", 2, 1, (Phase(_trained((1, "main", 0.2), (1, ROLLING, None), (2, "main", 0.1), (2, ROLLING, None),
                                                  (3, "main", 0.4))),),
                        writer="process", dedup="link", digest="sha256", best=1)
"""Crash safety never pays for speed."""

CHOSEN: tuple[Scenario, ...] = (
    EVERY_OPTION,
    Scenario("", 2, 1, (Phase((*_line(1, 2), Save(2, "plug", on_exists="replace"))),)),
    # Among the first four (``l1.QUICK_BATCH``), which are all that a quick run records.
    *([Scenario("", 2, 2, (Phase((*_line(1, 2, payload="deepspeed"), *_line(3, payload="deepspeed", background=True))),))]
      if find_spec("deepspeed") else []),
    Scenario("", 1, 2, (Phase(_line(1, 2, 3, 3, payload="shards")),)),
    Scenario("", 2, 2, (Phase(_line(1, 2, 3), kill=(0, 70)), Phase(_line(4, 5)))),
    Scenario("", 4, 2, (Phase(_line(1, 2, 3)),)),
    Scenario("", 2, 2, (Phase(_line(1, 2, 3, payload="dcp")),)),
    Scenario("", 2, 2, (Phase(_line(1, 2, 3, 3, background=True, payload="shards")),)),
    Scenario("", 1, 1, (Phase(_line(1, 2, background=True)),), writer="process"),
    Scenario("", 2, 3, (Phase((*_line(1, 2), Save(3, "plug", fails=1), *_line(3, 4, 5))),)),
    Scenario("", 4, 1, (Phase(_line(1, 2, background=True), kill=(2, 9)), Phase(_line(3, 4, payload="dcp")))),
    Scenario("", 2, 2, (Phase(_line(1, 2, 3), kill=(0, 55)), Phase(_line(4), kill=(0, 30)), Phase(_line(5, 6)))),
    Scenario("", 2, 1, (Phase(_line(1, 2, 3, 3, payload="linked"), kill=(0, 81)), Phase(_line(4, 5, payload="linked"))),
             dedup="link"),
    Scenario("", 2, 1, (Phase(_trained((1, "main", 0.2), (2, "main", 0.1), (2, ROLLING, None), (3, "main", 0.4)), kill=(0, 81)),
                        Phase((*_trained((4, "main", 0.3), (4, ROLLING, None)), Save(5, "dcp", True, staging="overlap")))),
             writer="process", digest=None, best=1),
    Scenario("", 2, 2, (Phase((*_line(1, 2, payload="dcp", background=True), *_trained((3, "main", 0.1))), kill=(1, 22)),
                        Phase(tuple(replace(s, staging="overlap") for s in _line(4, 5, 5, payload="dcp", background=True)))),
             dedup="link", best=1),
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
    made = Scenario(base, world, keep, tuple(phases), writer="process" if dice.random() < 0.15 else "thread")
    return _with_options(made, random.Random(f"options of {number}"))


def _with_options(made: Scenario, dice: random.Random) -> Scenario:
    """``made``, by dice of their own, so that its saves and kills stay what its number made them."""
    digest = dice.choice(("xxh3-128", "xxh3-128", "sha256", None))
    phases = tuple(replace(phase, saves=tuple(
        replace(save, staging="overlap" if save.background and dice.random() < 0.5 else "copy") for save in phase.saves))
        for phase in made.phases)
    return replace(made, phases=phases, digest=digest, dedup="link" if digest is not None and dice.random() < 0.3 else None)
