"""``on_commit``: what the program wants done with a checkpoint once it is published."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from distckpt import options
from distckpt.errors import ConfigError
from distckpt.record import CommitRecord
from distckpt.runtime import Runtime
from distckpt.saving.alone import alone

log = logging.getLogger(__name__)

Hook = Callable[[CommitRecord], Any]

RANKS = ("rank0", "all")
_REMEDY = ("register it on every rank with manager.on_commit(hook, ranks=\"all\"), or let it set something that the training "
           "loop acts on")
_LIMIT = 4000
_KEPT = 8


class Hooks:
    """The hooks of one rank. Nothing that a hook does or raises reaches the checkpoint, the other hooks, or the other ranks.

    ``journal`` is rank 0's; what fails elsewhere is kept for ``drain`` and goes along with the next report to rank 0.
    """

    def __init__(self, rank: int, journal: Callable[..., None] | None, runtime: Runtime) -> None:
        self._rank, self._journal, self._runtime = rank, journal, runtime
        self._hooks: list[tuple[Hook, str]] = []
        self._failed: list[dict[str, Any]] = []
        self._running: int | None = None

    def add(self, hook: Hook, ranks: str) -> None:
        options.choice("ranks", ranks, RANKS)
        if not callable(hook):
            raise ConfigError(f"on_commit takes a function of one CommitRecord, not {type(hook).__name__}")
        self._hooks.append((hook, ranks))

    @property
    def running_here(self) -> bool:
        """Whether the calling thread is inside a hook: a collective call from there could never be met by the others."""
        return self._running == self._runtime.here()

    def run(self, record: CommitRecord | None) -> None:
        """Call every hook that is this rank's. ``record``: None when nothing was committed (``on_exists="skip"``)."""
        if record is None:
            return
        for hook, ranks in list(self._hooks):
            if ranks == "rank0" and self._rank != 0:
                continue
            self._running = self._runtime.here()
            here = nullcontext() if ranks == "all" else alone(f"the on_commit hook {_name(hook)} runs on rank 0 alone", _REMEDY)
            try:
                with here:
                    hook(replace(record, metrics=dict(record.metrics)))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too: it would end the finaliser, and mean nothing there
                self._report(hook, record, error)
            finally:
                self._running = None

    def _report(self, hook: Hook, record: CommitRecord, error: BaseException) -> None:
        name = _name(hook)
        log.error("the on_commit hook %s failed for step %d on rank %d; the checkpoint is committed all the same", name,
                  record.step, self._rank, exc_info=error)
        told = {"rank": self._rank, "hook": name, "step": record.step, "attempt": record.attempt,
                "error": f"{type(error).__name__}: {error}"[:_LIMIT],
                "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__))[-_LIMIT:]}
        if self._journal is not None:
            self._journal("hook_failed", **told)
        else:
            self._failed = [*self._failed[1 - _KEPT:], told]

    def drain(self) -> dict[str, Any]:
        """For a report to rank 0: the failures it has not heard of, under their key; empty when there are none."""
        failed, self._failed = self._failed, []
        return {"hooks_failed": failed} if failed else {}


def _name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__name__


def journal_failures(journal: Callable[..., None], reports: dict[int, dict[str, Any]]) -> None:
    """Rank 0's: what other ranks' hooks failed with since the last report."""
    for rank in sorted(reports):
        for told in reports[rank].get("hooks_failed", ()):
            journal("hook_failed", **told)
