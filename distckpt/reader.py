"""Look into a root from any process: an uploader, an evaluation job, a notebook. Claims nothing, needs no torch.

What is returned passed the same gate as resume. A checkpoint that must not be rotated away while it is read is leased.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from distckpt import catalog, leases, selection, trust
from distckpt.catalog import Entry, Problem, RootRecord
from distckpt.checkpoint import Checkpoint
from distckpt.durable import GONE, REAL, Files
from distckpt.errors import ConfigError, MarkerError, NoUsableCheckpoint, StepNotFound
from distckpt.layout import MAIN, Layout, Naming, series_of
from distckpt.rootdir import infer_naming
from distckpt.runtime import SYSTEM, Runtime

T = TypeVar("T")
log = logging.getLogger(__name__)
_TRIES = 10


class Root:
    """A root as a reader sees it. Every method reads afresh; nothing is cached and nothing is claimed."""

    def __init__(self, path: str | os.PathLike[str], files: Files = REAL, runtime: Runtime = SYSTEM) -> None:
        self.layout = Layout.at(path)
        self.files, self.runtime = files, runtime
        if not files.is_dir(self.layout.root) and not self._appears():
            raise ConfigError(f"root {self.layout.root} is not a directory")
        self.record: RootRecord | None = catalog.read_record(files, self.layout)
        naming = self.record.naming if self.record else infer_naming(files, self.layout)
        self.naming = naming or Naming.parse(catalog.DEFAULT_NAMING)

    def _appears(self) -> bool:
        """Whether the root is there after all, when its parent is listed: it may have been looked for before it was made."""
        try:
            self.files.scan(os.path.dirname(self.layout.root))
        except OSError as error:
            log.debug("cannot list the parent of root %s: %s", self.layout.root, error)
        return self.files.is_dir(self.layout.root)

    def entries(self, series: str | None = None) -> list[Entry]:
        """Every checkpoint-named entry, committed or not, newest commit first. Reads heads only."""
        found = catalog.scan(self.files, self.layout, self.naming)
        return found if series is None else [e for e in found if e.series == series]

    def checkpoints(self, series: str = MAIN) -> list[Checkpoint]:
        """The committed checkpoints of ``series``, newest commit first; damaged ones are left out."""
        def look() -> list[Checkpoint]:
            found = []
            for entry in self.entries(series):
                if entry.committed:
                    try:
                        found.append(self.read(entry))
                    except (MarkerError, OSError):
                        continue
            return found

        return self._while_rotating(look, bool)

    def read(self, entry: Entry) -> Checkpoint:
        """The checkpoint of ``entry``, its marker read whole; MarkerError when that cannot be trusted."""
        path = self.layout.final(entry.name)
        return Checkpoint(path, catalog.read_marker(self.files, path), files=self.files)

    def candidates(self, series: str = MAIN) -> selection.Candidates:
        return selection.candidates(self.entries(series), series, self.record.run if self.record else None,
                                    catalog.rejections(self.files, self.layout),
                                    selection.abandoned(self.files, self.layout),
                                    selection.recorded(self.files, self.layout))

    def latest(self, series: str = MAIN) -> Checkpoint | None:
        """The checkpoint a run would resume from; None when there never was one, NoUsableCheckpoint when none is good."""
        found, skipped = self._while_rotating(lambda: self._newest(series), lambda answer: answer[0] is not None)
        if found is None and skipped:
            raise NoUsableCheckpoint(
                f"root {self.layout.root} has {len(skipped)} candidates and none is usable: "
                + "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:5]), rejected=skipped)
        return found

    def _newest(self, series: str) -> tuple[Checkpoint | None, dict[str, str]]:
        found = self.candidates(series)
        for entry in found.usable:
            checked = self._check(entry)
            if isinstance(checked, Checkpoint):
                return checked, found.skipped
            found.skipped[entry.name] = checked
        return None, found.skipped

    def _while_rotating(self, look: Callable[[], T], found: Callable[[T], bool]) -> T:
        """``look``, again when it found nothing and the root has other names by then: rotation may take everything that a
        listing named, because newer commits stand."""
        for _ in range(_TRIES):
            before = self._names()
            answer = look()
            if found(answer) or self._names() == before:
                return answer
        return look()

    def _names(self) -> list[str]:
        return [item.name for item in self.files.scan(self.layout.root) if series_of(self.naming, item.name) is not None]

    def _check(self, entry: Entry) -> Checkpoint | str:
        """The checkpoint of ``entry``, or why it may not be used (marker, seal, sizes)."""
        path = self.layout.final(entry.name)
        try:
            found = catalog.read_marker(self.files, path)
        except MarkerError as error:
            return next(iter(error.files.values()))
        except OSError as error:
            return str(error)
        problems = catalog.check_files(self.files, path, found.files)
        return f"{problems[0].path} {problems[0].what}" if problems else Checkpoint(path, found, files=self.files)

    def problem(self, entry: Entry) -> str | None:
        """Why ``entry`` may not be used (marker, seal, sizes); None when it may."""
        checked = self._check(entry)
        return checked if isinstance(checked, str) else None

    def all_steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return sorted(entry.step for entry in self.entries(MAIN) if entry.committed)

    def latest_step(self) -> int | None:
        """Step of the newest commit, None when there is none."""
        return next((entry.step for entry in self.entries(MAIN) if entry.committed), None)

    def best_step(self, metric: str = "loss", mode: str = "min") -> int | None:
        """Step of the best checkpoint by ``metric``, None when none has it."""
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max', not {mode!r}")
        scored = [c for c in self.checkpoints() if c.metrics.get(metric) == c.metrics.get(metric) and metric in c.metrics]
        pick = min if mode == "min" else max
        return pick(scored, key=lambda c: c.metrics[metric]).step if scored else None

    def at(self, step: int, series: str = MAIN) -> Checkpoint:
        """The committed checkpoint of ``step``; StepNotFound otherwise."""
        for entry in self.entries(series):
            if entry.step == step and entry.committed:
                try:
                    return self.read(entry)
                except OSError as error:
                    if error.errno not in GONE:
                        raise
        raise StepNotFound(f"step {step} is not a committed checkpoint of {self.layout.root}; 'distckpt ls' shows what is",
                           step=step)

    def verify(self, checkpoint: Checkpoint, digest: bool = True) -> list[Problem]:
        """What is wrong with the files of ``checkpoint``: sizes, and with ``digest`` every byte. Empty: nothing.

        A file without a digest in the marker counts as a problem when ``digest`` is asked for: missing evidence is
        not success (FIELD_CASES B130).
        """
        return catalog.check_files(self.files, checkpoint.path, checkpoint.marker.files, digest)

    def lease(self, checkpoint: Checkpoint, reason: str, ttl: float | None = 600.0) -> leases.Lease:
        """Keep ``checkpoint`` from rotation until released, or until ``ttl`` seconds without renewal. A context manager.

        ``ttl=None`` pins it: it stays until released, or ``distckpt unpin``.
        """
        return leases.take(self.files, self.layout, self.runtime, checkpoint.name, checkpoint.attempt, reason, ttl)

    def leases_on(self, attempt: str) -> list[leases.Held]:
        try:
            return leases.listing(self.files, self.layout, attempt)
        except OSError as error:
            if error.errno in GONE:
                return []
            raise


def open_root(path: str | os.PathLike[str]) -> Root:
    """The root at ``path``, to look into. Local; any process; claims nothing; imports no torch.

    A root that others than this user may put checkpoints into is opened all the same, with a warning: reading JSON harms
    nobody, and what is loaded from there is the caller's to trust.
    """
    return warned(Root(path))


def warned(root: Root) -> Root:
    """``root``, after a warning where others may put checkpoints into it."""
    problem = trust.sharers(root.files, root.layout.root)
    if problem is not None:
        log.warning("root %s is shared: %s. Load from it only if you trust all who can write there", root.layout.root, problem)
    return root
