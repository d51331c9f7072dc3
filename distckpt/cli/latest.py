"""``distckpt latest``: the path a script should resume from."""

from __future__ import annotations

import argparse

from distckpt import selection
from distckpt.checkpoint import Checkpoint
from distckpt.cli import exits, leftovers, target
from distckpt.cli.output import Output
from distckpt.errors import NoUsableCheckpoint, StepNotFound
from distckpt.reader import Root


def run(args: argparse.Namespace, out: Output) -> int:
    root = target.open_root(args.root, args.series)
    try:
        found = choose(root, args.series)
    except NoUsableCheckpoint as error:
        out.document({"path": None, "rejected": error.rejected})
        for name, why in error.rejected.items():
            out.note(f"{name}: {why}")
        raise NoUsableCheckpoint(f"no usable checkpoint in {root.layout.root} (series {args.series}): the lines above say why; "
                                 "'distckpt ls' shows all that is there", rejected=error.rejected) from error
    if found is None:
        out.document({"path": None, "rejected": {}})
        raise StepNotFound(f"{root.layout.root} has no checkpoint of series {args.series!r} yet: there is nothing to resume from")
    out.document({"path": found.path, "name": found.name, "step": found.step, "series": found.series, "seq": found.seq,
                  "attempt": found.attempt})
    out.path(found.path)
    for one in leftovers.leftovers(root):
        if one.fate == leftovers.PUBLISH and one.marker is not None and one.marker.head.series == args.series:
            out.note(f"{one.name} is newer, committed and not published: the next start of the run publishes it, and so does "
                     f"'distckpt gc {root.layout.root}'")
    return exits.OK


def choose(root: Root, series: str) -> Checkpoint | None:
    """What a run would resume from; None only where a fresh start loses nothing, NoUsableCheckpoint otherwise (S7)."""
    found = root.latest(series)
    if found is not None:
        return found
    rejected = {one.name: f"committed but not published; 'distckpt gc {root.layout.root}' publishes it"
                for one in leftovers.leftovers(root)
                if one.fate in (leftovers.PUBLISH, leftovers.RESTORE) and one.marker and one.marker.head.series == series}
    entries = root.entries()
    if not entries and not rejected:
        traces = selection.traces(root.files, root.layout, entries)
        if traces:
            rejected = {root.layout.root: f"it had a checkpoint once and has none now: {'; '.join(traces)}"}
    if rejected:
        raise NoUsableCheckpoint(f"root {root.layout.root} has no usable checkpoint: "
                                 + "; ".join(f"{name}: {why}" for name, why in rejected.items()), rejected=rejected)
    return None
