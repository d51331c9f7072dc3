"""L1 finds what it is there to find: each mutant of the real code turns it red, and the code as it is does not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.proof.l1 import QUICK_BATCH, Limits, Walk
from scripts.proof.l1_cuts import Recorded
from scripts.proof.l1_mutants import BY_PROCESS, MUTANTS, OF_OPTIONS, ONLY_LAGGING
from scripts.proof.l1_scenarios import CHOSEN, EVERY_OPTION, Phase, Save, Scenario
from tests.proof.recording import recording

FEW = Limits(seen=10, lagging=4, next_save=10)
NEEDS_TWO = ("no fsync of rank 1's data", ONLY_LAGGING)

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, Recorded]]:
    """One recording of the code as it is and of every mutant: {mutant or "": run}."""
    with recording(_scenarios) as found:
        yield found


def _scenarios(folder: Path) -> Iterator[Scenario]:
    for number, name in enumerate(["", *MUTANTS]):
        two = name in ("", *NEEDS_TWO)
        saves = tuple(Save(step) for step in ((1, 2) if two else (1, 2, 3)))
        yield Scenario(f"{folder}/s{number}", 2 if two else 1, 1 if two else 2, (Phase(saves),), mutant=name)


def test_the_code_as_it_is_survives_the_cuts(recorded: dict[str, Recorded]) -> None:
    walk = Walk(recorded[""], FEW).go(False)
    assert walk.violations == []
    assert walk.complete and len(walk.seen) > 100 and walk.states > 2 * len(walk.seen)


@pytest.mark.parametrize("name", [name for name in MUTANTS if name != ONLY_LAGGING])
def test_a_mutant_is_found(name: str, recorded: dict[str, Recorded]) -> None:
    assert Walk(recorded[name], FEW).go(False, enough=1).violations


def test_an_ack_that_comes_too_early_is_found_only_by_a_rank_that_lags(recorded: dict[str, Recorded]) -> None:
    walk = Walk(recorded[ONLY_LAGGING], FEW).go(False)
    assert walk.violations == []
    assert walk.go(True, enough=1).violations


# -- every option on -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def with_options() -> Iterator[dict[str, Recorded]]:
    """One rank with every option on, as it is and with each of their mutants. Only what shows in the writer process has one."""
    with recording(_every_option) as found:
        yield found


def _every_option(folder: Path) -> Iterator[Scenario]:
    (phase,) = EVERY_OPTION.phases
    for number, name in enumerate(["", *OF_OPTIONS]):
        saves = tuple(save for save in phase.saves if save.series == "main" or not name)[:None if not name else 2]
        yield replace(EVERY_OPTION, base=f"{folder}/o{number}", world=1, phases=(replace(phase, saves=saves),), mutant=name,
                      writer="process" if name == BY_PROCESS else "thread")


def test_a_quick_run_begins_with_every_option_on() -> None:
    """And with what it had before: CI runs no other."""
    assert CHOSEN[0] is EVERY_OPTION and QUICK_BATCH >= 4
    (phase,) = EVERY_OPTION.phases
    assert EVERY_OPTION.writer == "process" and EVERY_OPTION.dedup and EVERY_OPTION.best and EVERY_OPTION.digest == "sha256"
    assert all(save.background and save.staging == "overlap" for save in phase.saves)
    assert len({save.series for save in phase.saves}) == 2


def test_every_option_on_survives_the_cuts(with_options: dict[str, Recorded]) -> None:
    walk = Walk(with_options[""], Limits(seen=2, lagging=1, next_save=20)).go(False)
    assert walk.violations == []
    assert walk.complete and len(walk.seen) > 50


@pytest.mark.parametrize("name", OF_OPTIONS)
def test_a_mutant_of_an_option_is_found(name: str, with_options: dict[str, Recorded]) -> None:
    assert Walk(with_options[name], FEW).go(False, enough=1).violations
