"""After a takeover: publish what was committed, sweep the rest.

Everything older generations left was moved into this generation's staging and trash by the claim, so recovery reads
two directories and no zombie can change them. It ends before the first begin (S11).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, field

from distckpt import catalog, trust
from distckpt import marker as _marker
from distckpt.catalog import Problem
from distckpt.durable import GONE, TAKEN, Files
from distckpt.errors import MarkerError
from distckpt.layout import ATTEMPT, MARKER, Layout, Naming, series_of
from distckpt.marker import Marker
from distckpt.ordered import fsync_tree_dirs, is_listed, move, replace, to_trash, unlink_if_there
from distckpt.removal import discard

log = logging.getLogger(__name__)

REPLACED = ".replaced"


@dataclass
class Report:
    """What recovery did."""

    published: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def inside(files: Files, directory: str) -> list[str]:
    """Names of the directories in an attempt's directory (its final name, and nothing else)."""
    try:
        return [item.name for item in files.scan(directory) if item.kind == "dir"]
    except OSError as error:
        if error.errno in GONE:
            return []
        raise


def recover(files: Files, layout: Layout, naming: Naming, generation: int, decided: Collection[str] | None = None) -> Report:
    """Roll committed attempts forward, move every other leftover to trash. OSError when the disk does not play along.

    A staged share of a checkpoint on several domains is committed only if another domain published its own: that is what
    ``decided`` says. Without it, nobody here can tell, and the share is neither published nor swept (S1).
    """
    report = Report()
    committed = []
    for item in files.scan(layout.staging(generation)):
        path = layout.staging(generation, item.name)
        if item.kind != "dir":
            unlink_if_there(files, path)
            continue
        files.fsync_dir(path)  # an exchange may be seen and not be durable: what is swept as the old half must stay it (S2)
        found = _committed(files, layout, naming, path, item.name) if ATTEMPT.fullmatch(item.name) else None
        if found is not None and found.head.of > 1 and decided is None:
            report.left.append(item.name)
            continue
        if found is not None and found.head.of > 1 and decided is not None and item.name not in decided:
            # presumed abort; without its marker first, it cannot be taken for a trace of a checkpoint (S3, S7)
            unlink_if_there(files, os.path.join(path, found.head.name, MARKER))
            files.fsync_dir(os.path.join(path, found.head.name))
            found = None
        if found is None:
            _sweep(files, layout, generation, item.name, report)
        else:
            committed.append((found.head.seq, item.name, found))
    for _, attempt, found in sorted(committed, key=lambda c: c[0]):
        if _roll_forward(files, layout, naming, generation, attempt, found):
            report.published.append(found.head.name)
        _sweep(files, layout, generation, attempt, report)
    put_back(files, layout, generation, report)
    for name in report.published:
        log.info("recovery published %s of %s: it was committed and not yet published", name, layout.root)
    return report


def _committed(files: Files, layout: Layout, naming: Naming, path: str, attempt: str) -> Marker | None:
    """The marker of a staged attempt that is whole and speaks for exactly this attempt and name, else None.

    After a crash between the exchange of a replace and its clean-up, staging holds the *old* half under a valid
    marker of another attempt: it must not be swapped back (S2). And a marker alone is not enough: a removal that was
    killed half way may have left it over a partial tree, so every file must be there with its size (S3).
    """
    for name in inside(files, path):
        directory = os.path.join(path, name)
        parsed = series_of(naming, name)
        if parsed is None:
            continue
        try:
            found = catalog.read_marker(files, directory)
        except MarkerError as error:
            log.warning("an attempt at %s is swept: %s", name, error)
            continue
        except OSError as error:
            if error.errno not in GONE:
                raise
            continue
        if found.head.attempt != attempt or catalog.identity_problem(found.head, name, parsed):
            continue
        problems = _problems(files, directory, found)
        if problems:
            log.warning("an attempt at %s is swept: %s %s", name, problems[0].path, problems[0].what)
            continue
        return found
    return None


def _problems(files: Files, directory: str, found: Marker) -> list[Problem]:
    """What is wrong with an attempt, by positive evidence. OSError when that cannot be told: what is swept is deleted,
    and an unreadable disk is no reason to delete a commit (S23)."""
    problems = catalog.check_files(files, directory, found.files)
    for problem in problems:
        if not problem.certain:
            raise OSError(errno.EIO, f"cannot tell whether this attempt is whole: it {problem.what}",
                          os.path.join(directory, problem.path))
    return problems


def _roll_forward(files: Files, layout: Layout, naming: Naming, generation: int, attempt: str, found: Marker) -> bool:
    """Publish a committed attempt. False when something newer is published already."""
    entries = catalog.scan(files, layout, naming)
    for entry in entries:
        if not entry.certain:  # it may be the newer one, and what it is exchanged for would be swept
            raise OSError(errno.EIO, f"cannot tell whether it is newer than the staged {found.head.name}: {entry.problem}",
                          layout.final(entry.name))
    newest = max((e.head.seq for e in entries if e.head is not None), default=0)
    if found.head.seq <= newest:
        return False  # rolling an old attempt over a newer commit would undo it (S11)
    directory = layout.staging(generation, attempt, found.head.name)
    settle(files, directory, found)
    publish(files, layout, generation, attempt, found.head.name)
    return True


def settle(files: Files, directory: str, found: Marker) -> None:
    """Make an inherited commit durable in fact.

    Its marker may have been read from the page cache after its fsync failed, and be gone at the next cut (S8): it is
    written anew as another file and renamed over, after every file and directory of the tree was synced.
    """
    for entry in found.files:
        files.fsync(os.path.join(directory, entry.path))
    replace(files, os.path.join(directory, MARKER), _marker.build(found, trust.key()), os.path.join(directory, MARKER + ".again"))
    fsync_tree_dirs(files, directory)


def publish(files: Files, layout: Layout, generation: int, attempt: str, name: str) -> None:
    """Give a committed attempt its final name, durably. What stood there moves to trash, or swaps places first."""
    staged, final = layout.staging(generation, attempt, name), layout.final(name)
    try:
        files.rename(staged, final)
    except OSError as error:
        if error.errno == errno.ENOENT:
            _settle_lost(files, final, attempt, error)
        elif error.errno not in TAKEN:
            raise
        elif not files.exchange(staged, final):
            old = layout.trash(generation, f"{name}.{attempt}{REPLACED}")
            to_trash(files, final, old)
            move(files, staged, final)
    files.fsync_dir(os.path.dirname(staged))
    files.fsync_dir(layout.root)


def _settle_lost(files: Files, final: str, attempt: str, error: OSError) -> None:
    """The publishing rename found nothing to rename: it was done if ours stands there, and only its reply was lost (S14)."""
    try:
        if is_listed(files, final) and catalog.read_marker(files, final).head.attempt == attempt:
            return
    except MarkerError:
        pass
    raise error


def _sweep(files: Files, layout: Layout, generation: int, name: str, report: Report) -> None:
    target = layout.trash(generation, name)
    if os.path.basename(name) in [item.name for item in files.scan(layout.trash(generation))]:
        target += ".again"
        discard(files, layout.root, target, MARKER)
    to_trash(files, layout.staging(generation, name), target)
    report.swept.append(name)


def put_back(files: Files, layout: Layout, generation: int, report: Report) -> None:
    """Undo the first half of a replace whose second half never became committed: the old one is all there is."""
    for item in files.scan(layout.trash(generation)):
        if not item.name.endswith(REPLACED):
            continue
        name = item.name[:-len(REPLACED)].rpartition(".")[0]
        old = layout.trash(generation, item.name)
        try:
            found = catalog.read_marker(files, old)
        except MarkerError:
            continue
        except OSError as error:
            if error.errno not in GONE:
                raise
            continue  # its removal had begun, so the new one was published before
        standing = {i.name for i in files.scan(layout.root)}
        if name in standing or found.head.name != name or _problems(files, old, found):
            continue
        move(files, old, layout.final(name))
        files.fsync_dir(layout.root)
        files.fsync_dir(layout.trash(generation))
        report.restored.append(name)
        log.info("recovery put %s back: a replacement of it was never committed", name)
