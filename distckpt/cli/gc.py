"""``distckpt gc``: settle what crashes left, as the next start of the run would."""

from __future__ import annotations

import argparse
from typing import Any

from distckpt import human
from distckpt.cli import claim, exits, output, target
from distckpt.cli.leftovers import LIVE, PUBLISH, REMOVE, RESTORE, Leftover, leftovers, size_of
from distckpt.cli.output import Output

_DONE = {PUBLISH: "published", RESTORE: "put back", REMOVE: "removed"}
_COLUMNS = ("CHECKPOINT", "ATTEMPT", "WHERE", ">GENERATION", ">SIZE", "FATE", "WHY")


def run(args: argparse.Namespace, out: Output) -> int:
    root = target.open_root(args.root)
    found = leftovers(root)
    sizes = [size_of(root.files, one.path) for one in found]
    if args.dry_run:
        _report(out, root.layout.root, found, sizes, [one.fate for one in found], dry=True)
        return exits.OK
    with claim.claimed(root.files, root.layout, root.runtime, out) as owned:
        left = claim.drain(owned, out)
        attempts = {e.head.attempt for e in owned.entries() if e.head is not None}
    fates = [_outcome(one, attempts, left) for one in found]
    _report(out, root.layout.root, found, sizes, fates, dry=False)
    if left:
        out.note(f"{output.plural(len(left), 'entry')} in trash could not be deleted, such as {left[0]}: the warnings above say "
                 "why; run this again")
    return exits.FAILED if left else exits.OK


def _outcome(one: Leftover, standing: set[str], left: list[str]) -> str:
    """What became of it, looked up and not assumed."""
    attempt = one.marker.head.attempt if one.marker is not None else one.id
    if attempt in standing and (one.place == "staging" or one.fate == RESTORE):
        return _DONE[RESTORE if one.fate == RESTORE else PUBLISH]
    return "STANDS" if any(path.rpartition("/")[2].startswith(one.id) for path in left) else _DONE[REMOVE]


def _report(out: Output, root: str, found: list[Leftover], sizes: list[int], fates: list[str], dry: bool) -> None:
    freed = sum(size for one, size, fate in zip(found, sizes, fates, strict=True) if fate in (REMOVE, _DONE[REMOVE]))
    rows = [(one.name, one.id if one.place == "staging" else one.id.removeprefix(f"{one.name}."), one.place, str(one.generation),
             human.size(size), fate, one.why) for one, size, fate in zip(found, sizes, fates, strict=True)]
    listed: list[dict[str, Any]] = [
        {"name": one.name, "id": one.id, "place": one.place, "generation": one.generation, "bytes": size, "fate": fate,
         "reason": one.why} for one, size, fate in zip(found, sizes, fates, strict=True)]
    out.document({"root": root, "dry_run": dry, "leftovers": listed, "bytes": freed})
    if not found:
        out.line(f"{root}: nothing in staging or trash, nothing to do")
        return
    out.table(_COLUMNS, rows)
    published = sum(fate in (PUBLISH, RESTORE, _DONE[PUBLISH], _DONE[RESTORE]) for fate in fates)
    removed = sum(fate in (REMOVE, _DONE[REMOVE]) for fate in fates)
    verb = "would publish" if dry else "published"
    line = f"{verb} {published}, {'remove' if dry else 'removed'} {removed} ({human.size(freed)})"
    live = fates.count(LIVE)
    out.line(line + (f"; {live} in progress stay" if live else "") + ("; nothing was changed (--dry-run)" if dry else ""))
