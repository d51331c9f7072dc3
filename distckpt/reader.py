"""Look into a root from any process: an uploader, an evaluation job, a notebook. Claims nothing, needs no torch.

What is returned passed the same gate as resume. A checkpoint that must not be rotated away while it is read is leased.
"""

from __future__ import annotations

import logging
import os

from distckpt import catalog, leases, selection, trust
from distckpt.catalog import Entry, Problem, RootRecord
from distckpt.checkpoint import Checkpoint
from distckpt.durable import GONE, REAL, Files
from distckpt.errors import ConfigError, MarkerError, NoUsableCheckpoint, StepNotFound
from distckpt.layout import MAIN, Layout, Naming
from distckpt.owned import infer_naming
from distckpt.runtime import SYSTEM, Runtime

log = logging.getLogger(__name__)


class Root:
    """A root as a reader sees it. Every method reads afresh; nothing is cached and nothing is claimed."""

    def __init__(self, path: str | os.PathLike[str], files: Files = REAL, runtime: Runtime = SYSTEM) -> None:
        self.layout = Layout.at(path)
        self.files, self.runtime = files, runtime
        if not files.is_dir(self.layout.root):
            raise ConfigError(f"root {self.layout.root} is not a directory")
        self.record: RootRecord | None = catalog.read_record(files, self.layout)
        naming = self.record.naming if self.record else infer_naming(files, self.layout)
        self.naming = naming or Naming.parse(catalog.DEFAULT_NAMING)

    def entries(self, series: str | None = None) -> list[Entry]:
        """Every checkpoint-named entry, committed or not, newest commit first. Reads heads only."""
        found = catalog.scan(self.files, self.layout, self.naming)
        return found if series is None else [e for e in found if e.series == series]

    def checkpoints(self, series: str = MAIN) -> list[Checkpoint]:
        """The committed checkpoints of ``series``, newest commit first; damaged ones are left out."""
        found = []
        for entry in self.entries(series):
            if entry.committed:
                try:
                    found.append(self.read(entry))
                except (MarkerError, OSError):
                    continue
        return found

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
        found = self.candidates(series)
        for entry in found.usable:
            problem = self.problem(entry)
            if problem is None:
                return self.read(entry)
            found.skipped[entry.name] = problem
        if found.skipped:
            raise NoUsableCheckpoint(
                f"root {self.layout.root} has {len(found.skipped)} candidates and none is usable: "
                + "; ".join(f"{name}: {why}" for name, why in list(found.skipped.items())[:5]), rejected=found.skipped)
        return None

    def problem(self, entry: Entry) -> str | None:
        """Why ``entry`` may not be used (marker, seal, sizes); None when it may."""
        path = self.layout.final(entry.name)
        try:
            found = catalog.read_marker(self.files, path)
        except MarkerError as error:
            return next(iter(error.files.values()))
        except OSError as error:
            return str(error)
        problems = catalog.check_files(self.files, path, found.files)
        return f"{problems[0].path} {problems[0].what}" if problems else None

    def at(self, step: int, series: str = MAIN) -> Checkpoint:
        """The committed checkpoint of ``step``; StepNotFound otherwise."""
        for entry in self.entries(series):
            if entry.step == step and entry.committed:
                return self.read(entry)
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
