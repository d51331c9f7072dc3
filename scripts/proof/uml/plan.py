"""What one boot of the guest shall do, and the lines it says on its console. Pure; host and guest share it."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from typing import Any

from distckpt.testing.checker import ABORTED, COMMITTED, Save, Story
from scripts.proof.uml import golden

KEEP = 2
SERVER = ("restart", "crash", "lost")
CUT, CUT_START = "cut", "cut-start"
STALE, CACHED = "stale", 60
"""Both clients cache names and attributes for so many seconds, and have looked too early."""
_PREFIX = "L4 "


@dataclass
class Phase:
    """``tries`` saves under ``fault`` by one pair of ranks."""

    fault: str
    tries: int

    @property
    def hurried(self) -> bool:
        """Whether trash is deleted at once and not after 90 s: else nothing would be deleted within a phase. ``none`` and ``see``
        run with every constant as it is."""
        return self.fault not in ("none", "see")


@dataclass
class Plan:
    """``told``: step to {rank: verdict} of every save that was begun so far. ``limit``: seconds without a word. ``export``:
    "async" is a server that lies, which must turn the layer red."""

    version: str
    seed: int
    boot: int
    phases: list[Phase]
    next_step: int = 1
    told: dict[int, dict[int, str]] = field(default_factory=dict)
    cuts: int = 0
    limit: float = 240.0
    export: str = "sync"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        raw = json.loads(text)
        raw["phases"] = [Phase(**phase) for phase in raw["phases"]]
        raw["told"] = {int(step): {int(rank): str(verdict) for rank, verdict in told.items()}
                       for step, told in raw["told"].items()}
        return cls(**raw)

    def story(self) -> Story:
        """For the checker."""
        return Story([Save(step, golden.content(step), dict(told)) for step, told in sorted(self.told.items())], KEEP)

    def random(self, *what: object) -> random.Random:
        return random.Random(f"{self.seed}/{self.version}/{self.boot}/{'/'.join(map(str, what))}")


def line(**event: Any) -> str:
    """One event as the guest says it."""
    return _PREFIX + json.dumps(event)


def parse(text: str) -> dict[str, Any] | None:
    """The event in a console line; None for the kernel's and everybody else's talk, and for a line that a kill cut short."""
    if not text.startswith(_PREFIX):
        return None
    try:
        value = json.loads(text[len(_PREFIX):])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def disagreement(step: int, told: dict[int, str]) -> str | None:
    """I7: committed on one rank and failed on another."""
    verdicts = set(told.values())
    if COMMITTED in verdicts and ABORTED in verdicts:
        return f"I7: the save of step {step} was {told}"
    return None
