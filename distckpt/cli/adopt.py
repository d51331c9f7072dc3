"""``distckpt adopt``: take in directories that this run did not commit."""

from __future__ import annotations

import argparse
import os
from typing import Any

from distckpt import adopt as adoption
from distckpt import human
from distckpt.adopt import Candidate
from distckpt.cli import claim, exits, output, survey
from distckpt.cli.output import Output
from distckpt.cli.target import UsageError
from distckpt.errors import ConfigError, DistckptError
from distckpt.layout import Naming
from distckpt.marker import Marker
from distckpt.reader import Root


def run(args: argparse.Namespace, out: Output) -> int:
    if bool(args.names) == args.all:
        raise UsageError("adopt needs the NAMEs of directories in the root, or --all")
    if args.metric and (args.all or len(args.names) != 1):
        raise UsageError("--metric belongs to one checkpoint: adopt it alone")
    root = Root(args.root)
    asked = Naming.parse(args.naming) if args.naming is not None else None
    if asked is not None and root.record is None:
        root.naming = asked
    elif asked is not None and asked != root.naming:
        raise ConfigError(f"root {root.layout.root} has naming {root.naming.template!r}, not {asked.template!r}: leave "
                          "--naming out")
    names = _names(root, args)
    found, refused = _examine(root, names, root.record.run if root.record else None)
    if refused and not args.all or not found:
        return _refuse(out, refused)
    if args.dry_run:
        out.document({"root": root.layout.root, "dry_run": True, "adopted": [_document(c, None) for c in found],
                      "refused": refused})
        out.table(("NAME", ">STEP", "SERIES", ">FILES", ">SIZE", ">WORLD", "FROM"), [_cells(c) for c in found])
        _say_refused(out, refused)
        out.line(f"would adopt {output.plural(len(found), 'directory')}; nothing was changed (--dry-run)")
        return exits.OK
    adopted: list[tuple[Candidate, Marker]] = []
    with claim.claimed(root.files, root.layout, root.runtime, out, asked) as owned:
        # Looked at again: what recovery published or another writer did before the claim counts now.
        found, refused = _examine(root, names, owned.record.run)
        branch = root.runtime.token(8)
        for candidate in found:
            out.progress(f"reading {candidate.name}, {human.size(candidate.size)}")
            try:
                adopted.append((candidate, adoption.adopt(owned, candidate, branch, dict(args.metric))))
            except DistckptError as error:
                refused[candidate.name] = str(error)
            out.progress("")
    out.document({"root": root.layout.root, "dry_run": False, "adopted": [_document(c, m) for c, m in adopted],
                  "refused": refused})
    for candidate, marker in adopted:
        out.line(f"adopted {candidate.name}: {output.plural(len(candidate.files), 'file')}, {human.size(candidate.size)}, "
                 f"{output.plural(candidate.world, 'rank')}, attempt {marker.head.attempt}"
                 + (f" (was {candidate.former.head.name} of {candidate.former.head.run})" if candidate.former else ""))
    _say_refused(out, refused)
    if any(candidate.former is None for candidate, _ in adopted):
        out.note("that these directories are complete was not proven: nobody saw them being written; load one before you rely "
                 "on it")
    return exits.FAILED if refused else exits.OK


def _names(root: Root, args: argparse.Namespace) -> list[str]:
    """What to adopt. ``--all`` takes only what has no marker at all: another run's checkpoint must be named."""
    if not args.all:
        return list(dict.fromkeys(_plain(root, name) for name in args.names))
    names = [e.name for e in root.entries() if survey.never_committed(root, e)
             and root.files.stat(root.layout.final(e.name)).kind == "dir"]
    if not names:
        raise ConfigError(f"{root.layout.root} has nothing to adopt: no directory named like {root.naming.template!r} is without "
                          "a marker; --naming names another template, and another run's checkpoint is adopted by NAME only")
    return names


def _plain(root: Root, name: str) -> str:
    """``name``, also where the shell completed it to a path into the root."""
    head, tail = os.path.split(name.rstrip("/"))
    return tail if head and root.files.real(head) == root.files.real(root.layout.root) else name


def _examine(root: Root, names: list[str], run: str | None) -> tuple[list[Candidate], dict[str, str]]:
    found, refused = [], {}
    for name in names:
        try:
            found.append(adoption.examine(root.files, root.layout, root.naming, run, name))
        except DistckptError as error:
            refused[name] = str(error)
    return found, refused


def _refuse(out: Output, refused: dict[str, str]) -> int:
    out.document({"adopted": [], "refused": refused})
    _say_refused(out, refused)
    return exits.FAILED


def _say_refused(out: Output, refused: dict[str, str]) -> None:
    for why in refused.values():
        out.note(why)


def _cells(candidate: Candidate) -> tuple[str, ...]:
    origin = f"run {candidate.former.head.run}" if candidate.former is not None else "no marker"
    return (candidate.name, str(candidate.step), candidate.series, str(len(candidate.files)), human.size(candidate.size),
            str(candidate.world), origin)


def _document(candidate: Candidate, marker: Marker | None) -> dict[str, Any]:
    return {"name": candidate.name, "step": candidate.step, "series": candidate.series, "files": len(candidate.files),
            "bytes": candidate.size, "world": candidate.world, "attempt": marker.head.attempt if marker else None,
            "former_run": candidate.former.head.run if candidate.former else None}
