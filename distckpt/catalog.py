"""What a root holds, and the health of each entry. Reads only.

One gate for everybody: resume, rotation, ``latest``, leases and the command all ask here whether a directory is a
committed checkpoint, so that there is no side door to a half-written one (FIELD_CASES B03).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from distckpt import digest as _digest
from distckpt import marker as _marker
from distckpt import trust
from distckpt.durable import GONE, Files, Opened
from distckpt.errors import ConfigError, MarkerError
from distckpt.layout import HOME, MARKER, POINTER, Layout, Naming, series_of
from distckpt.marker import FileEntry, Head, Marker
from distckpt.ordered import is_listed, walk

DEFAULT_NAMING = "step-{step}"
_RECORD_LIMIT = 1 << 20


@dataclass(frozen=True)
class RootRecord:
    """root.json: made once with the root."""

    run: str
    naming: Naming
    format: int = 1

    def to_bytes(self) -> bytes:
        return json.dumps({"format": self.format, "run": self.run, "naming": self.naming.template}).encode() + b"\n"


@dataclass(frozen=True)
class Entry:
    """One directory whose name is a checkpoint's. ``head`` is None when it is not committed; ``problem`` says why, and
    ``certain`` whether we know that or could not look (S23)."""

    name: str
    step: int
    series: str
    head: Head | None
    problem: str | None = None
    certain: bool = True

    @property
    def committed(self) -> bool:
        return self.head is not None and self.problem is None

    @property
    def order(self) -> tuple[int, int]:
        """Age by commit; adopted ones (seq 0) before every commit, by step."""
        assert self.head is not None
        return self.head.seq, self.step


@dataclass(frozen=True)
class Problem:
    """Why a file is not what the marker says. ``certain`` is positive evidence; otherwise we could not tell (S23), and with
    ``passing`` another look may."""

    path: str
    what: str
    certain: bool = True
    passing: bool = False


def read_record(files: Files, layout: Layout) -> RootRecord | None:
    """root.json, or None when there is none."""
    try:
        data = _read_listed(files, layout.record, _RECORD_LIMIT)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
    try:
        value = json.loads(data)
        number, run, template = value["format"], value["run"], value["naming"]
        if number > 1:
            raise MarkerError(f"{layout.record} has format {number}, newer than this version reads; upgrade distckpt",
                              files={layout.record: "newer format"})
        return RootRecord(str(run), Naming.parse(template), int(number))
    except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
        raise MarkerError(f"{layout.record} is not readable ({error}); restore it, or remove it and start the run with "
                          "run_id= and naming= given: they are then taken from the newest marker",
                          files={layout.record: str(error)}) from error


def _read_listed(files: Files, path: str, limit: int) -> bytes:
    """``files.read``, whose absence counts only when the directory does not list it: NFS remembers absences (see ``is_listed``).
    EIO for what is listed and still not there."""
    try:
        return files.read(path, limit)
    except FileNotFoundError:
        if not is_listed(files, path):
            raise
    try:
        return files.read(path, limit)
    except FileNotFoundError as error:
        raise OSError(errno.EIO, "listed, and not there when it is read: is this host shown an old state of the file system?",
                      path) from error


def scan(files: Files, layout: Layout, naming: Naming) -> list[Entry]:
    """Every entry of the root whose whole name is a checkpoint's, read by its head, newest commit first.

    Empty directories are no checkpoints (S13). Errors of the listing itself are raised: a root that cannot be
    listed is not an empty root (S7).
    """
    found = []
    for item in files.scan(layout.root):
        if item.name in (HOME, POINTER):
            continue
        parsed = series_of(naming, item.name)
        if parsed is None:
            continue
        entry = look(files, layout.root, item.name, item.kind, parsed)
        if entry is not None:
            found.append(entry)
    found.sort(key=lambda e: (e.committed, e.order if e.head else (-1, e.step)), reverse=True)
    return found


def look(files: Files, parent: str, name: str, kind: str, parsed: tuple[str, int]) -> Entry | None:
    """The entry ``name`` under ``parent``; None for an empty directory."""
    series, step = parsed
    path = os.path.join(parent, name)
    if kind != "dir":
        return Entry(name, step, series, None, f"it is a {'symlink' if kind == 'link' else kind}, not a directory")
    try:
        head = _head(files, path, f"{name}/{MARKER}")
    except MarkerError as error:
        return Entry(name, step, series, None, next(iter(error.files.values())))
    except OSError as error:
        if error.errno not in GONE:
            return Entry(name, step, series, None, f"its marker cannot be read: {error.strerror or error}",
                         certain=error.errno in (errno.ELOOP, errno.EINVAL))
        return _unmarked(files, path, name, parsed)
    return Entry(name, step, series, head, identity_problem(head, name, parsed))


def _unmarked(files: Files, path: str, name: str, parsed: tuple[str, int]) -> Entry | None:
    """The entry of a directory in which no marker was found, which counts only when it lists none (S10)."""
    series, step = parsed
    try:
        names = [item.name for item in files.scan(path)]
        if not names:
            return None
        if MARKER in names:
            head = _head(files, path, f"{name}/{MARKER}")
            return Entry(name, step, series, head, identity_problem(head, name, parsed))
    except MarkerError as error:
        return Entry(name, step, series, None, next(iter(error.files.values())))
    except OSError as error:
        if error.errno in GONE and not _stands(files, path):
            return None  # it was taken away between two looks
        return Entry(name, step, series, None, f"its marker cannot be looked for: {error.strerror or error}", certain=False)
    return Entry(name, step, series, None, f"it has files but no {MARKER}: never committed, or not written by distckpt")


def _stands(files: Files, path: str) -> bool:
    try:
        return is_listed(files, path)
    except OSError:
        return True  # cannot tell


def _head(files: Files, directory: str, label: str) -> Head:
    """A head orders and never counts, so its first bytes do; where markers are signed, only the whole one can speak."""
    secret, path = trust.key(), os.path.join(directory, MARKER)
    if secret is None:
        return _marker.parse_head(files.read(path, _marker.HEAD_LIMIT), label)
    return _marker.parse(files.read(path, _marker.SIZE_LIMIT), label, secret).head


def identity_problem(head: Head, name: str, parsed: tuple[str, int]) -> str | None:
    """A marker speaks for one exact name, step and series; a copy under another name is not that checkpoint (S24)."""
    if head.name != name:
        return f"its marker belongs to {head.name!r}, not {name!r} (a renamed or padded copy)"
    if (head.series, head.step) != parsed:
        return f"its marker says step {head.step} of series {head.series!r}"
    return None


def read_marker(files: Files, directory: str) -> Marker:
    """The whole marker of ``directory``: sealed, checked, and signed where a key is set; MarkerError or OSError."""
    path = os.path.join(directory, MARKER)
    return _marker.parse(files.read(path, _marker.SIZE_LIMIT), path, trust.key())


def check_file(files: Files, directory: str, entry: FileEntry, digest: bool = False,
               between: Callable[[int], None] | None = None) -> Problem | None:
    """None when the file is there as the marker says: regular, reached through no link (``directory`` is none either), of its
    size, and with ``digest`` of its bytes."""
    top, below = member_of(directory, entry)
    try:
        seen = files.look(top, below)
        if seen.kind != "file":
            return Problem(entry.path, f"is a {seen.kind}, not a regular file")
        if seen.size != entry.size:
            with files.member(top, below) as file:  # NFS asks for the size again when a file is opened, not before (S23)
                size = file.seek(0, os.SEEK_END)
            if size != entry.size:
                return Problem(entry.path, f"has {size} bytes, the marker says {entry.size}")
        if digest:
            if entry.digest is None:
                return Problem(entry.path, "has no digest in the marker, so its bytes cannot be verified", certain=False)
            with files.member(top, below) as file:
                return differs(file, entry, between)
    except OSError as error:
        if error.errno in GONE or (error.errno == errno.ESTALE and _removed(files, top, below)):
            return Problem(entry.path, "is missing")
        if error.errno == errno.ELOOP:
            return Problem(entry.path, "is reached through a symlink")
        return Problem(entry.path, f"cannot be read: {error.strerror or error}", certain=False,
                       passing=error.errno == errno.ESTALE)
    return None


def _removed(files: Files, top: str, below: str) -> bool:
    """Whether what went stale while it was open (another NFS client's doing) is gone by name as well."""
    try:
        files.look(top, below)
    except OSError as error:
        return error.errno in GONE
    return False


def member_of(directory: str, entry: FileEntry) -> tuple[str, str]:
    """(top, below) of a file for ``Files.look`` and ``Files.member``, by which ``directory`` itself may be no link either."""
    top, name = os.path.split(directory)
    return top, f"{name}/{entry.path}"


def differs(file: Opened, entry: FileEntry, between: Callable[[int], None] | None = None,
            trail: _digest.Trail | None = None) -> Problem | None:
    """None when an open file holds the bytes that ``entry`` has the digest of, and ``trail`` what a second reading needs."""
    assert entry.digest is not None
    algorithm = _digest.algorithm_of(entry.digest)
    if algorithm not in (_digest.XXH3, _digest.SHA256):
        return Problem(entry.path, f"has a digest by {algorithm!r}, which this version does not know; upgrade distckpt",
                       certain=False)
    size, text = _digest.of_open(file, between, algorithm, entry.size, trail)
    if (size, text) != (entry.size, entry.digest):
        return Problem(entry.path, f"has digest {text}, the marker says {entry.digest}")
    return None


def check_files(files: Files, directory: str, entries: Iterable[FileEntry], digest: bool = False) -> list[Problem]:
    found = (check_file(files, directory, entry, digest) for entry in entries)
    return [problem for problem in found if problem is not None]


def linked(files: Files, directory: str, entries: Iterable[FileEntry]) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Of the files that have further names (``dedup="link"``): {(device, inode): (bytes, names here, names in all)}."""
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    for entry in entries:
        try:
            seen = files.look(*member_of(directory, entry))
        except OSError:
            continue  # whoever needs the file says what is wrong with it
        if seen.links > 1:
            here = found.get((seen.device, seen.inode), (0, 0, 0))[1]
            found[seen.device, seen.inode] = seen.size, here + 1, seen.links
    return found


def strangers(files: Files, directory: str, known: Iterable[str]) -> list[str]:
    """Files and links under ``directory`` that ``known`` does not name, the marker aside."""
    names = set(known)
    return [relative for relative, item in walk(files, directory)
            if item.kind != "dir" and relative != MARKER and relative not in names]


def read_json(files: Files, path: str) -> dict[str, Any] | None:
    """A small record of ours; None when it is absent or torn (it is advice, never an authority)."""
    try:
        value = json.loads(files.read(path, _RECORD_LIMIT))
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_pointer(files: Files, layout: Layout) -> str | None:
    """The name in ``latest``: a convenience, never an authority."""
    try:
        text = files.read(layout.pointer, 4096).decode("utf-8", "replace").strip()
    except OSError as error:
        if error.errno in GONE or error.errno in (errno.EINVAL, errno.ELOOP):
            return None  # a directory or a link of that name is somebody else's
        raise
    return text or None


def rejections(files: Files, layout: Layout) -> dict[str, str]:
    """{attempt: reason} of what resume or verify found bad."""
    try:
        items = files.scan(layout.home("rejected"))
    except OSError as error:
        if error.errno in GONE:
            return {}
        raise
    found = {}
    for item in items:
        if item.name.endswith(".json"):
            value = read_json(files, layout.home("rejected", item.name)) or {}
            found[item.name[:-5]] = str(value.get("reason", "rejected earlier"))
    return found
