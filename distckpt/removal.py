"""Removing what stands in trash: below a descriptor of the root, never through a link, never across a mount point.

The marker goes first, by *name*: a writer that was taken over while it stood still must get ENOENT here, because the new
owner may have given the checkpoint back its place (S5). What follows holds the directories open, so that nobody who swaps
one for a link can lead it elsewhere; that is safe for the fence too, since a tree without its marker is never published
or put back again (tests/unit/test_security.py).
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from functools import partial

from distckpt.beneath import DEPTH
from distckpt.durable import Files, Folder, Item
from distckpt.runtime import Thread

_NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)
_VANISHED = (errno.ENOENT, errno.ESTALE)
"""Somebody else removed it. Should the mount itself be stale, ``rmdir`` of what holds it says so."""

_HELPERS = 7
_MANY = 8
_SHARES = 64

Job = Callable[[], None]
Spawn = Callable[[Job], Thread]
"""Starts a thread. A file system frees the space of several files at once, but each call waits until its own is free."""


def remove_tree(files: Files, root: str, path: str, spawn: Spawn | None = None) -> None:
    """Remove ``path``, which stands somewhere below ``root``; links are removed and never followed. What vanished meanwhile is
    no error. EXDEV at a directory on which something is mounted: what is mounted there stays, and so does the way to it.
    With ``spawn`` threads help where there is much to remove."""
    parent, name = os.path.split(os.path.relpath(path, root))
    try:
        with files.folder(root, parent) as folder:
            _remove(folder, name, 0, spawn)
    except FileNotFoundError:
        return


def _remove(parent: Folder, name: str, depth: int, spawn: Spawn | None) -> None:
    if depth > DEPTH:
        raise OSError(errno.ELOOP, f"directories are nested more than {DEPTH} deep", os.path.join(parent.path, name))
    try:
        folder = parent.folder(name)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise OSError(errno.EXDEV, "something is mounted there, and nothing on another mount is deleted: unmount it",
                          os.path.join(parent.path, name)) from error
        if error.errno not in _NO_FOLDER:
            raise
        _unlink(parent, name)
        return
    with folder:
        items = folder.scan()
        if spawn is None or len(items) < _MANY:
            _empty(folder, items, depth, spawn)
        else:
            share = -(-len(items) // _SHARES)
            _together([partial(_empty, folder, items[i:i + share], depth, None) for i in range(0, len(items), share)], spawn)
    parent.rmdir(name)


def _empty(folder: Folder, items: list[Item], depth: int, spawn: Spawn | None) -> None:
    for item in items:
        try:
            if item.kind == "dir":
                _remove(folder, item.name, depth + 1, spawn)
            else:
                _unlink(folder, item.name)
        except OSError as error:
            if error.errno not in _VANISHED:
                raise


def _together(jobs: list[Job], spawn: Spawn) -> None:
    """Do them all, on this thread and on others, and raise what one of them raised when all have ended. Threads that never run
    take nothing away: this one goes on until nothing is left."""
    queue, errors = deque(jobs), list[BaseException]()

    def work() -> None:
        while queue and not errors:
            try:
                job = queue.popleft()
            except IndexError:
                return  # another thread was quicker
            try:
                job()
            except BaseException as error:  # whatever it is, the thread that waits for all of them raises it
                errors.append(error)

    helpers = [spawn(work) for _ in range(min(_HELPERS, len(jobs) - 1))]
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def _unlink(folder: Folder, name: str) -> None:
    try:
        folder.unlink(name)
    except OSError as error:
        if error.errno not in _VANISHED:
            raise


def unlink_markers(files: Files, path: str, marker: str) -> None:
    """Make sure that no marker speaks for what is about to go: ``path`` itself, or the directory inside it (S3)."""
    places = [path] + [os.path.join(path, item.name) for item in files.scan(path) if item.kind == "dir"]
    for place in places:
        try:
            files.unlink(os.path.join(place, marker))
        except FileNotFoundError:
            continue
        files.fsync_dir(place)


def discard(files: Files, root: str, path: str, marker: str, spawn: Spawn | None = None) -> None:
    """Delete something that stands in trash below ``root``: the marker first, durably, then the rest (S3), in any order."""
    try:
        if files.look(root, os.path.relpath(path, root)).kind == "dir":
            unlink_markers(files, path, marker)
    except FileNotFoundError:
        return
    remove_tree(files, root, path, spawn)
