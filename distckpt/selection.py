"""Which checkpoint a run goes on from: the candidates in order, and why others are passed over. Reads only.

One order for resume, ``distckpt latest`` and readers: by commit, newest first, without what a rollback abandoned and
without what was found bad before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distckpt import catalog, journal, trust
from distckpt.catalog import Entry
from distckpt.durable import GONE, Files
from distckpt.errors import MarkerError
from distckpt.layout import HOME, MARKER, Layout

Ranges = list[tuple[int, int]]


@dataclass
class Candidates:
    """``usable`` by promise of their heads, newest first; ``skipped`` maps every other name to its reason."""

    usable: list[Entry] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    legacy: list[str] = field(default_factory=list)


def abandoned(files: Files, layout: Layout) -> Ranges:
    """The commits that explicit rollbacks left behind, as (after, up to) ranges of ``seq``."""
    value = (catalog.read_json(files, layout.rollback) or {}).get("abandoned", [])
    try:
        ranges = [(after, upto) for after, upto in value]
    except (TypeError, ValueError):
        ranges = [("", "")]
    if not all(isinstance(number, int) for pair in ranges for number in pair):
        raise MarkerError(f"{layout.rollback} is not readable: it is no list of ranges; a rollback may have left commits behind: "
                          "restore it, or remove it and name the step to go on from", files={layout.rollback: "malformed"})
    return ranges


def abandon(ranges: Ranges, target: int, highest: int) -> Ranges:
    """``ranges`` after going on from commit ``target``: a range that holds it is live again, what came after is not."""
    kept = [(after, upto) for after, upto in ranges if not after < target <= upto]
    return [*kept, (target, highest)] if highest > target else kept


def recorded(files: Files, layout: Layout) -> dict[str, int]:
    """The newest commit that the journal records under each name, where markers are signed (see ``trust``): an older one that
    stands there was put back by somebody. A hint: the journal itself is not signed."""
    found: dict[str, int] = {}
    for event in journal.read(files, layout) if trust.key() is not None else ():
        name, seq = event.get("name"), event.get("seq")
        if event.get("event") == "committed" and isinstance(name, str) and isinstance(seq, int):
            found[name] = max(seq, found.get(name, 0))
    return found


def candidates(entries: Sequence[Entry], series: str, run: str | None, rejected: Mapping[str, str],
               ranges: Ranges, newest: Mapping[str, int] | None = None) -> Candidates:
    """Sort ``entries`` (newest commit first) into what resume may try and what it passes over. ``newest``: see ``recorded``."""
    found, newest = Candidates(), newest or {}
    for entry in entries:
        if entry.series != series:
            continue
        if entry.head is None:
            found.skipped[entry.name] = entry.problem or "not committed"
            if entry.problem and MARKER in entry.problem and "no " in entry.problem:
                found.legacy.append(entry.name)
        elif entry.problem:
            found.skipped[entry.name] = entry.problem
        elif run is not None and entry.head.run != run:
            found.skipped[entry.name] = f"belongs to another run ({entry.head.run})"
        elif entry.head.attempt in rejected:
            found.skipped[entry.name] = f"rejected: {rejected[entry.head.attempt]} ('distckpt verify --digest' clears it)"
        elif any(after < entry.head.seq <= upto for after, upto in ranges):
            found.skipped[entry.name] = "left behind by a rollback (name its step to use it)"
        elif 0 < entry.head.seq < newest.get(entry.name, 0):
            found.skipped[entry.name] = (f"it is commit {entry.head.seq}, and the journal records commit {newest[entry.name]} "
                                         "under this name: an older checkpoint was put back (name its step to use it)")
        else:
            found.usable.append(entry)
    return found


def traces(files: Files, layout: Layout, entries: Sequence[Entry]) -> list[str]:
    """Evidence that this root had a checkpoint once; empty means that a fresh start loses nothing (S7)."""
    found = []
    if entries:
        found.append(f"{len(entries)} entries named like checkpoints, such as {entries[0].name}")
    for kind in ("staging", "trash"):
        if _holds_marker(files, layout.home(kind)):
            found.append(f"a marker in {HOME}/{kind}")
    pointer = catalog.read_pointer(files, layout)
    if pointer is not None:
        found.append(f"'latest' names {pointer}")
    if journal.ever_committed(files, layout):
        found.append("the journal records a commit")
    return found


def _holds_marker(files: Files, directory: str) -> bool:
    """Whether a whole marker stands anywhere below. A torn one is what a crash in the very first save leaves, and no commit
    (S7). What vanishes meanwhile is being deleted by our own janitor."""
    try:
        for item in files.scan(directory):
            if item.kind == "dir":
                if _holds_marker(files, os.path.join(directory, item.name)):
                    return True
            elif item.name == MARKER:
                catalog.read_marker(files, directory)
                return True
    except MarkerError:
        return False
    except OSError as error:
        if error.errno not in GONE:
            raise
    return False
