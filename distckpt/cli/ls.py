"""``distckpt ls``: what a root holds, at a glance."""

from __future__ import annotations

import argparse
from typing import Any

from distckpt import human
from distckpt.cli import exits, leftovers, output, target
from distckpt.cli.output import Output
from distckpt.cli.survey import NEWEST, Row, survey
from distckpt.layout import MAIN
from distckpt.reader import Root

_COLUMNS = ("NAME", ">STEP", "SERIES", ">SEQ", ">AGE", ">SIZE", ">FILES", ">WORLD", "METRICS", "STATE")
_MANY = 10_000


def run(args: argparse.Namespace, out: Output) -> int:
    root = target.open_root(args.root, args.series)
    rows = survey(root, args.series)
    now = root.runtime.time()
    staged = leftovers.staged_names(root)
    free = root.files.free(root.layout.root)
    whole = [row for row in rows if row.seen is not None]
    newest = min((row for row in rows if NEWEST in row.words), key=lambda row: row.entry.series != MAIN, default=None)
    total = sum(row.seen.size for row in whole if row.seen is not None)
    room = free // newest.seen.size if newest is not None and newest.seen is not None and newest.seen.size else None
    out.document({"root": root.layout.root, "run": root.record.run if root.record else None,
                  "naming": root.naming.template, "checkpoints": [document(root, row) for row in rows],
                  "committed": len(whole), "bytes": total, "free": free, "room": room, "staged": staged})
    if rows:
        bold = rows.index(newest) if newest is not None else None
        out.table(_COLUMNS, [_cells(row, now) for row in rows], bold=bold)
    elif args.series:
        others = sorted({e.series for e in root.entries()})
        out.line(f"nothing of series {args.series!r}" + (f"; there are: {', '.join(others)}" if others else ""))
    of_series = f" of series {args.series!r}" if args.series else ""
    footer = f"{len(whole)} committed{of_series}, {human.size(total)}; {human.size(free)} free"
    if newest is not None and room is not None:
        about = f"about {room}" if room <= _MANY else f"more than {_MANY}"
        footer += f", room for {about} more of {newest.entry.name}'s size"
    out.line(footer)
    shares = output.shares(row.entry.head for row in rows)
    if shares:
        out.line(shares)
    if staged:
        some = ", ".join(staged[:3]) + (" ..." if len(staged) > 3 else "")
        out.line(f"{output.plural(len(staged), 'attempt')} in staging ({some}): in progress, or left by a crash; "
                 f"'distckpt gc --dry-run {root.layout.root}' tells")
    return exits.OK


def _cells(row: Row, now: float) -> list[str]:
    entry, seen = row.entry, row.seen
    seq = str(entry.head.seq) if entry.head is not None else "-"
    if seen is None:
        return [entry.name, str(entry.step), entry.series, seq, "-", "-", "-", "-", "-", row.text]
    return [entry.name, str(entry.step), entry.series, seq, output.age(now, seen.time), human.size(seen.size),
            str(seen.count), str(seen.world), output.metrics(seen.metrics), row.text]


def document(root: Root, row: Row) -> dict[str, Any]:
    """One entry for scripts: every key is always there."""
    head, seen = row.entry.head, row.seen
    return {"name": row.entry.name, "path": root.layout.final(row.entry.name), "step": row.entry.step,
            "series": row.entry.series, "committed": seen is not None, "states": row.words, "reason": row.text,
            "seq": head.seq if head else None, "attempt": head.attempt if head else None, "run": head.run if head else None,
            "time": seen.time if seen else None, "bytes": seen.size if seen else None, "files": seen.count if seen else None,
            "share": [head.part + 1, head.of] if head and head.of > 1 else None,
            "world": seen.world if seen else None, "metrics": dict(seen.metrics) if seen else None}
