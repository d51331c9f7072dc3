"""The parts of L4 that need no guest: the plan, the console's lines, the bytes, and what the host makes of what it hears."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distckpt.layout import rank_name
from distckpt.testing import checker
from scripts.proof import l4
from scripts.proof.layer import Budget
from scripts.proof.uml import golden
from scripts.proof.uml.plan import CUT, Phase, Plan, disagreement, line, parse


def test_a_plan_survives_the_way_into_the_guest() -> None:
    plan = Plan("4.2", 3, 1, [Phase("crash", 6), Phase(CUT, 3)], 8, {7: {0: "committed", 1: "committed"}, 8: {}}, 2)
    assert Plan.from_json(plan.to_json()) == plan


def test_console_lines_are_events_only_when_they_are_whole() -> None:
    assert parse(line(begin=3, fault="none")) == {"begin": 3, "fault": "none"}
    assert parse(line(begin=3)[:-1]) is None  # the kill came in the middle
    assert parse("EXT4-fs (ubda): recovery complete") is None
    assert parse("L4 3") is None


def test_the_draws_follow_from_seed_version_boot_and_phase() -> None:
    def drawn(version: str, seed: int, boot: int) -> float:
        return Plan(version, seed, boot, []).random(0, "crash").random()

    assert drawn("3", 1, 0) == drawn("3", 1, 0)
    assert len({drawn("3", 1, 0), drawn("4.2", 1, 0), drawn("3", 2, 0), drawn("3", 1, 1)}) == 4


def test_the_golden_names_are_those_the_library_gives() -> None:
    for name in golden.names():
        assert golden.on_disk(name, 1) == rank_name(name, 1, golden.WORLD)


def test_every_file_of_every_step_has_bytes_of_its_own() -> None:
    seen = [data for step in (1, 2) for data in golden.tree(step).values()]
    assert len(set(seen)) == len(seen) == 2 * (2 * len(golden.names()) + 1)
    assert golden.content(1) == checker.content_of(golden.tree(1)) != golden.content(2)


def test_committed_beside_aborted_is_a_disagreement_and_unknown_is_not() -> None:
    assert disagreement(4, {0: "committed", 1: "aborted"}) == "I7: the save of step 4 was {0: 'committed', 1: 'aborted'}"
    assert disagreement(4, {0: "committed", 1: "unknown"}) is None
    assert disagreement(4, {}) is None


class Script:
    """A machine that says what a test wrote down."""

    def __init__(self, *boots: list[dict[str, Any]]) -> None:
        self.boots = list(boots)
        self.plans: list[Plan] = []
        self.work = Path("/nowhere")

    def boot(self, plan: Plan, hear: Any) -> list[str]:
        self.plans.append(Plan.from_json(plan.to_json()))
        for event in self.boots.pop(0):
            hear(event)
        return ["the kernel's last words"]


def run_of(*boots: list[dict[str, Any]]) -> tuple[l4.Run, Script]:
    script = Script(*boots)
    return l4.Run("3", 5, script), script  # type: ignore[arg-type]


def told(step: int, rank: int, verdict: str, error: str = "") -> dict[str, Any]:
    return {"rank": rank, "step": step, "verdict": verdict, "error": error, "operations": 9, "seconds": 0.5}


def test_what_was_told_before_a_cut_is_judged_at_the_next_boot() -> None:
    run, script = run_of([{"phase": CUT, "tries": 3}, {"begin": 1}, told(1, 0, "committed"), told(1, 1, "committed"),
                          {"begin": 2}, {"held": "rename", "rank": 0}, {"cut": True}],
                         [{"judged": "after the cut", "wrong": []}, {"done": True}])
    run.boot([Phase(CUT, 3)])
    run.boot([])
    assert run.violations == []
    again = script.plans[1]
    assert (again.told, again.next_step, again.cuts, again.boot) == ({1: {0: "committed", 1: "committed"}, 2: {}}, 3, 1, 1)
    assert [(save.step, save.committed, save.open) for save in again.story().saves] == [(1, True, False), (2, False, True)]
    result = run.result(1.0)
    assert (result.runs, result.states, result.distinct, result.slowest) == (2, 1, 1, 0.5)


@pytest.mark.parametrize(("events", "words"), [
    ([{"judged": "x", "wrong": ["I2: step 1 is gone"]}, {"done": True}], "I2: step 1 is gone"),
    ([{"begin": 1}, told(1, 0, "committed"), told(1, 1, "aborted"), {"done": True}], "I7: "),
    ([{"hung": "no 'verdict' from rank [1]"}], "I6: no 'verdict'"),
    ([{"phase": "full", "tries": 1}, {"begin": 1}, told(1, 0, "aborted", "SaveError: boo"), {"done": True}], "I9: "),
    ([{"phase": "none", "tries": 1}], "the guest ended before its plan: it did not say why | the kernel's last words"),
    ([{"broken": "module nfsd"}], "the guest ended before its plan: module nfsd | the kernel's last words"),
    ([{"phase": "restart", "tries": 6}, {"done": True}], "nothing was struck under restart"),
])
def test_the_host_reports_what_is_wrong_and_how_to_replay_it(events: list[dict[str, Any]], words: str) -> None:
    run, _ = run_of(events)
    run.boot([])
    assert len(run.violations) == 1
    assert run.violations[0].startswith(words)
    assert "--seed 5 --version 3, boot 0" in run.violations[0]


def test_it_says_why_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l4, "_TOOLS", ("distckpt-no-such-tool",))
    monkeypatch.setattr(l4, "os", SimpleNamespace(geteuid=lambda: 1000))
    result = l4.run(Budget(1.0))
    assert "distckpt-no-such-tool" in result.skipped
    assert "user-mode-linux" in result.skipped
    assert json.dumps(result.skipped)
