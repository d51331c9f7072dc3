"""SIGKILL one rank at one point inside one save, from inside the process: no handler, no flush, no goodbye.

The points are reached through the library's own seams (``Seams``), so nothing in the library knows of this file. Just
before it dies, the rank notes where it stood, for the story.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distckpt.coordination import bootstrap
from distckpt.coordination.store import Client
from distckpt.options import Seams
from distckpt.runtime import SYSTEM
from distckpt.testing import faults


@dataclass
class Doom:
    """``rank`` dies at ``point`` ("write", "fsync" or "ack") of the save of ``step``, leaving a ``note``."""

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

    def _strike(self, operation: faults.Operation) -> None:
        self.die(os.path.basename(operation.path))

    def _in_save(self, path: str, suffix: str = "") -> bool:
        return self.armed and f"/step-{self.step}/" in path and path.endswith(suffix)

    def seams(self) -> Seams:
        """What the doomed rank hands to its manager."""
        if self.point == "write":
            return Seams(files=faults.FaultyFiles(faults.REAL, faults.call(self._strike, op="write", path=self._in_save)))
        if self.point == "fsync":  # of its part of the model, which DCP wrote and we make durable
            shard = faults.call(self._strike, op=("fsync", "fsync_file"), path=lambda path: self._in_save(path, ".distcp"))
            return Seams(files=faults.FaultyFiles(faults.REAL, shard))
        found = bootstrap.find(None, SYSTEM)
        return Seams(bootstrap=replace(found, source=lambda: _Watched(found.source(), self)))  # type: ignore[arg-type, return-value]


class _Watched:
    """A client of the control plane whose owner dies when its ack has reached rank 0's store."""

    def __init__(self, client: Client, doom: Doom) -> None:
        self._client, self._doom = client, doom

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def claim(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        standing = self._client.claim(key, value)
        if self._doom.armed and key.endswith(f"/ack/{self._doom.rank}"):
            self._doom.die(f"{len(value['files'])} files acked")
        return standing
