"""A committed checkpoint, as the caller holds it."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

from distckpt import catalog
from distckpt.digest import Trail
from distckpt.durable import REAL, Files, Opened
from distckpt.errors import IntegrityError, MemberMissing, WorldMismatch
from distckpt.layout import rank_name
from distckpt.marker import FileEntry, Marker
from distckpt.reread import Reread

_CHANGED = "was written into after its digest was compared, while it was being loaded: find out what writes there"


class Checkpoint:
    """One committed checkpoint: immutable, exactly this attempt, wherever ``latest`` moves meanwhile."""

    def __init__(self, path: str, marker: Marker, *, rank: int | None = None, world: int | None = None,
                 files: Files = REAL, prefix: str = "") -> None:
        self.path = path
        self._prefix = prefix
        self.marker = marker
        self._rank, self._world_now, self._files = rank, world, files
        self._by_path = {entry.path: entry for entry in marker.files}

    def __repr__(self) -> str:
        return f"Checkpoint({self.name!r}, step={self.step}, attempt={self.attempt!r})"

    @property
    def step(self) -> int:
        return self.marker.head.step

    @property
    def name(self) -> str:
        return self.marker.head.name

    @property
    def attempt(self) -> str:
        return self.marker.head.attempt

    @property
    def seq(self) -> int:
        return self.marker.head.seq

    @property
    def series(self) -> str:
        return self.marker.head.series

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.marker.metrics

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.marker.meta

    @property
    def world(self) -> int:
        """How many ranks saved it."""
        return self.marker.world

    @property
    def size(self) -> int:
        """Bytes of all payload files."""
        return self.marker.size

    def below(self, name: str) -> Checkpoint:
        """The same checkpoint, with file names relative to its sub-directory ``name``."""
        return Checkpoint(self.path, self.marker, rank=self._rank, world=self._world_now, files=self._files,
                          prefix=f"{self._prefix}{name}/")

    @property
    def directory(self) -> str:
        """Where the files stand that names are relative to."""
        return os.path.join(self.path, self._prefix.rstrip("/")) if self._prefix else self.path

    def has(self, path: str) -> bool:
        """Whether the manifest names this file."""
        return self._prefix + path in self._by_path

    @property
    def names(self) -> list[str]:
        """Names of the files, relative to ``directory``."""
        return [path[len(self._prefix):] for path in self._by_path if path.startswith(self._prefix)]

    def entry(self, path: str) -> FileEntry:
        path = self._prefix + path
        try:
            return self._by_path[path]
        except KeyError:
            raise MemberMissing(f"{self.name} holds no file {path!r}; it has {len(self._by_path)} files, such as "
                                f"{next(iter(self._by_path), None)!r}", step=self.step, members=[path]) from None

    def shared(self, name: str) -> str:
        """The path of a file that one rank wrote for all. Local."""
        return os.path.join(self.path, self.entry(name).path)

    def mine(self, name: str, rank: int | None = None) -> str:
        """The path of the file that this rank wrote as ``name``; WorldMismatch when another number of ranks saved.

        Local. ``rank`` asks for another rank's file, whatever the number of ranks now.
        """
        return self.shared(self.name_of(name, rank))

    def name_of(self, name: str, rank: int | None = None) -> str:
        """The manifest's name of what this rank, or ``rank``, wrote as ``name``: see ``mine``. Local."""
        if rank is None:
            if self._rank is None:
                raise MemberMissing(f"{self.name} was opened outside a group: say mine({name!r}, rank=...)",
                                    step=self.step, members=[name])
            if self._world_now != self.world:
                raise WorldMismatch(f"{self.name} was saved by {self.world} ranks and is loaded by {self._world_now}: "
                                    f"{name!r} is per rank and does not reshard; load with {self.world} ranks, or use a "
                                    "payload that reshards (DCP)", step=self.step, saved=self.world, now=self._world_now)
            rank = self._rank
        return rank_name(name, rank, self.world)

    def open(self, path: str, digest: bool = True) -> Opened:
        """The file ``path`` of the manifest, open for reading, after it was found to be what was committed; IntegrityError if
        it is not: a regular file, reached through no link, of its size and, with ``digest`` (where the marker has one), of its
        bytes. Local.

        What is read is the file that was checked, whatever becomes of its name meanwhile, and where its digest was compared,
        the bytes that were: one that is written into afterwards is an IntegrityError when it is read. Use this, and not a
        path, for everything that unpickles.
        """
        entry = self.entry(path)
        self._refuse(entry, catalog.check_file(self._files, self.path, entry))
        file = self._files.member(*catalog.member_of(self.path, entry))
        try:
            if not digest or entry.digest is None:
                return file
            trail = Trail(entry.size)
            self._refuse(entry, catalog.differs(file, entry, trail=trail))
            return io.BufferedReader(Reread(file, os.path.join(self.path, entry.path), entry.size, trail,
                                            lambda: self._refused(entry, _CHANGED)))
        except BaseException:
            file.close()
            raise

    def check(self, path: str, digest: bool = True) -> None:
        """Raise IntegrityError unless the file is what was committed. Local."""
        entry = self.entry(path)
        self._refuse(entry, catalog.check_file(self._files, self.path, entry, digest=digest and entry.digest is not None))

    def _refuse(self, entry: FileEntry, problem: catalog.Problem | None) -> None:
        if problem is not None:
            raise self._refused(entry, problem.what)

    def _refused(self, entry: FileEntry, what: str) -> IntegrityError:
        return IntegrityError(f"{self.name}: {entry.path} (rank {entry.rank}'s) {what}; resume falls back to an older "
                              "checkpoint, 'distckpt verify --digest' shows all of it", files={entry.path: what})
