"""Whether what stands in staging is exactly what the ranks acked."""

from __future__ import annotations

import os
from collections.abc import Mapping

from distckpt.durable import Files
from distckpt.layout import MARKER, member_path_problem
from distckpt.marker import FileEntry
from distckpt.ordered import walk
from distckpt.patience import PASSING, Patience
from distckpt.saving.terms import both_wrote

Complaint = tuple[int, str] | None


def compare(files: Files, staged: str, acked: Mapping[int, list[FileEntry]], hosts: Mapping[int, str], patience: Patience,
            by: int = 0, empty: bool = False) -> tuple[list[str], Complaint]:
    """(files on disk that nobody acked, (rank, complaint) if the acks are not what stands there). ``by``: the rank that looks.
    ``empty``: there may be none, as where only other domains' ranks wrote.

    The union of the acks must be exactly the listing: two ranks on one path, an acked file that the committer does not see, a
    size that differs, a symlink - each ends the attempt. What another host wrote may be late here: what its ranks say of it
    counts, until this one has looked for as long as ``patience`` says.
    """
    owner: dict[str, FileEntry] = {}
    for rank, entries in acked.items():
        for entry in entries:
            if entry.path in owner:
                return [], (rank, both_wrote(entry.path, owner[entry.path].rank, rank))
            owner[entry.path] = entry
    for _ in patience.looks():
        unclaimed, complaint, final = _one_look(files, staged, owner, hosts, by, empty)
        if final:
            return unclaimed, complaint
    if complaint is not None and patience.seconds:
        complaint = complaint[0], f"{complaint[1]} Seen so for {patience.seconds:.0f} s after all ranks had written"
    return unclaimed, complaint


def _one_look(files: Files, staged: str, owner: Mapping[str, FileEntry], hosts: Mapping[int, str], by: int,
              empty: bool) -> tuple[list[str], Complaint, bool]:
    """As ``compare``; and whether that is final: another look may see what another host wrote."""
    unclaimed, sizes = [], {}
    try:
        for path, item in walk(files, staged):
            if item.kind == "dir":
                continue
            acked = owner.get(path)
            rank = by if acked is None else acked.rank
            if item.kind != "file":
                return [], (rank, f"{path!r} is a {item.kind}, not a regular file"), True
            problem = "it is the marker's name" if path == MARKER else member_path_problem(path)
            if problem:
                return [], (rank, f"a writer left a file {path!r}, which cannot stand in a checkpoint: {problem}"), True
            sizes[path] = files.stat(f"{staged}/{path}").size
            if acked is None:
                unclaimed.append(path)
            elif sizes[path] != acked.size:
                # to open it makes this host ask for its size, where it remembers one (scripts.proof.l4, "stale")
                files.read(f"{staged}/{path}", 0)
                sizes[path] = files.stat(f"{staged}/{path}").size
    except OSError as error:
        if error.errno not in PASSING:
            raise
        where = os.path.relpath(error.filename or staged, staged)
        return [], (by, f"{where!r} went away while rank {by} looked at it ({error.strerror})"), False
    here = hosts[by]
    for entry in sorted((e for e in owner.values() if sizes.get(e.path) != e.size), key=lambda e: hosts[e.rank] != here):
        writer = f"rank {entry.rank} on {hosts[entry.rank]}"
        if entry.path in sizes:
            text = f"{entry.path!r} has {sizes[entry.path]} bytes for rank {by} on {here}, and {writer} wrote {entry.size}"
        else:
            text = f"{entry.path!r} was written by {writer} and is not seen by rank {by} on {here}"
        if hosts[entry.rank] == here:
            text += "; something changed it after that rank had made it durable"
        else:
            text += "; is the root on storage that all hosts share?"
        return [], (entry.rank, text), hosts[entry.rank] == here
    if not sizes and not empty:
        return [], (by, "no rank wrote anything; an empty checkpoint is not one"), len(set(hosts.values())) == 1
    return unclaimed, None, True
