"""SIGKILL one rank at one point inside one save, from inside the process: no handler, no flush, no goodbye.

Nothing in the library knows of this file: two points are reached through the library's own seams (``Seams``), the first
write through Python's audit hook, because the first file of a rank is written by DCP itself. Just before it dies, the
rank notes where it stood, for the story. A fourth point kills nobody: the disk is full there.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distckpt.coordination import bootstrap
from distckpt.coordination.store import Client
from distckpt.durable import REAL
from distckpt.options import Seams
from distckpt.runtime import SYSTEM
from distckpt.testing import faults


@dataclass
class Doom:
    """``rank`` dies at ``point`` ("write", "fsync" or "ack") of the save of ``step``, leaving a ``note``. At "full" it lives."""

    rank: int
    point: str
    step: int
    note: Path
    armed: bool = False

    @classmethod
    def parse(cls, text: str, note: Path) -> Doom:
        rank, point, step = text.split(":")
        return cls(int(rank), point, int(step), note)

    def reach(self, step: int) -> None:
        """The save of ``step`` is about to begin."""
        self.armed = step == self.step

    def die(self, where: str) -> None:
        self.note.write_text(json.dumps({"rank": self.rank, "point": self.point, "step": self.step, "where": where}))
        os.kill(os.getpid(), signal.SIGKILL)

    def _in_save(self, path: str) -> bool:
        return self.armed and f"/step-{self.step}/" in path

    def seams(self) -> Seams:
        """Lay the trap; what the doomed rank hands to its manager."""
        if self.point == "write":
            sys.addaudithook(self._on_event)
            return Seams()
        if self.point == "fsync":  # of its part of the model, which DCP wrote and distckpt makes durable
            trap = faults.call(lambda operation: self.die(os.path.basename(operation.path)), op=("fsync", "fsync_file"),
                               path=lambda path: self._in_save(path) and path.endswith(".distcp"))
            return Seams(files=faults.FaultyFiles(REAL, trap))
        if self.point == "full":  # only where no small disk of its own can be had: the story says so
            return Seams(files=faults.FaultyFiles(REAL, faults.fail(errno.ENOSPC, op=("fsync", "fsync_file"), path=self._in_save,
                                                                    forever=True)))
        found = bootstrap.find(None, SYSTEM)
        return Seams(bootstrap=replace(found, source=lambda: _Watched(found.source(), self)))  # type: ignore[arg-type, return-value]

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self.armed or not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = os.fspath(arguments[0])
        if isinstance(path, str) and self._in_save(path) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self.die(os.path.basename(path))


class _Watched:
    """A client of the control plane whose owner dies when its ack has reached rank 0's store."""

    def __init__(self, client: Client, doom: Doom) -> None:
        self._client, self._doom = client, doom

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def claim(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        standing = self._client.claim(key, value)
        if self._doom.armed and key.endswith(f"/ack/{self._doom.rank}"):
            self._doom.die(f"{len(value['files'])} files")
        return standing
