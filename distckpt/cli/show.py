"""``distckpt show``: everything about one checkpoint."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from distckpt import catalog, human, journal
from distckpt.checkpoint import Checkpoint
from distckpt.cli import exits, latest, output, survey, target
from distckpt.cli.output import Output
from distckpt.domains.domains import ranks_text
from distckpt.errors import StepNotFound
from distckpt.layout import MAIN
from distckpt.reader import Root

_FIRST = 20


def run(args: argparse.Namespace, out: Output) -> int:
    wanted = target.of(args)
    root = target.open_root(wanted.path, args.series)
    if wanted.step is None:
        found = latest.choose(root, args.series or MAIN)
        if found is None:
            raise StepNotFound(f"{root.layout.root} has no checkpoint of series {args.series or MAIN!r} yet")
        checkpoint = found
    else:
        checkpoint = root.read(target.entry_at(root, wanted.step, args.series))
    row = next((r for r in survey.survey(root, checkpoint.series) if r.entry.head == checkpoint.marker.head), None)
    states = row.text if row is not None else "removed meanwhile"
    holders = survey.holders(root, checkpoint.attempt)
    events = _events(root, checkpoint)
    names = {e.head.attempt: e.name for e in root.entries() if e.head is not None and e.head.attempt}
    out.document(_document(checkpoint, states, holders, events, names))
    out.line(f"{checkpoint.name}  {checkpoint.path}")
    out.pairs(_facts(root, checkpoint, states, names))
    _files(out, checkpoint, args.all)
    if holders:
        out.line("leases")
        out.pairs(holders)
    if events:
        out.line("journal")
        out.pairs([_event_cells(e) for e in events])
    return exits.OK


def _facts(root: Root, checkpoint: Checkpoint, states: str, names: dict[str, str]) -> list[tuple[str, str]]:
    marker, head = checkpoint.marker, checkpoint.marker.head
    facts = [("state", states), ("step", str(head.step)), ("series", head.series), ("commit", _commit(head.seq)),
             ("attempt", f"{head.attempt} (generation {head.generation})"), ("run", head.run),
             ("saved", f"{_clock(marker.time)}, {output.age(root.runtime.time(), marker.time)}"
                       + (f", by {marker.host}" if marker.host else "")),
             ("world", output.plural(marker.world, "rank")), *_shares(checkpoint),
             ("size", f"{human.size(marker.size)} in {output.plural(len(marker.files), 'file')}{_linked(root, checkpoint)}"),
             ("branch", marker.branch), ("parent", _parent(marker.parent, names))]
    if marker.lineage:
        facts.append(("lineage", ", ".join(f"{branch} to commit {last}" for branch, last in marker.lineage[:5])
                      + (f" and {len(marker.lineage) - 5} more" if len(marker.lineage) > 5 else "")))
    facts.append(("retention", marker.retention or "none recorded"))
    if marker.fingerprint:
        facts.append(("fingerprint", marker.fingerprint))
    for title, values in (("metrics", {k: f"{v:.6g}" for k, v in marker.metrics.items()}), ("meta", marker.meta),
                          ("payload", marker.payload)):
        for key, value in values.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            facts.append((title, f"{key} = {shown}"))
            title = ""
    return facts


def _linked(root: Root, checkpoint: Checkpoint) -> str:
    """How much of it other checkpoints have as well, by links; empty when nothing."""
    size = sum(each[0] for each in catalog.linked(root.files, checkpoint.path, checkpoint.marker.files).values())
    return f", {human.size(size)} of it linked by other checkpoints" if size else ""


def _shares(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Where the other shares are, of a checkpoint on several nodes' disks."""
    marker, title = checkpoint.marker, "nodes"
    found = []
    for number, (host, ranks) in enumerate(marker.domains):
        here = ", this share" if number == marker.head.part else ""
        found.append((title, f"{number + 1} of {marker.head.of}: {host} ({ranks_text(ranks)}){here}"))
        title = ""
    return found


def _commit(seq: int) -> str:
    return f"number {seq} of this root" if seq else "adopted: older than every commit"


def _parent(parent: str | None, names: dict[str, str]) -> str:
    if parent is None:
        return "none: its run started fresh"
    return f"{names[parent]} (attempt {parent})" if parent in names else f"attempt {parent}, no longer here"


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment > 0 else "at an unknown time"


def _files(out: Output, checkpoint: Checkpoint, all_of_them: bool) -> None:
    files = checkpoint.marker.files
    shown = files if all_of_them else files[:_FIRST]
    out.line("files" if len(shown) == len(files) else f"files (the first {len(shown)} of {len(files)}; --all shows all)")
    out.table(("PATH", ">SIZE", ">RANK", "DIGEST"),
              [(f.path, human.size(f.size), str(f.rank), f.digest or "none") for f in shown], indent="  ")


def _events(root: Root, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The journal's lines about this attempt; a line that names no attempt is about it when it names the checkpoint."""
    found = []
    for event in journal.read(root.files, root.layout):
        if event.get("attempt") is not None:
            mine = event["attempt"] == checkpoint.attempt
        else:
            mine = any(checkpoint.name == v or isinstance(v, list) and checkpoint.name in v for v in event.values())
        if mine:
            found.append(event)
    return found


def _event_cells(event: dict[str, Any]) -> tuple[str, str, str]:
    moment = event.get("time")
    rest = " ".join(f"{k}={v if isinstance(v, (str, int, float)) else json.dumps(v)}" for k, v in event.items()
                    if k not in ("time", "event", "identity"))
    return _clock(moment) if isinstance(moment, (int, float)) else "-", str(event.get("event", "-")), rest


def _document(checkpoint: Checkpoint, states: str, holders: list[tuple[str, str]], events: list[dict[str, Any]],
              names: dict[str, str]) -> dict[str, Any]:
    marker, head = checkpoint.marker, checkpoint.marker.head
    return {"name": head.name, "path": checkpoint.path, "state": states, "step": head.step, "series": head.series,
            "seq": head.seq, "attempt": head.attempt, "generation": head.generation, "run": head.run, "time": marker.time,
            "host": marker.host, "world": marker.world, "bytes": marker.size, "branch": marker.branch,
            "parent": marker.parent, "parent_name": names.get(marker.parent or ""),
            "lineage": [list(pair) for pair in marker.lineage], "retention": marker.retention,
            "fingerprint": marker.fingerprint, "metrics": dict(marker.metrics), "meta": dict(marker.meta),
            "payload": dict(marker.payload), "leases": [{"kind": kind, "reason": reason} for kind, reason in holders],
            "share": [head.part + 1, head.of] if head.of > 1 else None,
            "nodes": [{"host": host, "ranks": list(ranks)} for host, ranks in marker.domains],
            "files": [{"path": f.path, "bytes": f.size, "digest": f.digest, "rank": f.rank} for f in marker.files],
            "journal": events}
