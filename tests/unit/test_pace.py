"""What a stop takes: steps, saves and closes as measured, from the journal of the runs before and now; a virtual clock."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

import distckpt
from distckpt import journal, timing
from distckpt.coordination.gate import Act
from distckpt.durable import REAL
from distckpt.layout import Layout
from distckpt.owned import OwnedRoot
from distckpt.pace import Pace
from distckpt.testing.clock import VirtualClock, VirtualRuntime


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "CROSS_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


class Run:
    """Rank 0's clockwork, and a training loop that polls ``polls`` times."""

    def __init__(self, root: Path, clock: VirtualClock, grace: float | None = None, pid: int = 100) -> None:
        self.runtime = VirtualRuntime(clock, pid=pid, born=clock.now)
        self.runtime.sleep(7)  # set-up
        self.owned = OwnedRoot.open(REAL, Layout.at(root), self.runtime)
        self.polls = 0
        self.timing = timing.Timing(None, grace)
        self.timing.watch(self.owned)
        self.timing.polls = lambda: self.polls

    def train(self, steps: int, seconds: float) -> list[Act]:
        """A poll at the beginning of each step; rank 0 looks once a second, as its messenger does."""
        found = []
        for _ in range(steps):
            self.polls += 1
            for _ in range(max(int(seconds), 1)):
                act = self.timing.due()
                found += [act] if act else []
                self.runtime.sleep(seconds / max(int(seconds), 1))
        return found

    def save(self, seconds: float, behind: bool = False) -> dict[str, Any]:
        """A save that is committed now, as the committer notes it."""
        self.runtime.sleep(seconds)
        blocked = 0.0 if behind else seconds
        measured = self.owned.pace.commit(seconds, blocked, seconds - blocked, self.runtime.monotonic())
        self.owned.journal.event("committed", **measured)
        return measured

    def close(self, seconds: float) -> None:
        self.owned.pace.closing = self.runtime.monotonic()
        self.runtime.sleep(seconds)
        self.owned.close()
        self.runtime.die()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "is killed" in r.getMessage()]


def test_a_step_longer_than_the_grace_is_told_after_the_first_few_and_the_next_time_at_the_start(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without any save so far; and once."""
    clock = VirtualClock()
    run = Run(tmp_path, clock, grace=30.0)
    run.train(4, 20.0)
    assert warnings(caplog) == [], "too early to tell"
    run.train(4, 20.0)
    assert warnings(caplog) == [
        "this job is killed 30 s after a stop signal, and a stop takes up to 40.0 s (twice a step of 20.0 s): the save of a stop "
        "may not be finished. Raise the launcher's grace, signal earlier, or poll more often"]
    run.save(1.0)
    run.train(3, 20.0)
    assert len(warnings(caplog)) == 1
    run.close(2.0)
    caplog.clear()
    again = Run(tmp_path, clock, grace=30.0, pid=101)
    assert len(warnings(caplog)) == 1, "before the first step"
    assert "up to 43.0 s (twice a step of 20.0 s, a save of 1.0 s, close with 2.0 s)" in warnings(caplog)[0]
    again.close(0.0)


@pytest.mark.parametrize(("grace", "told"), [(None, 40), (60.0, 60)])
def test_the_launchers_grace_counts_where_none_is_given(
        grace: float | None, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture) -> None:
    """torchrun's, as its agent was told. What the user gave goes over it."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "run"),
                        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "40")):
        monkeypatch.setenv(name, value)
    run = Run(tmp_path, VirtualClock(), grace)
    run.train(8, 35.0)
    assert [text[:50] for text in warnings(caplog)] == [f"this job is killed {told} s after a stop signal, and a "[:50]]
    run.close(0.0)


@pytest.mark.parametrize("behind", [False, True])
def test_saves_are_no_part_of_steps_and_a_stop_waits_for_the_one_in_flight(behind: bool, tmp_path: Path,
                                                                          caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, VirtualClock(), grace=50.0)
    for _ in range(8):
        run.train(1, 2.0)
        run.save(20.0, behind)
    assert run.owned.pace.step_seconds == pytest.approx(22.0 if behind else 2.0), "here the clock of both is one"
    assert run.owned.pace.save_seconds == 20.0
    if behind:
        assert "the save in flight and a save of 20.0 s" in warnings(caplog)[0]
    else:
        assert run.owned.pace.stop_seconds() == 2 * 2.0 + 20.0 and warnings(caplog) == []
    run.close(0.0)


def test_the_first_steps_are_left_out_and_quick_ones_are_averages(tmp_path: Path) -> None:
    run = Run(tmp_path, VirtualClock())
    run.train(1, 90.0)
    assert run.owned.pace.setup == 7.0
    for _ in range(20):
        run.polls += 99
        run.train(1, 1.0)
    assert run.owned.pace.step_seconds == pytest.approx(0.01)
    run.close(0.0)


def test_B122_the_stop_is_told_as_early_as_the_last_ones_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    """From the word to the commit, and close with it; the least is a minute. How long, and of what, is said."""
    caplog.set_level(logging.INFO)
    clock = VirtualClock()
    first = Run(tmp_path, clock)
    first.train(10, 3.0)
    first.timing.heard(Act("stop", "SIGUSR1 on rank 1", {"waited": 12.0}))
    first.runtime.sleep(70)
    assert "since_stop" not in first.owned.pace.commit(85.0, 85.0, 0.0, first.runtime.monotonic()), "begun before the word"
    measured = first.save(18.0)
    assert measured["since_stop"] == 100.0 and (measured["setup"], measured["step_seconds"]) == (7.0, 3.0)
    assert "since_stop" not in first.save(1.0), "of that stop only the first"
    first.close(20.0)
    told = [json.loads(line) for line in (tmp_path / ".distckpt/journal/1.jsonl").read_text().splitlines()]
    assert told[-1]["event"] == "released" and told[-1]["seconds"] == 20.0

    second = Run(tmp_path, clock, pid=101)
    end = second.runtime.time() + 600
    monkeypatch.setattr(timing, "end_as_told", lambda: end)
    second.timing._end = end
    assert second.train(500, 1.0) == [Act("stop", "the allocation ends soon")]
    assert ("180 s are kept for the stop: the least is 60 s, a stop takes up to 120.0 s (twice a step of 1.0 s, a save of "
            "18.0 s, close with 20.0 s; from the word to the commit it took 100.0 s before)") in caplog.text
    assert "ask for a longer allocation" not in caplog.text
    second.close(0.0)


def test_an_allocation_that_is_spent_on_set_up_and_stop_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, VirtualClock())
    run.timing._end = end = run.runtime.time() + 90
    monkeypatch.setattr(timing, "end_as_told", lambda: end)
    assert run.train(40, 1.0) == [Act("stop", "the allocation ends soon")]
    assert "after 31 s of training: its set-up took 7 s, and 60 s are kept for the stop; every restart costs" in caplog.text
    run.close(0.0)


def test_what_the_journal_holds_that_is_no_number_is_passed_over() -> None:
    pace = Pace()
    pace.recall([{"event": "committed", "seconds": "4", "since_stop": 9}, {"event": "committed"}, {"event": "released"},
                 {"event": "begin", "seconds": 9}, {"event": "committed", "seconds": True}])
    assert pace.stop_seconds() is None and pace.save_seconds is None
    pace.recall([{"event": "committed", "seconds": 4, "step_seconds": None, "since_stop": "x"}])
    assert pace.stop_seconds() == 4.0


def test_the_journal_holds_how_long_a_close_took(tmp_path: Path) -> None:
    distckpt.CheckpointManager(tmp_path / "r").close()
    released = [event for event in journal.read(REAL, Layout.at(tmp_path / "r")) if event["event"] == "released"]
    assert len(released) == 1 and released[0]["seconds"] >= 0
