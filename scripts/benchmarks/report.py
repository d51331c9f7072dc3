"""Rows of ratios, and whether they meet their targets. Absolute times stand beside them, for scale only: the machine is
shared and noisy."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

SLACK = 1.15
"""A target is missed by a median of more than this times it: what two runs of the same code differ by on a busy disk."""

DISK, LATENCY = 9, 20
"""The fewest rounds that a median is taken of, where the disk decides and where a call's latency does."""

_UNITS = {"s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")), "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
          "": ((1.0, ""),)}


@dataclass
class Row:
    """One comparison: ``ours`` and ``theirs`` are paired samples from the same rounds, in seconds unless ``unit`` says bytes
    ("B") or plain numbers ("").

    ``target``: the median of the rounds' ratios ours / theirs is at most this ("at least 4x faster" is 1 / 4).
    ``limit``: the median of ours is at most this, in ``unit``. ``least``: with fewer rounds the row is missed,
    whatever its median. ``case``: the row of issue 7's table it answers. A row without samples says in its note why there are
    none.
    """

    name: str
    ours: list[float]
    theirs: list[float]
    target: float | None = None
    note: str = ""
    ratios: list[float] = field(default_factory=list)
    case: int | None = field(default=None, kw_only=True)
    limit: float | None = field(default=None, kw_only=True)
    unit: str = field(default="s", kw_only=True)
    least: int = field(default=DISK, kw_only=True)
    scenario: str = field(default="", kw_only=True)
    load: float = field(default_factory=lambda: os.getloadavg()[0], kw_only=True)

    def __post_init__(self) -> None:
        self.ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)] if self.theirs else []

    def misses(self) -> Iterator[str]:
        """What of it is missed by more than SLACK, in words. A target that nothing was measured for is missed."""
        if self.ours and len(self.ours) < self.least:
            yield f"{len(self.ours)} rounds, at least {self.least} wanted"
        if self.target is not None:
            if not self.ratios:
                yield f"nothing to compare: {self.note or 'no rounds'}"
            elif statistics.median(self.ratios) > self.target * SLACK:
                yield f"ratio {statistics.median(self.ratios):.3g}, at most {self.target:.3g} wanted"
        if self.limit is not None:
            if not self.ours:
                yield f"nothing was measured: {self.note or 'no rounds'}"
            elif statistics.median(self.ours) > self.limit * SLACK:
                yield f"{shown(statistics.median(self.ours), self.unit)}, at most {shown(self.limit, self.unit)} wanted"

    @property
    def absent(self) -> bool:
        """Nothing was measured, and nothing was promised: a peer that is not to be had here."""
        return not self.ours and self.target is None and self.limit is None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "missed": list(self.misses())}


def percentile(values: list[float], part: int) -> float:
    """The least of ``values`` that ``part`` of a hundred of them are not above."""
    return sorted(values)[-(-part * len(values) // 100) - 1]


def shown(value: float, unit: str, like: float | None = None) -> str:
    """``value`` in the scale that suits it, or that suits ``like`` (then without the unit's name)."""
    scales = _UNITS[unit]
    scale, name = next((s for s in scales if abs(value if like is None else like) >= s[0]), scales[-1])
    return f"{value / scale:.3g}" + (f" {name}".rstrip() if like is None else "")


def missed(rows: list[Row]) -> list[str]:
    """A line for each target that was missed."""
    return [f"{f'case {row.case}: ' if row.case is not None else ''}{row.name}: {why}" for row in rows for why in row.misses()]


def _span(values: list[float], unit: str) -> str:
    if not values:
        return "-"
    low, middle, high = min(values), statistics.median(values), max(values)
    name = shown(middle, unit).partition(" ")[2]
    return f"{'/'.join(shown(value, unit, middle) for value in (low, middle, high))} {name}".rstrip()


def _targets(row: Row) -> str:
    wanted = [f"<= {row.target:.3g}"] if row.target is not None else []
    if row.limit is not None:
        wanted.append(f"<= {shown(row.limit, row.unit)}")
    return ", ".join(wanted) + (" MISSED" if any(row.misses()) else "")


def _note(row: Row) -> str:
    return "; ".join(text for text in (f"{len(row.ours)} rounds" if row.ours else "", row.note) if text)


def table(rows: list[Row], head: bool = True) -> str:
    lines = []
    if head:
        lines.append(f"{'scenario':76} {'case':>4} {'ours min/med/max':24} {'beside min/med/max':24} "
                     f"{'ratio (median)':>19} target")
    for row in rows:
        ratio = ""
        if row.ratios:
            ratio = f"{statistics.median(row.ratios):.3g} [{min(row.ratios):.2g}-{max(row.ratios):.2g}]"
        lines.append(f"{row.name:76} {'' if row.case is None else row.case:>4} {_span(row.ours, row.unit):24} "
                     f"{_span(row.theirs, row.unit):24} {ratio:>19} {_targets(row):16}  {_note(row)}".rstrip())
    return "\n".join(lines)
