"""One SVG for each scenario: a panel for each case, a line for each row, how its rounds spread, and the target."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from scripts.benchmarks.report import SLACK, Row, shown

# Okabe and Ito's colours, and a shape for each: neither red and green nor colour alone tells them apart.
_MET, _MISSED, _FREE, _TARGET = ("#0072B2", "o"), ("#D55E00", "X"), ("#666666", "s"), "#000000"
_LINE, _HEAD, _WIDTH = 0.3, 0.85, 11.0  # inches
_NAMES = 66


def draw(title: str, rows: list[Row], where: str, path: Path) -> None:
    """Rows that were not measured are left out; there is nothing to draw then."""
    panels: dict[int | None, list[Row]] = {}
    for row in rows:
        if _ratios(row):
            panels.setdefault(row.case, []).append(row)
    if not panels:
        return
    matplotlib.rcParams["svg.fonttype"] = "none"  # text that can be searched
    heights = [_HEAD + _LINE * len(of) for of in panels.values()]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.8), layout="constrained")
    figure.suptitle(f"scripts/bench {title}: {where}", x=0.01, ha="left", fontsize=10)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (case, of) in zip(axes, sorted(panels.items(), key=lambda item: (item[0] is None, item[0])), strict=True):
        _panel(axis, of)
        axis.set_title("no case of its own" if case is None else f"case {case}", loc="left", fontsize=9, fontweight="bold")
    axes[-1].set_xlabel("ours / beside: less is better (of an absolute limit: ours / limit)", fontsize=9)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, format="svg")


def _ratios(row: Row) -> list[float]:
    """What is drawn: a row that has only a limit is drawn as parts of that."""
    ratios = row.ratios or ([value / row.limit for value in row.ours] if row.limit else [])
    return [ratio for ratio in ratios if ratio > 0]  # the axis is logarithmic


def _panel(axis: Any, rows: list[Row]) -> None:
    for place, row in enumerate(rows):
        ratios = _ratios(row)
        target = row.target if row.ratios else 1.0
        colour, shape = _FREE if target is None and row.limit is None else _MISSED if any(row.misses()) else _MET
        axis.plot([min(ratios), max(ratios)], [place, place], color=colour, linewidth=1.2, alpha=0.5, zorder=1)
        axis.plot(ratios, [place] * len(ratios), "|", color=colour, markersize=7, alpha=0.6, zorder=2)
        axis.plot(statistics.median(ratios), place, shape, color=colour, markersize=7, zorder=3)
        if target is not None:
            axis.plot([target, target], [place - 0.4, place + 0.4], color=_TARGET, linewidth=2, zorder=2)
            axis.plot([target * SLACK] * 2, [place - 0.25, place + 0.25], color=_TARGET, linewidth=1, linestyle=":", zorder=2)
    axis.axvline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axis.get_xlim()
    if math.log10(high / low) > 1.2:
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axis.tick_params(axis="x", which="both", labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _label(row: Row) -> str:
    name = row.name if len(row.name) <= _NAMES else f"{row.name[:_NAMES - 1]}…"
    middle = f"{statistics.median(row.ratios):.3g}x" if row.ratios else shown(statistics.median(row.ours), row.unit)
    return f"{name}  {middle}"


def _legend() -> list[Line2D]:
    def marker(style: tuple[str, str], label: str) -> Line2D:
        return Line2D([], [], color=style[0], marker=style[1], linestyle="", label=label)

    return [marker(_MET, "median, target met"), marker(_MISSED, f"median, missed by more than {SLACK - 1:.0%}"),
            marker(_FREE, "median, no target"), Line2D([], [], color="#666666", marker="|", linewidth=1.2, label="a round"),
            Line2D([], [], color=_TARGET, linewidth=2, label=f"target (dotted: with {SLACK - 1:.0%} slack)")]
