"""A root before anybody owns it: its directories, its record, and under which names its checkpoints go."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from distckpt import catalog, recovery
from distckpt.catalog import RootRecord
from distckpt.durable import Files
from distckpt.errors import ConfigError
from distckpt.layout import SUBDIRECTORIES, Layout, Naming
from distckpt.marker import Head
from distckpt.ordered import make_dir, replace
from distckpt.ownership import STILL
from distckpt.patience import Patience
from distckpt.runtime import SYSTEM, Runtime

log = logging.getLogger(__name__)


def make_root(files: Files, layout: Layout, runtime: Runtime = SYSTEM) -> None:
    """The root and its own directories, each made with ``mkdir`` (umask and setgid hold) and made durable."""
    missing = []
    here = layout.root
    patience = Patience.towards(files, runtime, here, STILL)  # another host's ranks, or its last job, may have made them just now
    while not files.is_dir(here):
        missing.append(here)
        here = os.path.dirname(here)
    try:
        for path in reversed(missing):
            make_dir(files, path, patience)
        make_dir(files, layout.home(), patience)
        for name in SUBDIRECTORIES:
            make_dir(files, layout.home(name), patience)
    except (NotADirectoryError, FileExistsError) as error:
        raise ConfigError(f"root {layout.root} cannot be used: {error.filename} is there and is not a directory; choose "
                          "another root or move it away") from error
    except OSError as error:
        raise ConfigError(f"root {layout.root} is not writable: {error}; choose another root or fix its permissions") from error


def sync_root(files: Files, layout: Layout) -> None:
    """Make the root's own entry durable: its sub-directories, itself, and its ancestors up to the mount point (S9)."""
    for name in SUBDIRECTORIES:
        files.fsync_dir(layout.home(name))
    files.fsync_dir(layout.home())
    here = files.real(layout.root)
    top = files.mount_point(here)
    while True:
        try:
            files.fsync_dir(here)
        except PermissionError:
            log.debug("cannot sync %s: not readable; its entries were there before this run", here)
        if here == top:
            return
        here = os.path.dirname(here)


def known_heads(files: Files, layout: Layout) -> list[Head]:
    """Heads of all markers that stand under their own name in the root or in staging, newest first: what is left to go
    by when root.json is lost. The only commit may be one that was not published yet (S7)."""
    staging = layout.home("staging")
    places = [os.path.join(staging, g, a) for g in recovery.inside(files, staging)
              for a in recovery.inside(files, os.path.join(staging, g))]
    heads = []
    for place in [layout.root, *places]:
        for name in recovery.inside(files, place):
            entry = catalog.look(files, place, name, "dir", ("", 0))
            if entry is not None and entry.head is not None and entry.head.name == name:
                heads.append(entry.head)
    return sorted(heads, key=lambda h: (h.seq, h.step), reverse=True)


def infer_naming(files: Files, layout: Layout) -> Naming | None:
    """The template that the newest marker of the root was named by, when root.json is lost."""
    for head in known_heads(files, layout):
        stem = head.name if head.series == "main" else head.name.removesuffix(f"-{head.series}")
        digits = [stem[i:j] for i in range(len(stem)) for j in range(i + 1, len(stem) + 1)
                  if stem[i:j].isdecimal() and stem[i:j].isascii() and int(stem[i:j]) == head.step
                  and not stem[i - 1:i].isdigit() and not stem[j:j + 1].isdigit()]
        if digits:
            text = digits[-1]
            width = f":0{len(text)}d" if text.startswith("0") and len(text) > 1 else ""
            before, _, after = stem.rpartition(text)
            return Naming.parse(f"{before}{{step{width}}}{after}")
    return None


def agree_naming(files: Files, layout: Layout, record: RootRecord | None, asked: Naming | None) -> Naming:
    if record is not None:
        if asked is not None and asked != record.naming:
            raise ConfigError(f"root {layout.root} was made with naming {record.naming.template!r}, not {asked.template!r}; "
                              "leave naming out, or use another root")
        return record.naming
    return asked or infer_naming(files, layout) or Naming.parse(catalog.DEFAULT_NAMING)


def settle_record(files: Files, layout: Layout, runtime: Runtime, record: RootRecord | None, naming: Naming,
                   run_id: str | None, generation: int) -> RootRecord:
    """root.json, durable before the first attempt. If it was lost, the run id comes from the newest marker (S7)."""
    if record is not None:
        if run_id is not None and run_id != record.run:
            raise ConfigError(f"root {layout.root} belongs to run {record.run!r}, not {run_id!r}; use another root, or "
                              "leave run_id out to go on with that run")
        return record
    heads = known_heads(files, layout)
    record = RootRecord(run_id or (heads[0].run if heads else f"run-{runtime.token(6)}"), naming)
    replace(files, layout.record, record.to_bytes(), layout.staging(generation, "root.tmp"))
    return record


def await_newest(files: Files, layout: Layout, runtime: Runtime, waiting: Callable[[str], None]) -> None:
    """Wait until the target of ``latest`` is listed.

    A listing that this host remembers from before the last commit would hide that commit, its ``seq`` would be given again, and
    resume would go back behind it. ``latest`` is read by a fresh open, and its target is never rotated away.
    """
    patience = Patience.towards(files, runtime, layout.root, STILL)
    name = catalog.read_pointer(files, layout) if patience.seconds else None
    if name is None:
        return
    for _ in patience.looks():
        if any(item.name == name for item in files.scan(layout.root)):
            return
        waiting(f"'latest' names {name}, which {layout.root} does not list: looking again for up to {STILL:.0f} s, in case this "
                "host is shown an old listing")
    log.warning("'latest' of %s names %s, and this host did not see it there for %.0f s: it was removed by hand, or this mount "
                "caches listings for longer (acdirmax); going on with what is listed", layout.root, name, STILL)
