"""Rows of ratios. Absolute times stand beside them, for scale only: the machine is shared and noisy."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Row:
    """One comparison: ``ours`` and ``theirs`` are paired samples in seconds from the same rounds."""

    name: str
    ours: list[float]
    theirs: list[float]
    target: float | None = None
    note: str = ""
    ratios: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)] if self.theirs else []


def _span(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    unit, scale = ("s", 1.0) if middle >= 1 else ("ms", 1e3)
    return f"{low * scale:.3g}/{middle * scale:.3g}/{high * scale:.3g} {unit}"


def table(rows: list[Row], head: bool = True) -> str:
    lines = []
    if head:
        lines.append(f"{'scenario':58} {'ours min/med/max':26} {'beside min/med/max':26} {'ratio (median)':>16} {'target':>8}")
    for row in rows:
        ratio = ""
        if row.ratios:
            ratio = f"{statistics.median(row.ratios):.3f} [{min(row.ratios):.2f}-{max(row.ratios):.2f}]"
        target = "" if row.target is None else f"<= {row.target:g}"
        lines.append(f"{row.name:58} {_span(row.ours):26} {_span(row.theirs) if row.theirs else '-':26} {ratio:>16} {target:>8}"
                     + (f"  {row.note}" if row.note else ""))
    return "\n".join(lines)
