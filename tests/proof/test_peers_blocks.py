"""Cuts inside a save on real file systems, under other libraries: bad disks are found where they can be, and only there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.proof import disks
from scripts.proof.peers import blocks
from scripts.proof.peers.judge import Picker, Server, Tally
from scripts.proof.peers.known import PEERS
from scripts.proof.peers.table import MUTANT
from tests.crash.forks import zygote

IMAGES = blocks.IMAGES + 1
"""More than one run gives: in the first one nothing is asked of the kernel."""
DCP, OURS = "torch DCP, same directory overwritten", "distckpt, 2 ranks"
CASES = ((DCP, ""), (OURS, ""), (OURS, MUTANT))
Found = dict[tuple[str, str], dict[str, Tally]]


def _replays(folder: str) -> Found:
    disks.isolate()
    scratch, found = Path(folder), Found()
    with ExitStack() as stack:
        def server(number: int, mode: str, mutant: str = "") -> Server:
            peer = next(peer for peer in PEERS if peer.name == CASES[number][0])
            program = Server(replace(peer, env={**peer.env, "PEER_MUTANT": mutant}), mode, scratch / f"{number}-{mode}.log")
            return stack.enter_context(program)

        savers = [server(number, "cuts", mutant) for number, (_, mutant) in enumerate(CASES)]  # all start at once
        rules = [server(0, "pick"), server(1, "pick")]
        for number, case in enumerate(CASES):
            peer = next(peer for peer in PEERS if peer.name == case[0])
            picker = Picker(peer, rules[min(number, 1)], scratch / f"states-{number}")
            found[case] = {system: blocks.replay(system, savers[number], picker, scratch, seed=3, most=IMAGES)
                           for system in blocks.SYSTEMS}
    return found


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    lacking = disks.missing("/dev/fuse", *(f"mkfs.{system}" for system in blocks.SYSTEMS))
    if lacking:
        pytest.skip(lacking)
    with tempfile.TemporaryDirectory(prefix="peers-blocks-", dir="/dev/shm") as folder:
        yield zygote(_replays, folder, timeout=300.0)


@pytest.mark.parametrize(("name", "mutant", "bad"), [(DCP, "", True), (OURS, "", False), (OURS, MUTANT, True)])
def test_cuts_inside_a_save_are_judged_by_the_peers_own_rule(name: str, mutant: str, bad: bool, found: Found) -> None:
    tallies = found[name, mutant]
    assert all(tally.states >= IMAGES for tally in tallies.values()), tallies
    assert any(tally.wrong for tally in tallies.values()) == bad, tallies
