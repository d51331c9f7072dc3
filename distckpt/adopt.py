"""Adoption: a directory that has no marker of this run becomes one of its checkpoints.

What is adopted was not seen being written, so nothing proves that it is complete: everything that speaks against it
refuses it (links, special files, ranks without a file, bytes that differ from a former marker), it is ordered before
every commit (``seq`` 0, S24), and its marker says that it was adopted. For the owner of the root only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any

from distckpt import catalog, digest, trust
from distckpt import marker as _marker
from distckpt.durable import GONE, Files
from distckpt.errors import ConfigError, IntegrityError, MarkerError
from distckpt.layout import MARKER, Layout, Naming, member_path_problem, series_of
from distckpt.marker import FileEntry, Head, Marker
from distckpt.ordered import fsync_tree_dirs, replace, walk
from distckpt.owned import OwnedRoot

_RANK = re.compile(r"rank-(\d{5})-of-(\d{5})")
# A file of every rank, as frameworks name theirs, and the fewest ranks that do so: Transformers numbers from two on.
_THEIRS = ((re.compile(r"(?:.*/)?rng_state_(\d{1,5})\.pth"), 2), (re.compile(r"(?:.*/)?random_states_(\d{1,5})\.pkl"), 1),
           (re.compile(r"(?:.*/)?(?:bf16_)?zero_pp_rank_(\d{1,5})_mp_rank_(\d{1,5})_optim_states\.pt"), 1))
_KINDS = {"link": "symlink", "other": "special file"}


@dataclass(frozen=True)
class Candidate:
    """A directory that may be adopted. ``former``: its intact marker of another run, or of the name it had before."""

    name: str
    step: int
    series: str
    files: tuple[tuple[str, int], ...]
    world: int
    former: Marker | None = None

    @property
    def size(self) -> int:
        return sum(size for _, size in self.files)


def _no(name: str, why: str, what: str) -> ConfigError:
    return ConfigError(f"{name} cannot be adopted: {why}; {what}")


def examine(files: Files, layout: Layout, naming: Naming, run: str | None, name: str) -> Candidate:
    """The directory ``name`` of the root if it may be adopted; ConfigError with the reason if not. Reads only."""
    parsed = series_of(naming, name)
    if parsed is None:
        raise _no(name, f"it is not named like {naming.template!r}", "name it so, or give the naming it follows (a root's naming "
                  "is fixed once it has one)")
    directory = layout.final(name)
    try:
        kind = files.stat(directory).kind
    except OSError as error:
        if error.errno not in GONE:
            raise
        raise _no(name, f"{directory} does not exist", "check the name") from error
    if kind != "dir":
        raise _no(name, f"it is a {_KINDS.get(kind, kind)}, not a directory", "copy what it stands for into the root")
    former = _former(files, directory, name, parsed, run)
    found = _listing(files, directory, name)
    if former is not None:
        problems = catalog.check_files(files, directory, former.files)
        if problems:
            raise _no(name, f"its marker says that it is damaged: {problems[0].path} {problems[0].what}", "copy it again")
    return Candidate(name, parsed[1], parsed[0], tuple(found),
                     former.world if former is not None else _world(name, [path for path, _ in found]), former)


def _former(files: Files, directory: str, name: str, parsed: tuple[str, int], run: str | None) -> Marker | None:
    try:
        found = catalog.read_marker(files, directory)
    except MarkerError as error:
        raise _no(name, f"its {MARKER} is not usable ({next(iter(error.files.values()))})", "it was a checkpoint and is damaged: "
                  "restore it from a copy") from error
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
    if catalog.identity_problem(found.head, name, parsed) is None and run in (None, found.head.run):
        raise _no(name, "it is a checkpoint of this run already", "nothing needs to be done")
    return found


def _listing(files: Files, directory: str, name: str) -> list[tuple[str, int]]:
    found = []
    for relative, item in walk(files, directory):
        if relative == MARKER or item.kind == "dir":
            continue
        if item.kind != "file":
            raise _no(name, f"{relative} in it is a {_KINDS.get(item.kind, item.kind)}, so its bytes are not its own",
                      "replace it by the file itself")
        problem = member_path_problem(relative)
        if problem:
            raise _no(name, f"the file name {relative!r} cannot stand in a checkpoint: {problem}", "rename it")
        found.append((relative, files.stat(os.path.join(directory, relative)).size))
    if not found:
        raise _no(name, "there is no file in it", "remove it")
    return found


def _world(name: str, paths: list[str]) -> int:
    """How many ranks saved it, by the names of their files; 1 where they tell nothing."""
    told = _told(paths)
    if not told:
        return 1
    if len(told) > 1:
        raise _no(name, f"its file names tell of saves by {' and by '.join(map(str, sorted(told)))} ranks",
                  "it mixes several saves: leave it")
    (world, missing), = told.items()
    if missing:
        some = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise _no(name, f"its file names tell of {world} ranks, and there is no file of rank {some}", "it is incomplete: "
                  "leave it")
    return world


def _told(paths: list[str]) -> dict[int, list[str]]:
    """The numbers of ranks that file names tell of, and for each some ranks that have no file."""
    told: dict[int, list[str]] = {}
    ours = {(int(rank), int(world)) for path in paths for rank, world in _RANK.findall(path)}
    for world in {world for _, world in ours}:
        told[world] = [str(rank) for rank in range(world) if (rank, world) not in ours]
    for pattern, least in _THEIRS:
        numbers = {tuple(map(int, match.groups())) for path in paths if (match := pattern.fullmatch(path)) is not None}
        if not numbers:
            continue
        sides = [1 + max(column) for column in zip(*numbers, strict=True)]
        sides[0] = max(sides[0], least)
        lacking = (" mp ".join(map(str, number)) for number in product(*map(range, sides)) if number not in numbers)
        told.setdefault(prod(sides), []).extend(islice(lacking, 9))
    return told


def build(candidate: Candidate, digests: Mapping[str, str], *, attempt: str, branch: str, run: str, generation: int, time: float,
          host: str, metrics: Mapping[str, Any] | None = None) -> Marker:
    """The marker that makes ``candidate`` a checkpoint. Pure. What an intact former marker knows is carried over."""
    former = candidate.former
    ranks = {entry.path: entry.rank for entry in former.files} if former is not None else {}
    entries = tuple(FileEntry(path, size, digests[path], ranks.get(path, _rank(path))) for path, size in candidate.files)
    head = Head(0, candidate.step, attempt, candidate.name, candidate.series, run, generation)
    if former is None:
        return Marker(head, candidate.world, entries, branch, time=time, host=host, metrics=_marker.check_metrics(metrics),
                      payload={"adopted": True})
    return Marker(head, candidate.world, entries, branch, time=former.time, host=former.host, meta=former.meta,
                  metrics={**former.metrics, **_marker.check_metrics(metrics)}, fingerprint=former.fingerprint,
                  payload={**former.payload, "adopted": True})


def _rank(path: str) -> int:
    found = _RANK.search(path)
    return int(found.group(1)) if found else 0


def adopt(owned: OwnedRoot, candidate: Candidate, branch: str, metrics: Mapping[str, Any] | None = None,
          between: Callable[[int], None] | None = None) -> Marker:
    """Make ``candidate`` a checkpoint of the owned root, durably; gives its marker.

    Every file is read and synced before the marker exists, and the marker appears by one rename, so that a crash leaves
    either what was there or a checkpoint. IntegrityError when bytes are not what they were, ConfigError when they
    change meanwhile. ``branch``: one token for all that are adopted together, so that they are one line to retention.
    """
    files, directory = owned.files, owned.layout.final(candidate.name)
    promised = {entry.path: entry.digest for entry in candidate.former.files} if candidate.former is not None else {}
    digests = {}
    for relative, size in candidate.files:
        path = os.path.join(directory, relative)
        files.fsync(path)
        known = promised.get(relative)
        algorithm = digest.algorithm_of(known) if known else digest.SHA256 if trust.key() is not None else digest.XXH3
        seen, text = digest.of_file(files, path, between, algorithm)
        if seen != size:
            raise _no(candidate.name, f"{relative} changes: it had {size} bytes and now {seen}", "end what writes to it first")
        if known not in (None, text):
            raise IntegrityError(f"{candidate.name} cannot be adopted: {relative} has digest {text}, its former marker says "
                                 f"{known}; copy it again", files={relative: "differs from its former marker"})
        digests[relative] = text
    fsync_tree_dirs(files, directory)
    runtime = owned.runtime
    made = build(candidate, digests, attempt=runtime.token(8), branch=branch, run=owned.record.run, generation=owned.generation,
                 time=runtime.time(), host=runtime.identity().host, metrics=metrics)
    # Its temporary lives in our generation's staging, so that a writer that was taken over cannot finish this (S5).
    replace(files, os.path.join(directory, MARKER), _marker.build(made, trust.key()),
            owned.layout.staging(owned.generation, "adopt.tmp"))
    files.fsync_dir(owned.layout.root)
    owned.journal.event("adopted", name=candidate.name, step=candidate.step, attempt=made.head.attempt, bytes=made.size,
                        former=candidate.former.head.attempt if candidate.former is not None else None)
    return made
