"""The order of the system calls of real saves, as the kernel saw them: the seam itself is not trusted here.

For each save: data synced, then the directories, then the marker written, synced, and its directory; then the rename (or
exchange) to the final name, then both parents; only then the first rename into trash, and the first unlink there only
after its parents. "Then" means that the one had returned before the other was called, whichever rank or thread did it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from distckpt.testing.trace import RENAMES, SYNCS, UNLINKS, WRITES, Call, capture, program, read
from tests.crash.traced import STEPS

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 240


@dataclass
class Save:
    """The events of one attempt, told apart by its staging directory."""

    staged: str
    final: str
    events: list[Call]

    @property
    def outer(self) -> str:
        return os.path.dirname(self.staged)

    def of(self, calls: Iterable[str], where: Callable[[str], bool]) -> list[Call]:
        wanted = set(calls)
        return [e for e in self.events if e.call in wanted and where(e.path)]


def saves(events: list[Call], root: str) -> list[Save]:
    """Each attempt that got its final name, in order. Its events: everything in the root until the next one's begin."""
    found = []
    for event in events:
        match = re.fullmatch(re.escape(root) + r"/\.distckpt/staging/\d+/[0-9a-f]{16}/(step-\d+)", event.path)
        if match and event.call in RENAMES and event.other == f"{root}/{match.group(1)}":
            found.append(Save(event.path, event.other, events))
    return found


def _one(events: list[Call], what: str) -> Call:
    assert len(events) == 1, f"{len(events)} times: {what}"
    return events[0]


def check(save: Save, root: str, ranks: int) -> dict[str, int]:
    """AssertionError when one of the orders of this module's docstring is not kept; how many events each part had."""
    def inside(path: str) -> bool:
        return path.startswith(save.staged + "/")

    marker_path = f"{save.staged}/commit.json"
    data = sorted({e.path for e in save.of(("open", "openat", "creat"), inside)
                   if "O_CREAT" in e.flags and e.path != marker_path})
    moved = {e.path: e.other for e in save.of(RENAMES, inside)}  # safetensors writes beside and renames
    opened = _one([e for e in save.of(("open", "openat"), lambda p: p == marker_path) if "O_CREAT" in e.flags], "marker")
    written = save.of(WRITES, lambda p: p == marker_path)
    synced = _one(save.of(SYNCS, lambda p: p == marker_path), "fsync of the marker")
    published = _one([e for e in save.of(RENAMES, lambda p: p == save.staged) if e.other == save.final], "publishing rename")

    # data, by whoever wrote it
    assert data and len({e.pid for e in save.of(WRITES, lambda p: p in data)}) == ranks
    ends = []
    for path in data:
        name = moved.get(path, path)
        changes = save.of(WRITES, lambda p, path=path: p == path) + [e for e in save.of(RENAMES, inside) if e.path == path]
        assert not [e for e in save.events if e.call == "mmap" and e.path in (path, name) and "MAP_SHARED" in e.flags
                    and "PROT_WRITE" in e.flags], f"{path} is written through memory, where this cannot see it"
        if path not in moved and path in moved.values() and not changes:
            continue  # an empty file that the rename replaces
        after = [e for e in save.of(SYNCS, lambda p, name=name: p == name) if all(c.before(e) for c in changes)]
        assert after, f"{name} is not synced after its last change"
        ends.append(after[0])
    for event in ends:
        assert event.before(opened), f"{event.path} is synced after the marker was begun"

    # directories, children before the marker
    folders = {save.staged, *(e.path for e in save.of(("mkdir", "mkdirat"), inside))}
    for folder in folders:
        entries = [e for e in save.of(("open", "openat", "mkdir", "mkdirat"), lambda p, f=folder: os.path.dirname(p) == f)
                   if e.before(opened) and ("mkdir" in e.call or "O_CREAT" in e.flags)]
        entries += [e for e in save.of(RENAMES, inside) if os.path.dirname(e.other) == folder]
        after = [e for e in save.of(SYNCS, lambda p, f=folder: p == f)
                 if all(c.before(e) for c in entries) and e.before(opened)]
        assert after, f"the entries of {folder} are not synced before the marker"

    # the marker, then its name in the directory
    assert written and all(opened.before(w) and w.before(synced) for w in written), "the marker is not synced"
    named = [e for e in save.of(SYNCS, lambda p: p == save.staged) if synced.before(e) and e.before(published)]
    assert named, "the marker's name is not synced before the rename"

    # both parents, then rotation
    parents = []
    for parent in (save.outer, root):
        after = [e for e in save.of(SYNCS, lambda p, parent=parent: p == parent) if published.before(e)]
        assert after, f"{parent} is not synced after the rename"
        parents.append(after[0])
    for pointer in save.of(RENAMES, lambda p: p.endswith("/latest.tmp")):
        assert pointer.begin < published.begin or all(p.before(pointer) for p in parents), "'latest' moves too early"
    trash = f"{root}/.distckpt/trash/"
    gone = [e for e in save.of(RENAMES, lambda p: not p.startswith(trash))
            if e.other.startswith(trash) and published.end < e.begin]
    for event in gone:
        assert all(p.before(event) for p in parents), f"{event.path} moves to trash before {save.final} is durable"
    unlinked = 0
    for event in gone:
        leaving = save.of(UNLINKS, lambda p, e=event: p == e.other or p.startswith(e.other + "/"))
        for parent in (os.path.dirname(event.other), os.path.dirname(event.path)):
            after = [e for e in save.of(SYNCS, lambda p, parent=parent: p == parent) if event.before(e)]
            assert after and all(after[0].before(u) for u in leaving), f"{event.other} loses files before {parent} is synced"
        unlinked += len(leaving)
        if leaving:  # S3: the marker is the first to go, durably
            assert leaving[0].path == f"{event.other}/commit.json", f"{leaving[0].path} goes before the marker"
            after = [e for e in save.of(SYNCS, lambda p, e=event: p == e.other) if leaving[0].before(e)]
            assert after and all(after[0].before(u) for u in leaving[1:]), f"{event.other}: the marker's unlink is not synced"
    late = [e for e in save.of(WRITES, inside) if opened.begin < e.begin and e.path != marker_path]
    assert not late, f"{late[0].path} is written to after the marker was begun"
    return {"files": len(ends), "folders": len(folders), "gone": len(gone), "unlinked": unlinked}


def check_all(events: list[Call], root: str, ranks: int) -> None:
    found = saves(events, root)
    assert [os.path.basename(save.final) for save in found] == [f"step-{step}" for step in STEPS]
    counts = [check(save, root, ranks) for save in found]
    assert [count["files"] for count in counts] == [2 * ranks, ranks, 2 * ranks, 2 * ranks], counts
    assert [count["folders"] for count in counts] == [3, 5, 3, 3], counts
    assert counts[2]["gone"] and counts[3]["gone"] and counts[2]["unlinked"] > 4, counts
    assert "RENAME_EXCHANGE" in next(e.flags for e in events if e.path == found[3].staged and e.call == "renameat2")


def trace(folder: Path, ranks: int) -> tuple[list[Call], str]:
    """The events of ``tests.crash.traced`` under the root of the trace."""
    root, out = str(folder / "root"), folder / "trace"
    done = capture([program(sys.executable), "-m", "tests.crash.traced", root, str(ranks)], out, data=False, limit=LIMIT,
                   cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
                                        "RES_OPTIONS": "attempts:0"})
    assert done.returncode == 0, done.stderr[-3000:]
    pids = {int(line) for line in done.stdout.split()}
    events = [e for e in read(out, REPOSITORY)
              if root in (e.path, e.other) or f"{root}/" in e.path or f"{root}/" in e.other]
    assert len(pids) == ranks
    return events, root


pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_system_calls_of_real_saves_come_in_the_order_that_the_promises_rest_on(tmp_path: Path, ranks: int) -> None:
    events, root = trace(tmp_path, ranks)
    check_all(events, root, ranks)
    for name, mutant in MUTANTS.items():  # the same trace with a call left out or moved: the check must see it
        changed = mutant(events, saves(events, root)[2], root)
        assert changed != events, f"the mutant {name!r} changes nothing"
        with pytest.raises(AssertionError):
            check_all(changed, root, ranks)


# -- mutants of the trace: what it would have been, had the code left a call out, or made it elsewhere -------------------

def _without(events: list[Call], gone: Callable[[Call], bool]) -> list[Call]:
    return [e for e in events if not gone(e)]


def _moved(events: list[Call], which: Callable[[Call], bool], at: int) -> list[Call]:
    """Those events happen just after line ``at``, between it and the next."""
    return [replace(e, begin=at, end=at) if which(e) else e for e in events]


def _published(save: Save) -> Call:
    return next(e for e in save.events if e.call in RENAMES and e.path == save.staged)


def _opened(save: Save) -> Call:
    return next(e for e in save.events if e.path == f"{save.staged}/commit.json" and "O_CREAT" in e.flags)


def _into_trash(save: Save) -> Call:
    published = _published(save)
    return next(e for e in save.events if e.call in RENAMES and "/trash/" in e.other and e.begin > published.end)


MUTANTS: dict[str, Callable[[list[Call], Save, str], list[Call]]] = {
    "no fsync of the data": lambda events, save, root: _without(
        events, lambda e: e.call in SYNCS and "/there/" in e.path and e.path.startswith(save.staged)),
    "no fsync of one rank's data": lambda events, save, root: _without(
        events, lambda e: e.call in SYNCS and "here/shard.rank-00000" in e.path and e.path.startswith(save.staged)),
    "no fsync of a sub-directory": lambda events, save, root: _without(
        events, lambda e: e.call in SYNCS and e.path == f"{save.staged}/here"),
    "the directories after the marker": lambda events, save, root: _moved(
        events, lambda e: e.call in SYNCS and e.path == f"{save.staged}/there", _opened(save).end + 1),
    "no fsync of the marker": lambda events, save, root: _without(
        events, lambda e: e.call in SYNCS and e.path == f"{save.staged}/commit.json"),
    "the marker's fsync after the rename": lambda events, save, root: _moved(
        events, lambda e: e.call in SYNCS and e.path == f"{save.staged}/commit.json", _published(save).end + 1),
    "no fsync of the marker's name": lambda events, save, root: _without(
        events, lambda e: e.call in SYNCS and e.path == save.staged and e.begin > _opened(save).end),
    "no fsync of the root": lambda events, save, root: _without(
        events, lambda e: e.call in SYNCS and e.path == root and e.begin > _published(save).end),
    "no fsync of the attempt's directory": lambda events, save, root: _without(
        events, lambda e: e.call in SYNCS and e.path == save.outer and e.begin > _published(save).end),
    "rotation before the root's fsync": lambda events, save, root: _moved(
        events, lambda e: e is _into_trash(save), _published(save).end + 1),
    "the pointer before the root's fsync": lambda events, save, root: _moved(
        events, lambda e: e.other == f"{root}/latest", _published(save).end + 1),
    "unlinks before the trash's fsync": lambda events, save, root: _moved(
        events, lambda e: e.call in UNLINKS and e.path.startswith(_into_trash(save).other), _into_trash(save).end + 1),
    "another file before the marker": lambda events, save, root: _moved(
        events, lambda e: e.call in UNLINKS and e.path == f"{_into_trash(save).other}/commit.json",
        max(e.end for e in events) + 1),
    "data written after the marker": lambda events, save, root: [
        *events, replace(_opened(save), call="write", path=f"{save.staged}/here/late", begin=_opened(save).end + 1,
                         end=_opened(save).end + 1)],
}
