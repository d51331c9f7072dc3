"""What crashes left in ``.distckpt``: attempts in staging, entries in trash, and what becomes of each.

Reads only. It foretells what ``recovery`` will do at the next claim, and says why; a test holds the two together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from distckpt import catalog, ownership, recovery
from distckpt.durable import GONE, Files, Item
from distckpt.errors import MarkerError
from distckpt.layout import ATTEMPT, MARKER, is_taken, number_of, series_of
from distckpt.marker import Marker
from distckpt.ordered import walk
from distckpt.reader import Root
from distckpt.runtime import Identity

PUBLISH, REMOVE, RESTORE, LIVE, UNCLEAR = "publish", "remove", "put back", "in progress", "cannot tell"


@dataclass
class Leftover:
    """One entry of staging or trash. ``name`` is the checkpoint it holds, if any; ``fate`` what a claim does to it."""

    place: str
    generation: int
    id: str
    path: str
    name: str
    fate: str
    why: str
    marker: Marker | None = None


def _numbered(root: Root, kind: str) -> Iterator[tuple[int, str]]:
    """(generation, directory) of every generation, those that a takeover moved aside and did not empty included."""
    pending = [(root.layout.home(kind), True)]
    while pending:
        parent, top = pending.pop()
        for item in _scan(root.files, parent):
            number = item.name if top else item.name.rpartition("-")[2]
            if item.kind == "dir" and (number_of(item.name) is not None if top else is_taken(item.name)):
                yield int(number), os.path.join(parent, item.name)
                pending.append((os.path.join(parent, item.name), False))


def _scan(files: Files, path: str) -> list[Item]:
    try:
        return files.scan(path)
    except OSError as error:
        if error.errno in GONE:
            return []
        raise


def staged_names(root: Root) -> list[str]:
    """The checkpoint names of the attempts in staging; quick, for ``ls``."""
    return [name for _, directory in _numbered(root, "staging") for item in _scan(root.files, directory)
            if item.kind == "dir" and ATTEMPT.fullmatch(item.name)
            for name in recovery.inside(root.files, os.path.join(directory, item.name))]


def writer_lives(root: Root) -> tuple[int, bool | None]:
    """(highest generation, whether its owner lives); None when only a wait of 90 s could tell (another machine)."""
    heads = [e.head.generation for e in root.entries() if e.head is not None]
    top = ownership.highest(root.files, root.layout, max(heads, default=0))
    if top == 0 or ownership.released(root.files, root.layout, top):
        return top, False
    value = catalog.read_json(root.files, root.layout.owner(top))
    owner = Identity.of_record((value or {}).get("identity"))
    if owner is None:
        return top, False if value is None else None
    return top, root.runtime.alive(owner)


def leftovers(root: Root) -> list[Leftover]:
    """Everything in staging and trash, oldest generation first, each with what the next claim does to it."""
    top, alive = writer_lives(root)
    found = sorted(_staged(root, top, alive), key=lambda f: f.generation)
    newest = max((e.head.seq for e in root.entries() if e.head is not None), default=0)
    standing = {item.name for item in root.files.scan(root.layout.root)}
    whole = [f for f in found if f.fate == PUBLISH and f.marker is not None]
    for one in sorted(whole, key=lambda f: f.marker.head.seq if f.marker else 0):
        assert one.marker is not None
        if one.marker.head.seq > newest:
            newest = one.marker.head.seq
            standing.add(one.name)
        else:
            one.fate, one.why = REMOVE, f"commit {one.marker.head.seq} is not newer than what is published ({newest})"
    return found + sorted(_trashed(root, top, alive, standing), key=lambda f: f.generation)


def _staged(root: Root, top: int, alive: bool | None) -> Iterator[Leftover]:
    for generation, directory in _numbered(root, "staging"):
        for item in _scan(root.files, directory):
            path = os.path.join(directory, item.name)
            if is_taken(item.name):
                continue
            name = next(iter(recovery.inside(root.files, path)), "-") if item.kind == "dir" else "-"
            one = Leftover("staging", generation, item.name, path, name, REMOVE, "")
            if generation == top and alive is not False:
                one.fate, one.why = LIVE, _live(alive)
            elif item.kind != "dir":
                one.why = "a temporary file"
            elif not ATTEMPT.fullmatch(item.name):
                one.why = "not an attempt's name"
            else:
                one.fate, one.marker, one.name, one.why = _judge(root, path, item.name, name)
            yield one


def _live(alive: bool | None) -> str:
    return "belongs to the live writer" if alive else "its writer is on another machine and may live"


def _judge(root: Root, path: str, attempt: str, name: str) -> tuple[str, Marker | None, str, str]:
    """(fate, marker, checkpoint name, why) of a dead attempt, by the rules of ``recovery``."""
    why = "never committed: nothing was written"
    for inner in recovery.inside(root.files, path):
        directory, parsed = os.path.join(path, inner), series_of(root.naming, inner)
        if parsed is None:
            why = f"{inner!r} is no checkpoint's name here"
            continue
        try:
            found = catalog.read_marker(root.files, directory)
        except MarkerError as error:
            why = next(iter(error.files.values()))
            continue
        except OSError as error:
            if error.errno not in GONE:
                raise
            why = f"never committed: it has no {MARKER}"
            continue
        problem = catalog.identity_problem(found.head, inner, parsed)
        damage = catalog.check_files(root.files, directory, found.files)
        if found.head.attempt != attempt:
            why = f"the old half of a replace: it holds attempt {found.head.attempt}"
        elif problem:
            why = problem
        elif not all(p.certain for p in damage):
            return UNCLEAR, None, inner, f"recovery deletes nothing that it cannot read: {damage[0].path} {damage[0].what}"
        elif damage:
            why = f"partly removed or damaged: {damage[0].path} {damage[0].what}"
        else:
            return PUBLISH, found, inner, "committed, not yet published"
    return REMOVE, None, name, why


def _trashed(root: Root, top: int, alive: bool | None, standing: set[str]) -> Iterator[Leftover]:
    for generation, directory in _numbered(root, "trash"):
        for item in _scan(root.files, directory):
            if is_taken(item.name):
                continue
            path = os.path.join(directory, item.name)
            name = item.name.removesuffix(recovery.REPLACED).rpartition(".")[0]
            name = name or next(iter(recovery.inside(root.files, path)), "-")
            one = Leftover("trash", generation, item.name, path, name, REMOVE, "removed before, its bytes are still here")
            if generation == top and alive is not False:
                one.fate, one.why = LIVE, "being deleted by the live writer" if alive else _live(alive)
            else:
                one.marker = _whole(root, path)
                if one.marker is None or one.marker.head.name in standing:
                    pass
                elif item.name.endswith(recovery.REPLACED) and one.marker.head.name == name:
                    one.fate, one.why = RESTORE, "its replacement was never committed"
                elif root.leases_on(one.marker.head.attempt):
                    one.fate, one.why = RESTORE, "somebody holds a lease on it"
            yield one


def _whole(root: Root, path: str) -> Marker | None:
    """The marker of something in trash whose removal has not begun."""
    try:
        found = catalog.read_marker(root.files, path)
    except (MarkerError, OSError):
        return None
    return found if not catalog.check_files(root.files, path, found.files) else None


def size_of(files: Files, path: str) -> int:
    """Bytes under ``path`` now, for people: what vanishes meanwhile or cannot be read counts for nothing."""
    total = 0
    try:
        if files.stat(path).kind != "dir":
            return files.stat(path).size
        for relative, item in walk(files, path):
            if item.kind == "file":
                total += files.stat(os.path.join(path, relative)).size
    except OSError:
        return total
    return total
