"""Events of one generation, one JSON object per line: what happened when, on which rank, how many bytes.

Written by the owner of the root only. It promises nothing after a crash and nothing depends on it but people, and
one question of resume: did this root ever commit (S7).
"""

from __future__ import annotations

import json
import logging
from typing import Any

from distckpt.durable import GONE, Files
from distckpt.layout import Layout, number_of
from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

_LINE_LIMIT = 64_000


class Journal:
    """Append events; a journal that cannot be written is a warning, once, and never fails a save."""

    def __init__(self, files: Files, layout: Layout, generation: int, runtime: Runtime) -> None:
        self._files = files
        self._path = layout.journal(generation)
        self._runtime = runtime
        self._complained = False

    def event(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"time": round(self._runtime.time(), 3), "event": kind, **fields}, default=str)
        try:
            self._files.append(self._path, line[:_LINE_LIMIT].encode() + b"\n")
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.warning("cannot write the journal %s: %s; saves go on without it", self._path, error)


def read(files: Files, layout: Layout) -> list[dict[str, Any]]:
    """All events of all generations, oldest first; torn lines are left out."""
    try:
        names = [i.name for i in files.scan(layout.home("journal")) if i.name.endswith(".jsonl")]
    except OSError as error:
        if error.errno in GONE:
            return []
        raise
    events = []
    for name in sorted(names, key=lambda n: number_of(n[:-6]) or 0):
        for line in files.read(layout.home("journal", name), 1 << 28).splitlines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                events.append(value)
    return events


def ever_committed(files: Files, layout: Layout) -> bool:
    """Whether any generation recorded a commit."""
    return any(event.get("event") == "committed" for event in read(files, layout))
