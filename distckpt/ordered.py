"""System calls put together, each in the one order that a kill, a cut or a lost reply at any moment leaves whole.

Every call goes through ``Files``, so that a test can fail, kill or reorder each of them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress

from distckpt.beneath import DEPTH
from distckpt.durable import Files, Item, Output
from distckpt.patience import NONE, PASSING, Patience


def write_new(files: Files, path: str, data: bytes) -> None:
    """A new file with these bytes, durable once its directory is synced. On error the partial file is left to the sweep."""
    _fill(files, files.open(path), path, data)


def _fill(files: Files, out: Output, path: str, data: bytes) -> None:
    """The disk's word is not taken for it: a marker of another size than was written is none, and may replace a good one."""
    try:
        out.write(data)
        out.fsync()
    finally:
        out.close()
    size = files.stat(path).size
    if size != len(data):
        raise OSError(errno.EIO, f"{len(data)} bytes were written and {size} are on disk", path)


def is_listed(files: Files, path: str) -> bool:
    """Whether ``path`` is there, asked of its directory: NFS remembers for half a minute that a name was absent, and a fresh
    listing ends that."""
    return any(item.name == os.path.basename(path) for item in files.scan(os.path.dirname(path)))


def move(files: Files, source: str, target: str) -> None:
    """Rename to a name that nobody else gives.

    A server that was started again may have done it and lost the reply; NFS asks again, finds no source, and calls it an
    error. Then the new name is there, and that is what was wanted (S14). Where another could stand under ``target``, the
    caller must look at what stands there instead.
    """
    try:
        files.rename(source, target)
    except FileNotFoundError:
        if not is_listed(files, target):
            raise


def replace(files: Files, path: str, data: bytes, temporary: str) -> None:
    """Put ``data`` under ``path`` in one step, durably: a reader sees the old bytes or the new, after a crash too."""
    unlink_if_there(files, temporary)
    write_new(files, temporary, data)
    try:
        files.rename(temporary, path)
    except FileNotFoundError:  # or it was done, and the reply was lost (see ``move``)
        if not is_listed(files, path) or files.read(path, len(data) + 1) != data:
            raise
    files.fsync_dir(os.path.dirname(path))


def create_exclusively(files: Files, path: str, data: bytes, temporary: str) -> None:
    """A new file that appears whole or not at all; FileExistsError if somebody else made it. The caller syncs the directory.

    A kill between open and write would leave an empty record that nobody can judge, so the bytes come first and the
    name second; where there are no hard links, O_EXCL on the name itself decides.
    """
    unlink_if_there(files, temporary)
    write_new(files, temporary, data)
    try:
        if not files.link(temporary, path):
            out = files.open(path)
            try:
                _fill(files, out, path, data)
            except OSError:
                with suppress(OSError):
                    files.unlink(path)  # ours, and perhaps torn: it would speak for a claim that failed
                raise
    finally:
        with suppress(OSError):  # a temporary that stays is no reason to give up what was created
            unlink_if_there(files, temporary)


def make_dir(files: Files, path: str, patience: Patience = NONE) -> bool:
    """A directory at ``path``; False if one was there. Its parent is not synced here.

    Right for a name that nobody else gives, too: after a lost reply NFS says that it exists (see ``move``). Where another host
    may have made it, ``mkdir`` hears so from the server, and what this host remembers may still say otherwise.
    """
    try:
        files.mkdir(path)
    except FileExistsError as error:
        for _ in patience.looks():
            problem = _no_dir(files, path)
            if problem is None:
                return False
        if not patience.seconds:
            raise problem if isinstance(problem, OSError) else error from None
        raise OSError(errno.EEXIST, f"another host made it, and {patience.seconds:.0f} s later this one does not see a directory "
                                    f"there ({problem}): does its mount cache attributes for longer (actimeo, acdirmax)?",
                      path) from error
    return True


def _no_dir(files: Files, path: str) -> OSError | str | None:
    """Why ``path`` is no directory as this host sees it; None when it is one."""
    try:
        kind = files.stat(path).kind
        return None if kind == "dir" else f"it is a {kind}"
    except OSError as error:
        if error.errno not in PASSING:
            raise
        files.scan(os.path.dirname(path))  # a fresh listing ends a remembered absence
        return error


def unlink_if_there(files: Files, path: str) -> None:
    try:
        files.unlink(path)
    except FileNotFoundError:
        return


def rmdir_if_there(files: Files, path: str) -> None:
    try:
        files.rmdir(path)
    except FileNotFoundError:
        return


def walk(files: Files, top: str, below: str = "") -> Iterator[tuple[str, Item]]:
    """Every entry under ``top``, parents before children, as (path relative to ``top`` with ``/``, item)."""
    if below.count("/") >= DEPTH:
        raise OSError(errno.ELOOP, f"directories are nested more than {DEPTH} deep", os.path.join(top, below))
    for item in files.scan(os.path.join(top, below) if below else top):
        relative = f"{below}/{item.name}" if below else item.name
        yield relative, item
        if item.kind == "dir":
            yield from walk(files, top, relative)


def fsync_tree_dirs(files: Files, top: str) -> None:
    """Make every entry below ``top`` durable, children before parents, ``top`` last (S9)."""
    below = [relative for relative, item in walk(files, top) if item.kind == "dir"]
    for relative in reversed(below):
        files.fsync_dir(os.path.join(top, relative))
    files.fsync_dir(top)


def to_trash(files: Files, source: str, target: str) -> None:
    """Take ``source`` out of sight by one rename, durably on both sides, so that no unlink is durable before it (S21)."""
    move(files, source, target)
    files.fsync_dir(os.path.dirname(target))
    files.fsync_dir(os.path.dirname(source))
