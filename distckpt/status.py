"""status.json: pending, committed, failed per attempt, written after the fact; for people and dashboards.

"Saved" is said of committed checkpoints only (FIELD_CASES B26, B28). Replaced in one step, never synced: it promises
nothing after a crash, and nothing here reads it.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import Any

from distckpt.durable import Files
from distckpt.layout import Layout
from distckpt.ordered import unlink_if_there
from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

_KEPT = 20


class Status:
    """The owner's record of its last attempts."""

    def __init__(self, files: Files, layout: Layout, generation: int, runtime: Runtime) -> None:
        self._files, self._layout, self._generation, self._runtime = files, layout, generation, runtime
        self._attempts: list[dict[str, Any]] = []
        self.failures_in_a_row = 0
        self._stale = False

    def note(self, attempt: str | None, state: str, **fields: Any) -> None:
        """``state``: pending, committed, failed or unknown. ``attempt``: None for a save that failed before it was one."""
        known = next((a for a in self._attempts if a["attempt"] == attempt is not None), None)
        if known is None:
            known = {"attempt": attempt}
            self._attempts = [*self._attempts[1 - _KEPT:], known]
        known.update(state=state, time=round(self._runtime.time(), 3), **fields)
        if state == "committed":
            self.failures_in_a_row = 0
        elif state in ("failed", "unknown"):
            self.failures_in_a_row += 1
        self._write()

    def again(self) -> None:
        """Write what could not be written, when a failed attempt has given its room back."""
        if self._stale:
            self._write()

    def snapshot(self) -> dict[str, Any]:
        return {"generation": self._generation, "failures_in_a_row": self.failures_in_a_row,
                "attempts": [dict(a) for a in self._attempts]}

    def _write(self) -> None:
        temporary = self._layout.staging(self._generation, "status.tmp")
        rest = self.snapshot()
        lines = ",\n".join(json.dumps(attempt) for attempt in rest.pop("attempts"))  # with ``indent`` it takes ten times as long
        data = f'{json.dumps(rest)[:-1]}, "attempts": [\n{lines}\n]}}\n'.encode()
        try:
            unlink_if_there(self._files, temporary)
            self._files.overwrite(temporary, data)
            self._files.rename(temporary, self._layout.home("status.json"))
        except OSError as error:
            log.warning("could not write %s: %s", self._layout.home("status.json"), error)
            self._stale = True
            with suppress(OSError):  # what did not work is said already
                unlink_if_there(self._files, temporary)
        else:
            self._stale = False
