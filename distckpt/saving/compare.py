"""Whether what stands in staging is exactly what the ranks acked."""

from __future__ import annotations

from collections.abc import Mapping

from distckpt.durable import Files
from distckpt.layout import MARKER, member_path_problem
from distckpt.marker import FileEntry
from distckpt.ordered import walk
from distckpt.saving.terms import both_wrote


def compare(files: Files, staged: str, acked: Mapping[int, list[FileEntry]], hosts: Mapping[int, str],
            by: int = 0, empty: bool = False) -> tuple[list[str], tuple[int, str] | None]:
    """(files on disk that nobody acked, (rank, complaint) if the acks are not what stands there). ``by``: the rank that looks.
    ``empty``: there may be none, as where only other domains' ranks wrote.

    The union of the acks must be exactly the listing: two ranks on one path, an acked file that the committer does not
    see, a size that differs, a symlink - each ends the attempt.
    """
    owner: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for rank, entries in acked.items():
        for entry in entries:
            if entry.path in owner:
                return [], (rank, both_wrote(entry.path, owner[entry.path], rank))
            owner[entry.path], sizes[entry.path] = rank, entry.size
    unclaimed, seen = [], set()
    for path, item in walk(files, staged):
        if item.kind == "dir":
            continue
        rank = owner.get(path, by)
        if item.kind != "file":
            return [], (rank, f"{path!r} is a {item.kind}, not a regular file")
        problem = "it is the marker's name" if path == MARKER else member_path_problem(path)
        if problem:
            return [], (rank, f"a writer left a file {path!r}, which cannot stand in a checkpoint: {problem}")
        seen.add(path)
        if path not in owner:
            unclaimed.append(path)
            continue
        size = files.stat(f"{staged}/{path}").size
        if size != sizes[path]:
            return [], (rank, f"{path!r} has {size} bytes on rank {by}'s host and {sizes[path]} where it was written")
    for path in sorted(set(owner) - seen):
        return [], (owner[path], f"{path!r} was written on {hosts[owner[path]]} and is not seen by rank {by}: is the "
                                 "root on storage that all hosts share?")
    if not seen and not empty:
        return [], (by, "no rank wrote anything; an empty checkpoint is not one")
    return unclaimed, None
