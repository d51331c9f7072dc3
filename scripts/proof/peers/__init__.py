"""The layer "peers": other checkpoint libraries under the power cuts that distckpt is under, each by its own rule.

    python -m scripts.proof.peers --write        all of it, to table.md
"""

from __future__ import annotations

import shutil

from scripts.proof import packages
from scripts.proof.layer import Budget, Layer, Result
from scripts.proof.peers.known import PEERS
from scripts.proof.peers.table import Row, rows

ROW_SECONDS = 240.0
ENOUGH = 5
"""Fewer other libraries than these are no comparison. Rows of one library count once."""


def _missing() -> str | None:
    return packages.lacking(lambda: [] if shutil.which("strace") else ["strace"], "strace")


def violations(row: Row) -> list[str]:
    """What is wrong with distckpt, or with the test itself; what is wrong with a peer is the table's."""
    if not row.peer.ours:
        return []
    if row.failed:
        return [f"peers: {row.peer.name} was not measured: {row.failed}"]
    found = [f"I2: {row.peer.name}, {mode}: {count} × {what}, first {tally.examples[what]}"
             for mode, tally in row.tallies.items() for what, count in tally.bad.items()]
    if row.wrong_cuts:
        found.append(f"I2: {row.peer.name}: {row.wrong_cuts} of {row.cuts} real cuts: {row.real}")
    blind = [kind for kind, modes in row.controls.items() if not any(tally.wrong for tally in modes.values())]
    return found + [f"peers: {row.peer.name} without any fsync of a {kind} passes: the test is blind" for kind in blind]


def _run(budget: Budget) -> Result:
    result, done, failed, measured = Result("peers"), [], [], set[str]()
    for row in rows(seed=budget.seed):
        result.runs += 1 + row.cuts
        result.states += sum(tally.generated for tally in row.tallies.values())
        result.distinct += sum(tally.states for tally in row.tallies.values())
        result.violations += violations(row)
        if row.failed:
            failed.append(f"{row.peer.name} ({row.failed})")
        else:
            done.append(row.peer.name)
            measured |= set() if row.peer.ours else {row.peer.program}
        if budget.left < ROW_SECONDS:
            break
    reached = len(done) + len(failed)
    left = [peer.name for peer in PEERS[reached:]]
    if len(measured) < ENOUGH:
        result.violations.append(f"peers: {len(measured)} other libraries ran, fewer than {ENOUGH}")
    result.seconds = budget.seconds - budget.left
    result.covers = f"seed {budget.seed}: {', '.join(done)}" + "".join(
        f"; {what}: {', '.join(names)}" for what, names in (("did not run", failed), ("no time was left for", left)) if names)
    return result


LAYER = Layer("peers", "other libraries under the same power cuts", _missing, _run, 0.0, 3600.0)
