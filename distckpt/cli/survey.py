"""What stands in a root and what each entry is to the run: one answer for ``ls`` and ``show``. Reads only."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from distckpt import catalog, leases, marker, selection, trust
from distckpt.catalog import Entry
from distckpt.durable import GONE
from distckpt.errors import MarkerError
from distckpt.layout import MARKER
from distckpt.marker import Glance
from distckpt.reader import Root

NEWEST = "newest"
COMMITTED = "committed"


@dataclass
class Row:
    """One entry. ``states``: (word, detail) pairs, the first one says what it is; ``seen`` is None when it is not whole."""

    entry: Entry
    seen: Glance | None
    states: list[tuple[str, str]] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.states]

    @property
    def text(self) -> str:
        """All states in one line for people."""
        return ", ".join(f"{word}: {detail}" if detail else word for word, detail in self.states)


def survey(root: Root, series: str | None = None) -> list[Row]:
    """Every checkpoint-named entry, newest commit first, with its marker read whole and what is known about it."""
    entries = root.entries(series)
    rejected = catalog.rejections(root.files, root.layout)
    ranges, newest = selection.abandoned(root.files, root.layout), selection.recorded(root.files, root.layout)
    run = root.record.run if root.record else None
    leased = set(leases.leased_attempts(root.files, root.layout))
    usable: dict[str, list[str]] = {}
    for name in {e.series for e in entries}:
        usable[name] = [e.name for e in selection.candidates(entries, name, run, rejected, ranges, newest).usable]
    rows = []
    crowned = set()
    for entry in entries:
        row = _row(root, entry)
        rows.append(row)
        if row.seen is None or entry.head is None:
            continue
        if run is not None and entry.head.run != run:
            row.states = [("other run", entry.head.run)]
        elif entry.head.attempt in rejected:
            row.states = [("rejected", rejected[entry.head.attempt])]
        elif entry.name not in usable[entry.series]:
            put_back = 0 < entry.head.seq < newest.get(entry.name, 0)
            row.states = [("superseded", "an older checkpoint was put back") if put_back else ("rolled back", "")]
        elif entry.series not in crowned:
            crowned.add(entry.series)
            row.states = [(NEWEST, "")]
        if entry.head.attempt in leased:
            row.states += holders(root, entry.head.attempt)
    return rows


def holders(root: Root, attempt: str) -> list[tuple[str, str]]:
    """Who keeps a checkpoint: pins first, then leases (a lease may have expired; only a writer can tell)."""
    held = root.leases_on(attempt)
    return [("pinned", h.reason) for h in held if h.ttl is None] + \
        [("leased", f"by {h.host}, {h.reason}" if h.host else h.reason) for h in held if h.ttl is not None]


def never_committed(root: Root, entry: Entry) -> bool:
    """Whether it never was a checkpoint: no directory, or one without a marker. What has a marker that is bad, was one."""
    if entry.head is not None:
        return False
    path = root.layout.final(entry.name)
    try:
        return root.files.stat(path).kind != "dir" or all(item.name != MARKER for item in root.files.scan(path))
    except OSError as error:
        return error.errno in GONE  # what cannot be listed may well be one


def _row(root: Root, entry: Entry) -> Row:
    if entry.head is None:
        if not never_committed(root, entry):
            return Row(entry, None, [("damaged", entry.problem or "")])
        if root.files.stat(root.layout.final(entry.name)).kind != "dir":
            return Row(entry, None, [("not a checkpoint", entry.problem or "")])
        return Row(entry, None, [(f"no {MARKER}", "never committed, or not written by distckpt; 'distckpt adopt' makes it a "
                                  "checkpoint")])
    if entry.problem:
        return Row(entry, None, [("not a checkpoint", entry.problem)])
    path = os.path.join(root.layout.final(entry.name), MARKER)
    try:
        seen = marker.glance(root.files.read(path, marker.SIZE_LIMIT), path, trust.key())
    except MarkerError as error:
        return Row(entry, None, [("damaged", next(iter(error.files.values())))])
    except OSError as error:
        return Row(entry, None, [("damaged", f"its marker cannot be read: {error.strerror or error}")])
    if seen.head != entry.head:
        return Row(entry, None, [("changing", "it was replaced while this was read; look again")])
    return Row(entry, seen, [(COMMITTED, "")])
