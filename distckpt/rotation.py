"""Taking old checkpoints away: the plan with its reasons, and the moves.

Runs only after a newer checkpoint is committed and its name is durable (P3), by the owner only, off the caller's path (see
``afterwards``). A victim leaves by one rename into trash; the unlinks come later (see ``janitor``). Errors here are warnings:
the new checkpoint is committed, whatever becomes of the old ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from distckpt import catalog, leases
from distckpt.catalog import Entry
from distckpt.durable import Files
from distckpt.errors import MarkerError
from distckpt.layout import Layout
from distckpt.marker import Marker
from distckpt.ordered import move
from distckpt.retention import KeepAll, Policy, Record, newest_first

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What rotation decided about one checkpoint, and why."""

    entry: Entry
    keep: bool
    reason: str


@dataclass(frozen=True)
class Context:
    """What the plan must know besides the policy.

    ``protected``: attempts that stay whatever the policy says, with the reason. ``ignored``: attempts that neither
    count nor go (rejected ones, ones in doubt). ``line``: (branch, last seq) pairs this run descends from, nearest
    first; None when no lineage is known. ``origin``: the attempt this run was resumed from.
    """

    protected: Mapping[str, str]
    ignored: Mapping[str, str]
    line: tuple[tuple[str, int], ...] | None = None
    origin: str | None = None
    fresh: Collection[str] = ()


def in_line(found: Marker, line: tuple[tuple[str, int], ...] | None) -> bool:
    """Whether this run descends from, or made, the checkpoint of ``found``."""
    if line is None:
        return True
    return any(found.branch == branch and found.head.seq <= last for branch, last in line)


def plan(series: str, entries: Sequence[Entry], run: str, policy: Policy, context: Context,
         read: Callable[[Entry], Marker]) -> list[Verdict]:
    """What stays and what goes of one series, newest first, with the reason for each.

    ``read`` gives the whole marker and raises where it, or a file's size, is wrong: a head orders, it never counts,
    so survivors are read whole before anything goes (S15). Damaged ones neither count nor go.
    """
    verdicts: list[Verdict] = []
    good: dict[str, tuple[Entry, Marker]] = {}
    for entry in entries:
        if entry.series != series:
            continue
        if entry.head is None or entry.problem:
            verdicts.append(Verdict(entry, True, f"not a checkpoint, left alone: {entry.problem}"))
        elif entry.head.run != run:
            verdicts.append(Verdict(entry, True, f"belongs to another run ({entry.head.run}), left alone"))
        elif entry.head.attempt in context.ignored:
            verdicts.append(Verdict(entry, True, f"neither counts nor goes: {context.ignored[entry.head.attempt]}"))
        elif isinstance(policy, KeepAll):
            verdicts.append(Verdict(entry, True, "no limit is set"))
        else:
            try:
                good[entry.head.attempt] = entry, read(entry)
            except (MarkerError, OSError) as error:
                verdicts.append(Verdict(entry, True, f"damaged, neither counts nor goes: {error}"))
    records = {attempt: Record(attempt, entry.step, found.head.seq, not in_line(found, context.line), found.metrics)
               for attempt, (entry, found) in good.items()}
    kept = policy(list(records.values()))
    order = newest_first(records.values())
    newer_than_origin = 0
    for record in order:
        entry, _ = good[record.attempt]
        reasons = [kept[record.attempt]] if record.attempt in kept else []
        if record is order[0]:
            reasons.append("the newest")
        if record.attempt in context.protected:
            reasons.append(context.protected[record.attempt])
        if record.attempt == context.origin and newer_than_origin < _slots(policy):
            reasons.append("this run was resumed from it, and too few newer ones stand")
        if record.attempt in context.fresh:
            newer_than_origin += 1
        verdicts.append(Verdict(entry, bool(reasons), "; ".join(reasons) or _outside(policy)))
    position = {id(entry): index for index, entry in enumerate(entries)}
    verdicts.sort(key=lambda v: position[id(v.entry)])
    return verdicts


def _slots(policy: Policy) -> int:
    return max((getattr(part, "count", 1) for part in policy.parts if type(part).__name__ == "KeepLast"), default=1)


def _outside(policy: Policy) -> str:
    return f"outside retention {policy.spec}"


def move_to_trash(files: Files, layout: Layout, generation: int, victims: Sequence[Entry],
                  watch: leases.Watch) -> list[str]:
    """Rename each victim into trash, durably, and give the paths that may now be deleted.

    A lease may be taken between the plan and the move: the leases are read again after it, and what is leased by then
    moves back (S22). Both parents are synced before anybody may unlink (S21).
    """
    moved: list[tuple[Entry, str]] = []
    gone: list[str] = []
    for entry in victims:
        assert entry.head is not None
        target = layout.trash(generation, f"{entry.name}.{entry.head.attempt}")
        try:
            move(files, layout.final(entry.name), target)
        except OSError as error:
            log.warning("could not rotate %s away: %s; it will be tried again after the next save", entry.name, error)
            continue
        moved.append((entry, target))
    if not moved:
        return []
    for entry, target in moved:
        assert entry.head is not None
        try:
            holders = watch.holders(entry.head.attempt)
        except OSError as error:
            holders = [f"its leases cannot be read ({error})"]  # cannot tell is not free
        if not holders:
            gone.append(target)
            continue
        try:
            move(files, target, layout.final(entry.name))
            log.info("%s stays: %s", entry.name, "; ".join(holders))
        except OSError as error:
            log.warning("%s could not be moved back from %s (%s) and stays there: %s", entry.name, target, error,
                        "; ".join(holders))
    files.fsync_dir(layout.trash(generation))
    files.fsync_dir(layout.root)
    return gone


def protected_now(files: Files, layout: Layout, entries: Sequence[Entry], watch: leases.Watch) -> dict[str, str]:
    """Attempts that stay whatever any policy says: leased or pinned ones, and the target of ``latest``."""
    found: dict[str, str] = {}
    pointer = catalog.read_pointer(files, layout)
    leased = set(leases.leased_attempts(files, layout))
    for entry in entries:
        if entry.head is None:
            continue
        reasons = watch.holders(entry.head.attempt) if entry.head.attempt in leased else []
        if entry.name == pointer:
            reasons.append("'latest' points to it")
        if reasons:
            found[entry.head.attempt] = "; ".join(reasons)
    return found
