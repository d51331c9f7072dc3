"""From "every rank acked" to "published", on the committer: the order that the promises rest on.

1. fsync every directory of the tree        a marker must not be durable before the entries it speaks for (S9)
2. write and fsync the marker, fsync its directory      from here the attempt is *committed*: recovery publishes it
3. rename to the final name, fsync both parents         from here it is *published*: readers see it
4. only then the verdict, the pointer and any rotation  (P3; tests/crash/test_strace_order.py)

A failure before 3 first unlinks the marker, durably, and is then *aborted*; if that fails, or a parent's fsync in 3,
nobody can say what the next power cut leaves: *unknown*, never success, and no rotation follows (S3, S12, S14).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from distckpt import marker as _marker
from distckpt import trust
from distckpt.errors import MarkerError, RootInUse
from distckpt.layout import MARKER
from distckpt.marker import Marker
from distckpt.ordered import fsync_tree_dirs, is_listed, move, rmdir_if_there, to_trash, unlink_if_there, write_new
from distckpt.owned import OwnedRoot
from distckpt.patience import NONE, Patience
from distckpt.recovery import REPLACED


@dataclass(frozen=True)
class Outcome:
    """``state`` is "committed", "aborted" or "unknown"; ``error`` is why it is not committed."""

    state: str
    error: Exception | None = None


class _Leased(OSError):
    """What a replace would remove is being read."""


class _Displaced(OSError):
    """A replace stopped half way: the old one is in trash, the new one still in staging."""


def commit(owned: OwnedRoot, found: Marker, *, replace: bool, patience: Patience = NONE) -> Outcome:
    """Commit and publish a staged attempt that every rank acked. The decision is already fixed as ``committing``."""
    return prepare(owned, found, patience) or publish(owned, found, replace=replace)


def prepare(owned: OwnedRoot, found: Marker, patience: Patience) -> Outcome | None:
    """Steps 1 and 2; None when the marker is durable. It has been taken back when it could be, otherwise."""
    staged, files = staging_of(owned, found), owned.files
    try:
        fsync_tree_dirs(patience.over(files), staged)
        write_new(files, os.path.join(staged, MARKER), _marker.build(found, trust.key()))
        files.fsync_dir(staged)
        owned.ownership.check(patience)
    except (OSError, RootInUse) as error:
        return withdraw(owned, staged, error)
    return None


def publish(owned: OwnedRoot, found: Marker, *, replace: bool, decided: bool = False) -> Outcome:
    """Step 3. ``decided``: another domain's rename has decided that it exists; ours is owed then, and its marker stays for the
    next start to roll forward."""
    attempt, name, files = found.head.attempt, found.head.name, owned.files
    staged = staging_of(owned, found)
    try:
        _move(owned, attempt, name, replace)
    except _Displaced as error:
        return doubt(owned, attempt, error)
    except OSError as error:
        if _marker_attempt(owned, owned.layout.final(name)) == attempt:
            pass  # the reply was lost, the rename was not (S14)
        elif not decided and _marker_attempt(owned, staged) == attempt:
            return withdraw(owned, staged, error)
        else:
            return doubt(owned, attempt, error)
    try:
        files.fsync_dir(os.path.dirname(staged))
        files.fsync_dir(owned.layout.root)
    except OSError as error:
        owned.no_rotation = f"the directory of {name} could not be synced ({error})"
        return doubt(owned, attempt, error)
    _clear(owned, attempt, name, replace)
    owned.vouched(found)
    return Outcome("committed")


def staging_of(owned: OwnedRoot, found: Marker) -> str:
    return owned.layout.staging(owned.generation, found.head.attempt, found.head.name)


def _marker_attempt(owned: OwnedRoot, directory: str) -> str | None:
    try:
        if not is_listed(owned.files, directory):
            return None
        return _marker.parse_head(owned.files.read(os.path.join(directory, MARKER), _marker.HEAD_LIMIT)).attempt
    except (OSError, MarkerError):
        return None


def withdraw(owned: OwnedRoot, staged: str, error: Exception) -> Outcome:
    """Take the commit back before anybody hears of it: a marker left behind would be rolled forward at the next start,
    over a tree that is being removed (S3)."""
    try:
        unlink_if_there(owned.files, os.path.join(staged, MARKER))
        owned.files.fsync_dir(staged)
    except OSError as second:
        error.__context__ = second
        return Outcome("unknown", error)
    return Outcome("aborted", error)


def doubt(owned: OwnedRoot, attempt: str, error: Exception) -> Outcome:
    owned.in_doubt[attempt] = f"its outcome is unknown ({error})"
    return Outcome("unknown", error)


def _move(owned: OwnedRoot, attempt: str, name: str, replace: bool) -> None:
    """The publishing rename. A directory never overwrites a non-empty one, so without ``replace`` this cannot destroy
    anything (S13); a replace swaps the two names in one step where the file system can."""
    files = owned.files
    staged, final = owned.layout.staging(owned.generation, attempt, name), owned.layout.final(name)
    if not replace:
        files.rename(staged, final)
        return
    old = _marker_attempt(owned, final)
    if old is None:
        files.rename(staged, final)
        return
    _refuse_leased(owned, old, name, attempt)
    if files.exchange(staged, final):
        try:
            _refuse_leased(owned, old, name, attempt)
        except _Leased:
            files.exchange(staged, final)
            raise
        return
    aside = owned.layout.trash(owned.generation, f"{name}.{old}{REPLACED}")
    try:
        to_trash(files, final, aside)  # a crash from here on: recovery publishes the new one, or puts this one back
        files.rename(staged, final)
    except OSError as error:
        _undo(owned, aside, name, error)
        raise


def _undo(owned: OwnedRoot, aside: str, name: str, error: OSError) -> None:
    """Give the old half of a replace its name back, unless something stands there: then it never went, or the new one
    came after all (S14)."""
    final = owned.layout.final(name)
    if _marker_attempt(owned, final) is not None:
        return
    try:
        move(owned.files, aside, final)
    except OSError as second:
        raise _Displaced(error.errno, f"{error.strerror}; and what stood there could not be put back ({second}): the next save "
                                      "or start tries again", error.filename) from error
    try:
        owned.files.fsync_dir(owned.layout.root)
    except OSError as second:
        owned.no_rotation = f"the directory of {name} could not be synced ({second})"


def _refuse_leased(owned: OwnedRoot, attempt: str, name: str, by: str) -> None:
    holders = owned.watch.holders(attempt)
    if any(live != by for live in owned.linked_by(attempt)):
        holders = [*holders, "another save links its files"]
    if holders:
        raise _Leased(16, f"{name} is in use and cannot be replaced: {'; '.join(holders)}; release the lease or choose another "
                          "step", owned.layout.final(name))


def _clear(owned: OwnedRoot, attempt: str, name: str, replace: bool) -> None:
    """Remove what the publish left: the attempt's empty directory, and the old half of a replace. Not worth an error."""
    files = owned.files
    outer = owned.layout.staging(owned.generation, attempt)
    try:
        if not replace:
            rmdir_if_there(files, outer)
            return
        gone = []
        for item in files.scan(owned.layout.trash(owned.generation)):
            aside = owned.layout.trash(owned.generation, item.name)
            if item.name.endswith(REPLACED) and item.name.removesuffix(REPLACED).rpartition(".")[0] == name:
                gone.append(aside.removesuffix(REPLACED))  # published, so recovery must not put it back any more
                move(files, aside, gone[-1])
        old = _marker_attempt(owned, os.path.join(outer, name))
        if old is not None:
            gone.append(owned.layout.trash(owned.generation, f"{name}.{old}"))
            to_trash(files, os.path.join(outer, name), gone[-1])
        rmdir_if_there(files, outer)
        owned.janitor.delete(gone)
    except OSError as error:
        owned.journal.event("leftover", attempt=attempt, error=str(error))
