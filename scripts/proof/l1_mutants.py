"""Faults put into the real code in the traced program, each of which L1 must find (tests/proof/test_l1.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distckpt import durable, ordered
from distckpt.coordination.rounds import Call
from distckpt.coordination.store import Client
from distckpt.marker import FileEntry
from distckpt.retention import KeepLast
from distckpt.saving import commit, writer
from distckpt.saving.committer import Committer
from distckpt.saving.links import Twins
from distckpt.saving.piecewriter import PieceWriter
from scripts.proof.loops.mutants import no_fence


def _no_data_fsync(rank: int, root: str) -> None:
    if rank == 1:
        durable._File.fsync = lambda self: None  # type: ignore[method-assign]
        durable.Files.fsync = lambda self, path: None  # type: ignore[method-assign]


def _no_parent_fsync(rank: int, root: str) -> None:
    real = durable.Files.fsync_dir

    def fsync_dir(self: durable.Files, path: str) -> None:
        if path != root:
            real(self, path)

    durable.Files.fsync_dir = fsync_dir  # type: ignore[method-assign]


def _no_marker_fsync(rank: int, root: str) -> None:
    def write_new(files: durable.Files, path: str, data: bytes) -> None:
        out = files.open(path)
        out.write(data)
        out.close()

    commit.write_new = write_new  # type: ignore[attr-defined]


def _rotation_first(rank: int, root: str) -> None:
    real = Committer.commit

    def early(self: Committer, *args: Any, **how: Any) -> Any:
        self.rotate("main", KeepLast(1))
        return real(self, *args, **how)

    Committer.commit = early  # type: ignore[method-assign, assignment]


def _publish_first(rank: int, root: str) -> None:
    """The final name before the marker stands in it."""
    written: list[tuple[str, bytes]] = []

    def later(files: durable.Files, path: str, data: bytes) -> None:
        written.append((path, data))

    def move(owned: Any, attempt: str, name: str, replace: bool) -> None:
        owned.files.rename(owned.layout.staging(owned.generation, attempt, name), owned.layout.final(name))
        ordered.write_new(owned.files, f"{owned.layout.final(name)}/commit.json", written.pop()[1])
        owned.files.fsync_dir(owned.layout.final(name))

    commit.write_new = later  # type: ignore[attr-defined]
    commit._move = move


def _other_bytes(rank: int, root: str) -> None:
    """What is written is not the state: a bit of it is another, before its digest is taken."""
    real = PieceWriter.write

    def write(self: PieceWriter, data: Any) -> Any:
        wrong = bytearray(data)
        if len(wrong) >= 1000:
            wrong[500] ^= 1
        return real(self, wrong)

    PieceWriter.write = write  # type: ignore[method-assign]


def _ack_first(rank: int, root: str) -> None:
    """Rank 1 acks before its bytes are durable, and is so quick that it never shows: rank 0 goes on only when they are.

    Neither the messages nor anything on the disk says so; the two meet at a pipe that the trace knows nothing of.
    """
    pipe = Path(root).parent.with_suffix(".pipe")
    if rank == 1:
        waiting: list[int] = []
        claim = Client.claim

        def fsync(self: durable._File) -> None:
            waiting.append(os.dup(self._fd))

        def late(self: Client, key: str, value: dict[str, Any]) -> dict[str, Any]:
            standing = claim(self, key, value)
            if "/ack/" in key:
                while waiting:
                    os.fsync(waiting[-1])
                    os.close(waiting.pop())
                pipe.open("wb").close()
            return standing

        durable._File.fsync = fsync  # type: ignore[method-assign]
        Client.claim = late  # type: ignore[method-assign]
    else:
        gather = Call.gather

        def patient(self: Call, keys: dict[int, str], *args: Any, **more: Any) -> Any:
            found = gather(self, keys, *args, **more)
            if "/ack/" in keys[1]:
                pipe.open("rb").close()
            return found

        Call.gather = patient  # type: ignore[method-assign]


def _links_by_name(rank: int, root: str) -> None:
    """What had this name before has its bytes now."""
    real = Twins.link

    def link(self: Twins, files: durable.Files, relative: str, size: int, digest: str, path: str) -> bool:
        assert self._entries is not None
        self._entries[relative] = FileEntry(relative, os.stat(os.path.join(self._directory, relative)).st_size, digest, rank)
        return real(self, files, relative, self._entries[relative].size, digest, path)

    Twins.link = link  # type: ignore[method-assign]


def _no_fsync_of_links(rank: int, root: str) -> None:
    """The names of links are not durable."""
    real = durable.Files.fsync_dir

    def fsync_dir(self: durable.Files, path: str) -> None:
        if not any(entry.is_file() and entry.stat().st_nlink > 1 for entry in os.scandir(path)):
            real(self, path)

    durable.Files.fsync_dir = fsync_dir  # type: ignore[method-assign]


def _no_fsync_in_the_writer(rank: int, root: str) -> None:
    """The writer process answers before its bytes are durable. It is a fresh interpreter, so it breaks itself."""
    begin = "from distckpt.saving.writer import serve\n"
    assert begin in writer._CHILD
    writer._CHILD = writer._CHILD.replace(
        begin, f"import distckpt.durable\ndistckpt.durable._File.fsync = lambda self: None\n{begin}")


OF_OPTIONS: dict[str, Callable[[int, str], None]] = {
    "no fence before the optimizer": lambda rank, root: no_fence(),
    "links by name": _links_by_name,
    "no fsync of the names of links": _no_fsync_of_links,
    "no fsync in the writer process": _no_fsync_in_the_writer,
}
"""Of what ``l1_scenarios.EVERY_OPTION`` has on."""
BY_PROCESS = "no fsync in the writer process"

MUTANTS: dict[str, Callable[[int, str], None]] = {
    "no fsync of rank 1's data": _no_data_fsync,
    "no fsync of the root": _no_parent_fsync,
    "no fsync of the marker": _no_marker_fsync,
    "rotation before the commit": _rotation_first,
    "the name before the marker": _publish_first,
    "other bytes than the state's": _other_bytes,
    "the ack before the fsync": _ack_first,
}
"""``apply(rank, root)`` by name. Only cuts with a lagging rank can find the last one."""
ONLY_LAGGING = "the ack before the fsync"


def apply(name: str, rank: int, root: str) -> None:
    """Break this process."""
    if name == ONLY_LAGGING and rank == 0:
        os.mkfifo(Path(root).parent.with_suffix(".pipe"))
    if name:
        {**MUTANTS, **OF_OPTIONS}[name](rank, root)
