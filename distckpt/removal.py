"""Removing what stands in trash: below a descriptor of the root, never through a link, never across a mount point.

The marker goes first, by *name*: a writer that was taken over while it stood still must get ENOENT here, because the new
owner may have given the checkpoint back its place (S5). What follows holds the directories open, so that nobody who swaps
one for a link can lead it elsewhere; that is safe for the fence too, since a tree without its marker is never published
or put back again (tests/unit/test_security.py).
"""

from __future__ import annotations

import errno
import os
from functools import partial

from distckpt.beneath import DEPTH
from distckpt.durable import Files, Folder, Item
from distckpt.runtime import Runtime
from distckpt.together import together

_NO_FOLDER = (errno.ENOTDIR, errno.ELOOP)
_VANISHED = (errno.ENOENT, errno.ESTALE)
"""Somebody else removed it. Should the mount itself be stale, ``rmdir`` of what holds it says so."""

_THREADS = 4
"""At most, and no more than there are cores: a file system frees the space of several files at once, but each call waits until
its own is free. Eight are no faster on a local disk, and more than the cores stall the training loop (README, "How fast, and
why")."""


def remove_tree(files: Files, root: str, path: str, runtime: Runtime | None = None) -> None:
    """Remove ``path``, which stands somewhere below ``root``; links are removed and never followed. What vanished meanwhile is
    no error. EXDEV at a directory on which something is mounted: what is mounted there stays, and so does the way to it.
    With ``runtime`` its threads help where there is much to remove."""
    parent, name = os.path.split(os.path.relpath(path, root))
    try:
        with files.folder(root, parent) as folder:
            _remove(folder, name, 0, runtime)
    except FileNotFoundError:
        return


def _remove(parent: Folder, name: str, depth: int, runtime: Runtime | None) -> None:
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
        if runtime is None or len(items) < _THREADS:
            for item in items:
                _remove_item(folder, depth, runtime, item)
        else:  # all of them have ended when this does: a thread that unlinked below a closed descriptor could hit anything
            together(runtime, partial(_remove_item, folder, depth, None), items, min(_THREADS, runtime.cores()))
    parent.rmdir(name)


def _remove_item(folder: Folder, depth: int, runtime: Runtime | None, item: Item) -> None:
    try:
        if item.kind == "dir":
            _remove(folder, item.name, depth + 1, runtime)
        else:
            _unlink(folder, item.name)
    except OSError as error:
        if error.errno not in _VANISHED:
            raise


def _unlink(folder: Folder, name: str) -> None:
    try:
        folder.unlink(name)
    except OSError as error:
        if error.errno not in _VANISHED:
            raise


def unlink_markers(files: Files, root: str, path: str, marker: str) -> None:
    """Make sure that no marker speaks for what is about to go: ``path`` itself, or the directory inside it (S3).

    By name, so each place is opened just before, below ``root`` and through no link: ELOOP for one that became a link. In the
    instant between the two, who may write in our trash can still lead one unlink of a ``commit.json`` elsewhere.
    """
    places = [path] + [os.path.join(path, item.name) for item in files.scan(path) if item.kind == "dir"]
    for place in places:
        try:
            with files.folder(root, os.path.relpath(place, root)):
                files.unlink(os.path.join(place, marker))
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            continue  # something is mounted there, which stays, as ``remove_tree`` says
        files.fsync_dir(place)


def discard(files: Files, root: str, path: str, marker: str, runtime: Runtime | None = None) -> None:
    """Delete something that stands in trash below ``root``: the marker first, durably, then the rest (S3), in any order."""
    try:
        if files.look(root, os.path.relpath(path, root)).kind == "dir":
            unlink_markers(files, root, path, marker)
    except FileNotFoundError:
        return
    remove_tree(files, root, path, runtime)
