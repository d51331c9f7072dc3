"""DeepSpeed's own files under the power cut: a real ZeRO-2 engine on two ranks, one of them slow, recorded by strace, and the
disks that a cut may leave."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed")

from scripts.proof.l1 import Limits, Walk
from scripts.proof.l1_cuts import Recorded
from scripts.proof.l1_scenarios import CHOSEN, Phase, Save, Scenario
from tests.proof.recording import recording

FEW = Limits(seen=4, lagging=2, next_save=20)
MUTANT = "no fsync of rank 1's data"

pytestmark = [pytest.mark.xdist_group("deepspeed"),
              pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")]


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, Recorded]]:
    """As it is, with a save in the background, and with rank 1's bytes never synced: {mutant or "": run}."""
    saves = (Save(1, "deepspeed"), Save(2, "deepspeed", background=True))
    with recording(lambda folder: [Scenario(f"{folder}/s{number}", 2, 1, (Phase(saves),), mutant=name)
                                   for number, name in enumerate(["", MUTANT])]) as found:
        yield found


def test_deepspeeds_files_survive_the_cuts(recorded: dict[str, Recorded]) -> None:
    walk = Walk(recorded[""], FEW).go(False)
    assert walk.violations == [] and walk.complete and len(walk.seen) > 100
    assert walk.go(True).violations == []


def test_bytes_that_one_rank_never_synced_are_found(recorded: dict[str, Recorded]) -> None:
    assert Walk(recorded[MUTANT], FEW).go(False, enough=1).violations


def test_a_quick_run_of_the_proof_has_it() -> None:
    """``scripts/prove --quick``, which CI runs, records the first three scenarios."""
    assert any(save.payload == "deepspeed" for one in CHOSEN[:3] for save in one.saves)
