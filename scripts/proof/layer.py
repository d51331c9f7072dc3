"""What a layer of the proof is, and what it reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Budget:
    """How much a layer may do: about ``seconds``, beginning with ``seed``. A layer looks at ``left`` between runs."""

    seconds: float
    seed: int = 0
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)


@dataclass
class Result:
    """What one run of a layer found. Results of disjoint seeds add up.

    ``runs``: executions of the code under test. ``states``: disk states or schedules generated; ``distinct``: of those, told
    apart by what a reader can see. ``violations``: one line each, "I2: ...", that says how to replay it. ``hangs``: ranks that
    did not end. ``slowest``: seconds until the slowest fault was noticed. ``covers``: what was walked, as text ("seeds 0-999").
    ``skipped``: why it did not run. ``code``: of what code, set by the caller.
    """

    layer: str
    runs: int = 0
    states: int = 0
    distinct: int = 0
    violations: list[str] = field(default_factory=list)
    hangs: int = 0
    slowest: float = 0.0
    seconds: float = 0.0
    covers: str = ""
    skipped: str = ""
    code: str = ""

    def add(self, other: Result) -> None:
        self.runs += other.runs
        self.states += other.states
        self.distinct += other.distinct
        self.violations += other.violations
        self.hangs += other.hangs
        self.slowest = max(self.slowest, other.slowest)
        self.seconds += other.seconds
        self.covers = "; ".join(part for part in (self.covers, other.covers) if part)


@dataclass(frozen=True)
class Layer:
    """``missing`` says what this machine lacks for it, or None; it may install Debian packages when root (and say so).
    ``run`` works within the budget and reports; it raises only when the layer itself is broken."""

    name: str
    title: str
    missing: Callable[[], str | None]
    run: Callable[[Budget], Result]
    quick_seconds: float
    full_seconds: float


def append(path: Path, results: Iterable[Result]) -> None:
    """One JSON line each: a full run is resumed by running again with later seeds."""
    with path.open("a", encoding="utf-8") as out:
        for result in results:
            out.write(json.dumps(asdict(result)) + "\n")
