"""The files of one rank in one attempt: names no other rank can have, and the bytes made durable by who wrote them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from distckpt import digest as _digest
from distckpt.durable import Files, Output
from distckpt.errors import ConfigError
from distckpt.layout import check_member_path, rank_name
from distckpt.marker import FileEntry
from distckpt.ordered import make_dir, walk
from distckpt.patience import NONE, Patience
from distckpt.runtime import SYSTEM, Runtime
from distckpt.saving.links import Nowhere, Twins
from distckpt.saving.pacing import paced
from distckpt.saving.piecewriter import PACE, PeerFailed, PieceWriter
from distckpt.saving.unsynced import Unsynced
from distckpt.together import SCARCE, together


@dataclass
class Written:
    """A durable file that needs no more: the writer process wrote it, or with ``linked`` it is a checkpoint's before."""

    size: int
    digest: str | None
    linked: bool = False
    durable: bool = True


@dataclass
class _Claim:
    writer: PieceWriter | Written | None = None
    size: int | None = None


class RankFiles:
    """What a writer gets: ``mine``, ``shared`` with ``writes``, and ``path`` for a framework that names its own files.

    All of it is local: no call here waits for another rank.
    """

    def __init__(self, files: Files, directory: str, rank: int, world: int, *, algorithm: str | None,
                 aborted: Callable[[], bool], skipped: bool = False, prefix: str = "", patience: Patience = NONE,
                 parent: RankFiles | None = None, first: int = 0, runtime: Runtime = SYSTEM, twins: Twins | None = None,
                 kept: bool = False) -> None:
        self.rank, self.world, self.skipped = rank, world, skipped
        self.first: int = parent.first if parent else first
        self.kept: bool = parent.kept if parent else kept  # what is written stays in the page cache
        self._files, self._directory, self._prefix, self._patience = files, directory, prefix, patience
        self._algorithm, self._aborted, self._runtime = algorithm, aborted, runtime
        self._top: RankFiles = parent._top if parent else self
        if parent is None:
            self._claims: dict[str, _Claim] = {}
            self.open_ended = False
            self.bytes_written = self.elsewhere = 0
            self.twins = twins
            self.unsynced = Unsynced(runtime)
            self.notes: dict[str, Any] = {}

    # -- names ---------------------------------------------------------------------------------------------------

    def mine(self, name: str) -> str:
        """A path that no other rank can have: ``optim.pt`` becomes ``optim.rank-00003-of-00016.pt``. Local."""
        return self._claim(rank_name(name, self.rank, self.world))

    def writes(self, name: str) -> bool:
        """Whether this rank is the one that writes the replicated file ``name``: rank 0, and on nodes' own disks the first rank
        of each. Local."""
        check_member_path(self._prefix + name)
        return self.rank == self.first

    def shared(self, name: str) -> str:
        """The path of a replicated file, on the one rank that writes it; ConfigError on the others. Local."""
        if not self.writes(name):
            who = (f"{name!r} is written by rank 0 for all; rank {self.rank} must not" if self.first == 0 else
                   f"{name!r} is written by rank {self.first} for its node; rank {self.rank} must not")
            raise ConfigError(f"{who}: guard the call with files.writes({name!r}), or use files.mine for a file per rank")
        return self._claim(name)

    @property
    def path(self) -> str:
        """The checkpoint's own directory, for a framework's saver. Files that nobody claims cost one more round: each
        host's first rank then makes them durable. Local."""
        self._top.open_ended = True
        return self.directory

    @property
    def directory(self) -> str:
        """As ``path``, for an adapter that claims every file its framework wrote."""
        here = os.path.join(self._directory, self._prefix.rstrip("/")) if self._prefix else self._directory
        if self._prefix:
            self._make_parents(self._prefix + "x")
        return here

    def claim(self, name: str, size: int | None = None) -> str:
        """Say that this rank wrote ``name`` (relative to ``directory``), under a name of the framework's. ``size``: the bytes
        that its writer counted, if it tells; a file of another size ends the save. Local."""
        path = self._claim(name)
        self._top._claims[self._prefix + name].size = size
        return path

    def claim_new(self, name: str) -> str:
        """As ``claim``, for a framework's writer that has yet to open it: the file is made here, empty. So of two ranks that
        write one name the second is told that, before it empties what the first writes. Local."""
        path = self.claim(name)
        self._files.open(path).close()
        return path

    @property
    def prefix(self) -> str:
        """Where this stands below the checkpoint's own directory: empty, or with a slash at the end."""
        return self._prefix

    def below(self, name: str) -> RankFiles:
        """The same, inside the sub-directory ``name``."""
        check_member_path(name)
        return RankFiles(self._files, self._directory, self.rank, self.world, algorithm=self._algorithm,
                         aborted=self._aborted, skipped=self.skipped, prefix=f"{self._prefix}{name}/",
                         patience=self._patience, parent=self, runtime=self._runtime)

    def private(self) -> str:
        """A directory in the attempt that no other rank writes into, for a framework that gives its files names of its own.
        ``take`` makes them files of the checkpoint. Local."""
        path = os.path.join(self.directory, f".rank-{self.rank:05d}")
        make_dir(self._files, path)
        return path

    def take(self, source: str, leave: Container[str] = ()) -> list[str]:
        """Move every file below ``source``, a directory in ``private``, to its name in the checkpoint and claim it; the names.
        ``private`` is gone then; files named in ``leave`` are deleted with it. Local.

        A rename and no copy: what the framework wrote is not written again, and who wrote it is known, so that the right host
        makes it durable (S20).
        """
        names = []
        for name, item in list(walk(self._files, source)):
            if item.kind == "dir" or name in leave:
                continue
            if item.kind != "file":
                raise OSError(errno.EINVAL, f"a framework left a {item.kind} where a regular file should be",
                              os.path.join(source, name))
            self._files.rename(os.path.join(source, name), self._claim(name))
            names.append(name)
        private = self.private()
        for name, item in reversed(list(walk(self._files, private))):
            remove = self._files.rmdir if item.kind == "dir" else self._files.unlink
            remove(os.path.join(private, name))
        self._files.rmdir(private)
        return names

    def drop(self, name: str) -> None:
        """Remove a file that this rank has written under ``name``, the framework's, and let it be written anew. Local."""
        del self._top._claims[self._prefix + name]
        self._files.unlink(os.path.join(self._directory, self._prefix + name))

    def paced(self) -> AbstractContextManager[None]:
        """Inside, a framework writes files below this checkpoint's directory: the disk begins with them meanwhile. Local."""
        if self.skipped:
            return nullcontext()
        claims = self._top._claims

        def ours(path: str) -> bool:
            claim = claims.get(os.path.relpath(path, self._directory))
            return claim is not None and claim.writer is not None

        return paced(self._files, self._runtime, self._directory, ours)

    def begin(self, path: str) -> None:
        """Let the disk begin with a file that somebody else's code has written, while this rank goes on. Local."""
        self._files.start_writeback(path)

    def writer(self, name: str, exact: bool = False) -> PieceWriter:
        """A new file of this rank's, as a binary file object that digests as it writes. Close it: it is made durable together
        with others, before this rank reports. ``name``: see ``mine``, or with ``exact`` ``claim``."""
        own = name if exact else rank_name(name, self.rank, self.world)
        path = self._claim(own)
        writer = PieceWriter(self._open(path), path, self._algorithm, self._asking(self._top.bytes_written), self.kept,
                             self._top.unsynced.hold)
        self._top._claims[self._prefix + own].writer = writer
        return writer

    def _open(self, path: str) -> Output:
        try:
            return self._files.open(path)
        except OSError as error:
            if error.errno not in SCARCE or not self._top.unsynced:
                raise
        self._top.unsynced.sync()  # which gives their descriptors back
        return self._files.open(path)

    def _asking(self, before: int) -> Callable[[int], None]:
        """What is called between pieces with the bytes of this file so far."""
        ask_at = 0

        def between(size: int) -> None:
            nonlocal ask_at
            self._top.bytes_written = before + size
            if size >= ask_at:  # torch.save writes a thousand small pieces, and to ask is a message to rank 0
                ask_at = size + PACE
                self.stop_if_aborted()

        return between

    @property
    def linking(self) -> bool:
        """Whether files that did not change since the checkpoint before are linked: it pays then to have what may change in
        files apart."""
        return self._top.twins is not None

    def put(self, name: str, write: Callable[[PieceWriter], object], exact: bool = False) -> None:
        """A new file with what ``write`` writes, or one more name of the same bytes in the checkpoint before (see ``links``).
        ``write`` may be called twice and must write the same both times. ``name``, ``exact``: as for ``writer``."""
        if not self._link(name if exact else rank_name(name, self.rank, self.world), write):
            with self.writer(name, exact) as out:
                write(out)

    def _link(self, own: str, write: Callable[[PieceWriter], object]) -> bool:
        relative, twins = self._prefix + own, self._top.twins
        if twins is None or self._algorithm is None or relative in self._top._claims or not twins.has(self._files, relative):
            return False
        before, path = self._top.bytes_written, os.path.join(self._directory, check_member_path(relative))
        with PieceWriter(Nowhere(), path, self._algorithm, self._asking(before)) as out:
            write(out)
        assert out.digest is not None
        self._make_parents(relative)
        if not twins.link(self._files, relative, out.size, out.digest, path):
            self._top.bytes_written = before
            return False
        self._top._claims[relative] = _Claim(Written(out.size, out.digest, linked=True))
        return True

    def note(self, key: str, value: Any) -> None:
        """Something small for the marker's ``payload`` part; JSON. Rank 0's notes are kept."""
        self._top.notes[key] = value

    def beside(self, name: str) -> None:
        """``name`` of this checkpoint is a tool that is looked for in the root: after the commit it is copied there, unless
        something of its name stands there. On rank 0."""
        self.note("beside", [*self._top.notes.get("beside", []), check_member_path(self._prefix + name)])

    def stop_if_aborted(self) -> None:
        """Raise when another rank has failed: there is nothing left to write for. Between pieces, not inside collectives."""
        if self._aborted():
            raise PeerFailed

    def _claim(self, name: str) -> str:
        relative = check_member_path(self._prefix + name)
        path = os.path.join(self._directory, relative)
        if self.is_linked(relative):  # a framework's open("wb") on it would empty the checkpoint before (S25)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._top._claims.setdefault(relative, _Claim())
        self._make_parents(relative)
        return path

    def is_linked(self, relative: str) -> bool:
        """Whether ``relative``, from the checkpoint's own directory, is one more name of a committed file."""
        claim = self._top._claims.get(relative)
        return claim is not None and isinstance(claim.writer, Written) and claim.writer.linked

    @property
    def bytes_linked(self) -> int:
        return sum(claim.writer.size for claim in self._top._claims.values()
                   if isinstance(claim.writer, Written) and claim.writer.linked)

    def _make_parents(self, relative: str) -> None:
        parts = relative.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            make_dir(self._files, os.path.join(self._directory, *parts[:depth]), self._patience)

    # -- for the writer process ----------------------------------------------------------------------------------

    @property
    def algorithm(self) -> str | None:
        return self._algorithm

    @property
    def patience(self) -> float:
        """Seconds to look again for a directory that another host made."""
        return self._patience.seconds

    def written(self) -> list[tuple[str, int, str | None, bool]]:
        """The child's: (path, size, digest, linked) of what was written; size -1 for a file that somebody else's code wrote."""
        return [(relative, claim.writer.size, claim.writer.digest, self.is_linked(relative)) if claim.writer is not None
                else (relative, -1, None, False) for relative, claim in self._top._claims.items()]

    def adopt(self, relative: str, size: int, digest: str | None, linked: bool) -> None:
        """The parent's: take over what the child wrote. It is measured again with the rest."""
        self._top._claims[check_member_path(relative)] = _Claim(Written(size, digest, linked) if size >= 0 else None)

    # -- for the transaction -------------------------------------------------------------------------------------

    def written_bytes(self) -> int:
        """Bytes on disk of what this rank claimed, or gathered for it; any thread may ask."""
        total = self._top.elsewhere
        for relative, claim in list(self._top._claims.items()):
            if isinstance(claim.writer, PieceWriter):
                total += claim.writer.gathered  # a slow payload's few bytes are its progress as well
            try:
                total += self._files.stat(os.path.join(self._directory, relative)).size
            except OSError:
                continue  # not written yet
        return total

    def finish(self) -> list[FileEntry]:
        """Every claimed file durable, of the size that was written, with its digest; then every directory of them (S9).

        The writer's return value is not trusted: what counts is what ``stat`` says here, on the rank that wrote.
        """
        claims = sorted(self._top._claims.items())
        for relative, claim in claims:
            if claim.writer is None:
                self.begin(os.path.join(self._directory, relative))
        self._top.unsynced.sync()
        entries = together(self._runtime, self._finish_file, claims)
        folders = {""}
        for entry in entries:
            parts = entry.path.split("/")[:-1]
            folders |= {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        for folder in sorted(folders, key=len, reverse=True):
            self._files.fsync_dir(os.path.join(self._directory, folder) if folder else self._directory)
        return entries

    def _finish_file(self, claimed: tuple[str, _Claim]) -> FileEntry:
        relative, claim = claimed
        path = os.path.join(self._directory, relative)
        writer = claim.writer
        if writer is not None:
            if not writer.durable:
                if isinstance(writer, PieceWriter) and isinstance(writer.failure, OSError):
                    raise writer.failure  # whoever wrote has swallowed it
                raise OSError(errno.EIO, f"the writer of {relative} was never closed", path)
            seen = self._files.stat(path)
            if seen.kind != "file" or seen.size != writer.size:
                raise OSError(errno.EIO, f"{writer.size} bytes were written and {seen.size} are on disk", path)
            return FileEntry(relative, writer.size, writer.digest, self.rank)
        entry = make_durable(self._files, self._directory, relative, self.rank, self._algorithm, self.kept)
        if claim.size is not None and entry.size != claim.size:
            raise OSError(errno.EIO, f"its writer reported {claim.size} bytes and {entry.size} are on disk", path)
        return entry


def make_durable(files: Files, directory: str, relative: str, rank: int, algorithm: str | None, kept: bool = False) -> FileEntry:
    """Measure and fsync a file that somebody else's code wrote. An error here condemns the file, and the attempt. ``kept``: its
    pages stay in memory."""
    path = os.path.join(directory, relative)
    try:
        seen = files.stat(path)
    except FileNotFoundError as error:
        raise OSError(errno.ENOENT, "claimed for this checkpoint and never written", path) from error
    if seen.kind != "file":
        raise OSError(errno.EINVAL, f"a {seen.kind} stands where a regular file should be", path)
    text = None
    size = seen.size
    if algorithm is not None:  # from the page cache, while the disk writes
        size, text = _digest.of_file(files, path, algorithm=algorithm)
    files.fsync(path)
    after = files.stat(path)
    if (after.size, after.inode) != (size, seen.inode) or size != seen.size:
        raise OSError(errno.EIO, f"still being written: {seen.size}, then {size}, then {after.size} bytes", path)
    if not kept:
        files.drop_cache(path)
    return FileEntry(relative, size, text, rank)
