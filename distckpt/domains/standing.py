"""What stands in every storage domain, from what each of them holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distckpt.domains.domains import Domains
from distckpt.errors import ConfigError

Report = Mapping[str, Any]


@dataclass
class Abroad:
    """What rank 0's own disk does not show. ``missing``: (series, name, reason) of checkpoints that only others hold; ``traces``:
    why their roots are no fresh ones."""

    missing: list[tuple[str, str, str]] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)


def decide(domains: Domains, holds: Sequence[Report], run_id: str | None, new: str, default: str) -> dict[str, Any]:
    """One run, one naming, one count of commits, and which staged shares are rolled forward.

    A share that is published in any domain was decided: rank 0's publish came after every domain's marker (see ``parts``).
    What is published nowhere was not, or no reader can have seen it.
    """
    runs = {domains.name(i): held["run"] for i, held in enumerate(holds) if held["run"]}
    namings = {domains.name(i): held["naming"] for i, held in enumerate(holds) if held["naming"]}
    for what, found in (("run", runs), ("naming", namings)):
        if len(set(found.values())) > 1:
            raise ConfigError(f"the nodes' roots are not of one {what}: {'; '.join(f'{v!r} on {k}' for k, v in found.items())}. "
                              "Run the job on the nodes that belong together, or use another root")
    run = next(iter(runs.values()), run_id or new)
    if run_id is not None and run != run_id:
        raise ConfigError(f"the root belongs to run {run!r} on {next(iter(runs))}, not {run_id!r}; use another root, or leave "
                          "run_id out to go on with that run")
    return {"run": run, "naming": next(iter(namings.values()), default), "seq": max(held["seq"] for held in holds),
            "decided": sorted({attempt for held in holds for attempt in held["published"]}),
            "generations": [held["generation"] for held in holds]}


def partial(domains: Domains, holds: Sequence[Report]) -> tuple[dict[str, str], Abroad]:
    """(attempt to reason of what cannot be used because it does not stand in every domain, what of it rank 0 does not see)."""
    where: dict[str, dict[int, list[Any]]] = {}
    for index, held in enumerate(holds):
        for row in held["entries"]:
            where.setdefault(row[0], {})[index] = row
    reasons = {}
    abroad = Abroad()
    rejected = {attempt: f"on {domains.name(index)} it was {why}" for index, held in enumerate(holds)
                for attempt, why in held["rejected"].items()}
    for attempt, rows in where.items():
        why = _why_not(domains, holds, rows) or rejected.get(attempt)
        if why is None:
            continue
        reasons[attempt] = why
        if 0 not in rows:
            _, name, series, *_ = next(iter(rows.values()))
            abroad.missing.append((series, name, why))
    for index, held in enumerate(holds[1:], 1):
        abroad.traces += [f"{trace} on {domains.host(index)}" for trace in held["traces"]]
    return reasons, abroad


def _why_not(domains: Domains, holds: Sequence[Report], rows: Mapping[int, list[Any]]) -> str | None:
    count = len(domains.all)
    missing = [index for index in range(count) if index not in rows]
    shares = {(row[5], row[6]) for row in rows.values()}
    if not missing:
        if shares == {(0, 1)} or shares == {(part, count) for part in range(count)}:
            return None
        return f"its shares are {sorted(shares)} and the job runs on {count} nodes' disks: other nodes, or a copied root"
    have = ", ".join(domains.name(index) for index in sorted(rows))
    text = f"it stands on {have} and not on {'; '.join(domains.name(index) for index in missing[:4])}"
    empty = [index for index in missing if not holds[index]["entries"]]
    if empty:
        best = max(rows, key=lambda index: len(holds[index]["entries"]))
        steps = [row[4] for row in holds[best]["entries"]]
        text += (f". {domains.host(empty[0])} holds no checkpoint of this run, and {domains.host(best)} has {len(steps)}, the "
                 f"newest of step {max(steps)}: a node that was replaced, or a disk that was emptied? Bring it back")
    return text
