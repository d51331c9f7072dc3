"""Rotation over several storage domains: planned once by rank 0 over what stands in all of them, done by attempt in each.

P3 holds on the intersection: the plan is made after the new checkpoint is published everywhere, counts only what every
committer has just read whole (S15), and spares what is leased in any domain. A domain that fails or dies half way keeps
more than it should, never less; what is then left of a victim in some domains only goes when the policy would not have
kept it either.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from typing import Any

from distckpt import leases, rotation
from distckpt.catalog import Entry
from distckpt.coordination.rounds import Report
from distckpt.domains.domains import Domains
from distckpt.errors import MarkerError
from distckpt.owned import OwnedRoot
from distckpt.retention import KeepAll, Policy
from distckpt.rotation import Context, Verdict

log = logging.getLogger(__name__)

View = Mapping[str, Any]


def makes_way(owned: OwnedRoot, name: str) -> bool:
    """Whether something stands under ``name`` that the new share replaces: rank 0 knows of nothing usable there, or replaces it
    as well. OSError for what must not go."""
    for entry in owned.entries():
        if entry.name != name:
            continue
        why = entry.problem
        if entry.head is not None and not why:
            why = "; ".join(owned.watch.holders(entry.head.attempt))
            if entry.head.run != owned.record.run:
                why = f"it belongs to another run ({entry.head.run})"
        if why:
            raise OSError(errno.EEXIST, f"it stands there and cannot be replaced: {why}", owned.layout.final(name))
        return True
    return False


def _here(owned: OwnedRoot, series: str) -> list[Entry]:
    return [e for e in owned.entries() if e.series == series and e.committed and e.head is not None
            and e.head.run == owned.record.run]


def _held(owned: OwnedRoot) -> dict[str, str]:
    return {attempt: "; ".join(holders) for attempt in leases.leased_attempts(owned.files, owned.layout)
            if (holders := owned.watch.holders(attempt))}


def view(owned: OwnedRoot, series: str, policy: Policy) -> Report:
    """What a domain has of ``series``: ``there``, of it ``whole``, and ``held`` by a lease or a pin, by attempt."""
    if isinstance(policy, KeepAll):
        return {}
    try:
        entries = _here(owned, series)
        whole = []
        for entry in entries:
            assert entry.head is not None
            try:
                owned.examine(entry)
                whole.append(entry.head.attempt)
            except (MarkerError, OSError) as error:
                log.warning("%s neither counts nor goes: %s", entry.name, error)
        return {"there": [e.head.attempt for e in entries if e.head is not None], "whole": whole,
                "held": _held(owned)}
    except OSError as error:
        return {"blind": str(error)}


def plan(owned: OwnedRoot, domains: Domains, series: str, policy: Policy, context: Context,
         views: Mapping[int, View]) -> Report:
    """On rank 0: ``victims``, which go everywhere, and ``torn``, which not every domain has any more; with what the lineage says.
    Without ``victims`` nothing is to be done now."""
    names = {rank: domains.host(index) for index, rank in enumerate(domains.committers)}
    if isinstance(policy, KeepAll):
        return {}
    try:
        blind = {names[rank]: known["blind"] for rank, known in views.items() if "blind" in known}
        if owned.no_rotation is not None or blind:
            log.warning("nothing is rotated: %s", owned.no_rotation or f"a node could not look: {blind}")
            return {}
        entries = _here(owned, series)
        here = {e.head.attempt for e in entries if e.head is not None}
        ignored, held = {**owned.in_doubt, **owned.rejections()}, _held(owned)
        for rank, known in views.items():
            ignored.update(dict.fromkeys(here - set(known["whole"]), f"not whole on {names[rank]}"))
            held.update(known["held"])
        full = Context(held, ignored, context.line, context.origin, context.fresh)
        verdicts = rotation.plan(series, entries, owned.record.run, policy, full, owned.examine)
        there = [here, *(set(known["there"]) for known in views.values())]
        return {"victims": [v.entry.head.attempt for v in verdicts if not v.keep and v.entry.head is not None],
                "torn": sorted(set.union(*there) - set.intersection(*there)),
                "line": context.line, "origin": context.origin, "fresh": sorted(context.fresh)}
    except (OSError, MarkerError) as error:
        log.warning("could not rotate %s: %s; it will be tried again after the next save", owned.layout.root, error)
        return {}


def carry_out(owned: OwnedRoot, series: str, policy: Policy, plan: Report) -> None:
    """Do in this domain what rank 0 planned. Never raises for the disk's sake."""
    if "victims" not in plan:
        return
    if owned.no_rotation is not None:
        log.warning("nothing is rotated until the next start: %s", owned.no_rotation)
        return
    try:
        entries = _here(owned, series)
        protected = rotation.protected_now(owned.files, owned.layout, entries, owned.watch)
        doomed = set(plan["victims"])
        torn = set(plan["torn"]) & {e.head.attempt for e in entries if e.head is not None}
        if torn:
            line = plan["line"]
            context = Context(protected, owned.rejections(),
                              None if line is None else tuple((branch, last) for branch, last in line), plan["origin"],
                              frozenset(plan["fresh"]))
            verdicts = rotation.plan(series, entries, owned.record.run, policy, context, owned.examine)
            doomed |= {v.entry.head.attempt for v in verdicts if v.entry.head is not None and not v.keep} & torn
        doomed -= set(protected)
        owned.carry_out([Verdict(e, e.head is not None and e.head.attempt not in doomed, "") for e in entries])
    except (OSError, MarkerError) as error:
        log.warning("could not rotate %s: %s; it will be tried again after the next save", owned.layout.root, error)
