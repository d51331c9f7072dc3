"""The walk of L0 that is whole: it is gone on with, it forgets no violation, and it counts what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distckpt.testing.simulation import Run
from scripts.proof import exhaustive
from scripts.proof.cases import Case, Tally
from scripts.proof.exhaustive import FAMILIES, Family, Share
from scripts.proof.layer import Budget


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> list[Family]:
    """Two families of a few runs that nobody has to run, of which the second finds something."""

    def walk(tally: Tally, share: Share) -> None:
        for number in list(range(5))[share]:
            tally.note(Case("one", seed=number), Run())

    def bad(tally: Tally, share: Share) -> None:
        tally.note(Case("one"), Run(violations=["I1: on purpose"]))

    found = [Family("runs of nothing", walk, 2), Family("runs of something bad", bad)]
    monkeypatch.setattr(exhaustive, "FAMILIES", found)
    return found


def test_it_is_gone_on_with(families: list[Family], tmp_path: Path) -> None:
    path = tmp_path / "walked.jsonl"
    first = exhaustive.run(Budget(100.0), path)
    assert first.runs == 6 and len(first.violations) == 1
    assert first.covers == "all 5 runs of nothing; no runs of something bad yet"
    again = exhaustive.run(Budget(100.0), path)
    assert again.runs == 1 and len(again.violations) == 1, "what was violated is walked again, and nothing else"
    assert again.covers == first.covers


def test_what_was_walked_for_other_code_does_not_count(families: list[Family], tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "walked.jsonl"
    exhaustive.run(Budget(100.0), path)
    monkeypatch.setattr("scripts.proof.__main__.code", lambda: "other")
    assert exhaustive.run(Budget(100.0), path).runs == 6


def test_no_part_is_begun_when_the_time_is_up(families: list[Family], tmp_path: Path) -> None:
    result = exhaustive.run(Budget(0.0), tmp_path / "walked.jsonl")
    assert result.runs == 0
    assert result.covers == "no runs of nothing yet; no runs of something bad yet"


def test_the_shares_of_a_family_are_all_of_it() -> None:
    assert len({family.title for family in FAMILIES}) == len(FAMILIES)
    wanted = "pairs of fail of rank 1, then fail of rank 1, of one"
    family = next(family for family in FAMILIES if family.title.startswith(wanted))
    shared, whole = Tally(), Tally()
    for share in range(family.shares):
        family.walk(shared, slice(share, None, family.shares))
    family.walk(whole, slice(0, None, 1))
    assert shared.result.runs == whole.result.runs >= 5


def test_a_fault_is_moved_on_until_it_does_not_fire() -> None:
    tally = Tally()
    struck: list[Any] = [strike.at for strike, _ in exhaustive._until_quiet(
        tally, Case("one"), 0, (exhaustive.Strike("kill", 1, at) for at in range(40, 1000)))]
    top = Case("one").run().operations[1]
    assert struck == list(range(40, top + 1))
    assert tally.result.runs == len(struck) and tally.result.violations == []
