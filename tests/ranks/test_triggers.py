"""What makes ``poll`` ask for a save or a stop: steps, rank 0's clock, an operator, the end of the allocation. Alike on all."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt import timing
from distckpt.coordination.gate import Act
from distckpt.durable import REAL
from distckpt.errors import ConfigError, RankDisagreement, SaveError
from distckpt.layout import Layout
from distckpt.owned import OwnedRoot
from distckpt.record import CommitRecord
from distckpt.runtime import SYSTEM
from distckpt.steps import Schedule, Todo, Tolerate
from tests.inprocess import Job, await_, events, same_error, values
from tests.ranks.test_background_failures import Piece, _boom, published

Asked = list[tuple[int, bool, bool, str]]


def _asked(manager: distckpt.CheckpointManager, polls: int, pause: float = 0.002, stop_at: int = 1, save: bool = True) -> Asked:
    """(boundary, save, stop, reason) of every poll that asks for something, until so many did."""
    found: Asked = []
    for step in range(1, polls):
        todo = manager.poll(step)
        if todo.save or todo.stop:
            found.append((step, *todo))
            if todo.save and save:
                manager.save(step, {"w": torch.ones(3)}, background=True)
            if len(found) >= stop_at:
                break
        time.sleep(pause * (1 + manager.rank))
    return found


def _alike(outcomes: list[Any]) -> Asked:
    found = values(outcomes)
    assert all(f == found[0] for f in found), found
    return found[0]  # type: ignore[no-any-return]


def test_save_every_so_many_steps(tmp_path: Path) -> None:
    job = Job(tmp_path / "root", 2, save_every=10)
    found = _alike(job.run(lambda manager: _asked(manager, 35, 0.0, 99)))
    assert found == [(step, True, False, "every 10 steps") for step in (10, 20, 30)]
    assert published(tmp_path / "root") == ["step-10", "step-20", "step-30"]


@pytest.mark.parametrize("at_start", [False, True])
def test_step_0_is_asked_for_only_on_wish(at_start: bool, tmp_path: Path) -> None:
    job = Job(tmp_path / "root", 2, save_every=5, save_at_start=at_start)

    def train(manager: distckpt.CheckpointManager) -> list[Todo]:
        first = manager.poll(0)
        if first.save:
            manager.save(0, {"w": torch.ones(3)}, background=True)
        return [first, manager.poll(0)]

    assert values(job.run(train)) == [[Todo(at_start, False, "at start" if at_start else ""), Todo()]] * 2


def test_B56_the_clock_of_rank_0_decides_for_all(tmp_path: Path) -> None:
    """Every 0.25 s, ranks at different paces: each save at one boundary for all, and not at every poll."""
    job = Job(tmp_path / "root", 3, save_every_minutes=0.25 / 60)
    begun = time.monotonic()
    found = _alike(job.run(lambda manager: _asked(manager, 100_000, 0.001, 2)))
    assert len(found) == 2 and found[0][0] < found[1][0] and {f[1:] for f in found} == {(True, False, "every 0.00416667 minutes")}
    assert time.monotonic() - begun > 1.0, "rank 0 looks at its clock once a second"
    assert published(tmp_path / "root") == sorted(f"step-{f[0]}" for f in found)


def test_an_operators_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_LOOK_FOR_REQUESTS", 0.05)
    job, root = Job(tmp_path / "root", 2), tmp_path / "root"

    def train(manager: distckpt.CheckpointManager) -> Asked:
        if manager.rank == 0:
            (root / ".distckpt/requests").mkdir(exist_ok=True)
            (root / ".distckpt/requests/save").write_text("")
        return _asked(manager, 100_000)

    found = _alike(job.run(train))
    assert [f[1:] for f in found] == [(True, False, "requested by an operator")]
    assert list((root / ".distckpt/requests").iterdir()) == [], "taken away when it was seen"


def test_the_end_of_the_allocation_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 61)))
    job = Job(tmp_path / "root", 2)
    found = _alike(job.run(lambda manager: _asked(manager, 100_000)))
    assert [f[1:] for f in found] == [(True, True, "the allocation ends soon")]
    assert published(tmp_path / "root") == [f"step-{found[0][0]}"]


def test_a_job_that_was_given_more_time_meanwhile_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [time.time() + 30, time.time() + 3600]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(timing, "end_as_told", lambda: ends.pop(0) if len(ends) > 1 else ends[0])
    owned = OwnedRoot.open(REAL, Layout.at(tmp_path / "root"), SYSTEM)
    watch = timing.Timing(None, None)
    watch.watch(owned)
    await_(lambda: watch._end is not None)
    assert watch.due() is None and watch._end == ends[0], "asked again before it stopped the run"
    ends[0] = time.time() + 30
    watch._end = time.time() + 30
    assert watch.due() == Act("stop", "the allocation ends soon") and watch.due() is None
    owned.close()


def test_two_triggers_at_one_step_are_one_save(tmp_path: Path) -> None:
    job, meet = Job(tmp_path / "root", 2, save_every=4), threading.Barrier(2)

    def train(manager: distckpt.CheckpointManager) -> list[Todo]:
        for step in range(1, 4):
            manager.poll(step)
        meet.wait(10)
        if manager.rank == 0:
            for reason in ("asked", "asked again"):
                manager._background._messenger.tell(Act("save", reason))
        await_(lambda: len(manager._background.gate._acts) == 2)
        meet.wait(10)
        found = [manager.poll(4)]
        manager.save(4, {"w": torch.ones(2)}, background=True)
        return [*found, manager.poll(4), manager.poll(5)]

    assert values(job.run(train)) == [[Todo(True, False, "asked; asked again"), Todo(), Todo()]] * 2


@pytest.mark.parametrize("how", ["save", "background", "resumed"])
def test_a_step_that_is_there_is_not_asked_for(how: str, tmp_path: Path) -> None:
    """Committed, in flight, or just resumed from; not by the schedule, not by news, and a stop asks for no second save."""
    root = tmp_path / "root"
    if how == "resumed":
        values(Job(root, 2).run(lambda manager: manager.save(6, {"w": torch.ones(2)}).step))
    job, meet = Job(root, 2, save_every=3), threading.Barrier(2)

    def train(manager: distckpt.CheckpointManager) -> list[Todo]:
        if how == "resumed":
            assert manager.restore({"w": torch.zeros(2)}) == 6
        else:
            manager.save(6, {"w": torch.ones(2)}, background=how == "background")
        found = [manager.poll(6)]
        meet.wait(10)
        if manager.rank == 1:
            manager._background._messenger.tell(Act("save", "asked"))
            manager._background._messenger.tell(Act("stop", "SIGTERM"))
        await_(lambda: len(manager._background.gate._acts) == 2)
        meet.wait(10)
        return [*found, manager.poll(6), manager.poll(7)]

    assert values(job.run(train)) == [[Todo(), Todo(False, True, "SIGTERM; asked"), Todo(True, True, "SIGTERM")]] * 2


@pytest.mark.parametrize("tolerate", [False, True])
def test_after_a_failure_the_step_is_asked_for_again(tolerate: bool, tmp_path: Path) -> None:
    job = Job(tmp_path / "root", 2, save_every=2, on_failure=Tolerate(1) if tolerate else "raise")

    def train(manager: distckpt.CheckpointManager) -> list[bool]:
        asked = [manager.poll(2).save]
        manager.save(2, Piece("bad", _boom if manager.rank else lambda: None), background=True)
        asked.append(manager.poll(2).save)
        try:
            manager.wait()
        except SaveError:
            assert not tolerate
        asked.append(manager.poll(2).save)
        manager.save(2, Piece("good"), background=True)
        asked.append(manager.poll(2).save)
        return asked

    assert values(job.run(train)) == [[True, False, True, False]] * 2
    assert published(tmp_path / "root") == ["step-2"]


@pytest.mark.parametrize("background", [False, True])
def test_ranks_at_different_steps_are_a_disagreement_at_the_save(background: bool, tmp_path: Path) -> None:
    """One rank's step is off by one: the save that both are asked for at one boundary says so on both."""
    job = Job(tmp_path / "root", 2)

    def train(manager: distckpt.CheckpointManager) -> None:
        if manager.rank == 0:
            manager._background._messenger.tell(Act("save", "asked"))
        for n in range(100_000):
            step = n + manager.rank
            if manager.poll(step).save:
                manager.save(step, {"w": torch.ones(3)}, background=background)
                manager.wait()
                raise AssertionError("different steps were saved")
            time.sleep(0.001)

    for error in same_error(job.run(train), RankDisagreement):
        assert error.values[1] == error.values[0] + 1
    assert published(tmp_path / "root") == []


@pytest.mark.parametrize("rule", ["wait", "skip", "error"])
def test_s16_a_second_save_while_one_is_in_flight(rule: str, tmp_path: Path) -> None:
    """Alike on both ranks, although rank 0's part has ended long before rank 1's."""
    job, hold, meet = Job(tmp_path / "root", 2, in_flight=rule), threading.Event(), threading.Barrier(2)

    def train(manager: distckpt.CheckpointManager) -> list[Any]:
        manager.poll(1)
        first = manager.save(1, Piece("p", lambda: hold.wait(10) if manager.rank else None), background=True)
        manager.poll(2)
        if rule == "wait":
            hold.set()
        found: list[Any] = []
        try:
            second = manager.save(2, Piece("p"), background=True)
            found.append(second.skipped)
        except SaveError as error:
            found.append(str(error))
        meet.wait(10)
        hold.set()
        first.result(10)
        if rule != "wait":  # until its end has been acted on at a boundary, it is in flight, whatever done() says
            assert first.done()
            if manager.rank == 0:
                time.sleep(0.1)
            await_(lambda: manager._background.gate.flag)
        manager.poll(3)
        found.append(manager.save(3, Piece("p"), background=True).skipped)
        return found

    refused = "save of step 2: the save of step 1 is in flight and in_flight is 'error'; save less often, or use in_flight='wait'"
    expected = {"wait": False, "skip": True, "error": refused}[rule]
    assert values(job.run(train)) == [[expected, False]] * 2
    assert published(tmp_path / "root") == ["step-1", *(["step-2"] if rule == "wait" else []), "step-3"]


def test_s16_waiting_with_a_timeout_decides_nothing(tmp_path: Path) -> None:
    """It may say yes here and no there: the save stays in flight, and its failure unraised, until a boundary of all."""
    job, hold, meet = Job(tmp_path / "root", 2, in_flight="skip"), threading.Event(), threading.Barrier(2)

    def linger(record: CommitRecord) -> None:
        assert hold.wait(10)  # rank 0 has announced the end by then; its hook runs while rank 1 goes on

    def train(manager: distckpt.CheckpointManager) -> list[bool]:
        manager.on_commit(linger)
        manager.poll(1)
        handle = manager.save(1, Piece("p"), background=True)
        if manager.rank == 1:
            handle.result(10)
        waited = manager.wait(0.3)
        second = manager.save(2, Piece("p"), background=True).skipped
        meet.wait(10)
        hold.set()
        await_(lambda: manager._background.gate.flag)
        manager.poll(3)
        return [waited, second, manager.save(3, Piece("p"), background=True).skipped]

    assert values(job.run(train)) == [[False, True, False], [True, True, False]]
    assert published(tmp_path / "root") == ["step-1", "step-3"]


def test_a_clock_that_cannot_be_read_does_not_stop_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def due(self: timing.Timing) -> Act:
        looked.append(1)
        raise OSError(5, "bad disk")

    monkeypatch.setattr(timing.Timing, "due", due)
    job = Job(tmp_path / "root", 2)

    def train(manager: distckpt.CheckpointManager) -> Asked:
        if manager.rank == 0:
            await_(lambda: looked)
            manager._background._messenger.tell(Act("save", "asked"))
        return _asked(manager, 3000)

    assert len(_alike(job.run(train))) == 1


@pytest.mark.parametrize("options", [
    {"save_every": -1}, {"save_every": 2.5}, {"save_every": True}, {"save_every_minutes": 0}, {"save_every_minutes": "3"},
    {"grace": -1}, {"in_flight": "queue"}, {"on_failure": "ignore"}])
def test_options_are_checked_before_anything_is_touched(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        distckpt.CheckpointManager(tmp_path / "root", **options)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("busy", [False, True])
def test_the_words_are_the_same_whichever_way_poll_took(busy: bool, tmp_path: Path) -> None:
    """A rank that has news waiting for a later boundary says the same as one that has none."""
    manager = distckpt.CheckpointManager(tmp_path / "root", save_every=3, save_at_start=True)
    if busy:
        manager._background.gate.act(100, Act("save", "later"))
    with manager:
        assert [manager.poll(step) for step in (0, 1, 3)] == [Todo(True, False, "at start"), Todo(),
                                                             Todo(True, False, "every 3 steps")]


def test_the_schedule_alone() -> None:
    every = Schedule(5, False)
    assert [step for step in range(21) if every.due(step)] == [5, 10, 15, 20]
    every.last = 10
    assert [step for step in range(21) if every.due(step)] == [5, 15, 20]
    assert Schedule(None, True).due(0) and not Schedule(None, True).due(1) and not Schedule(0, False).due(0)


def test_poll_after_close_is_an_error(tmp_path: Path) -> None:
    manager = distckpt.CheckpointManager(tmp_path / "root")
    manager.poll(0)
    manager.close()
    with pytest.raises(ConfigError, match="is closed"):
        manager.poll(1)


# -- resume, save, resume, save ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "background", "both"])
@pytest.mark.parametrize("world", [1, 2])
def test_resume_save_resume_save(mode: str, world: int, tmp_path: Path) -> None:
    """Four lives of a run: each goes on where the one before was saved, bit for bit, in whichever way."""
    root = tmp_path / "root"

    def life(manager: distckpt.CheckpointManager) -> list[int]:
        state = {"w": torch.zeros(500), "step": 0}
        step = manager.restore(state) or 0
        found = [step]
        assert state["step"] == step and float(state["w"][0]) == step * (manager.rank + 1)
        end = step + 7
        while step < end:
            todo = manager.poll(step)
            if todo.save:
                behind = mode == "background" or (mode == "both" and step % 4 == 0)
                manager.save(step, state, background=behind)
                found.append(step)
            state["w"] += manager.rank + 1  # at once: the copy is ours
            step += 1
            state["step"] = step
        manager.save(step, state, on_exists="skip", background=mode != "sync")
        return found

    for n in range(4):
        found = values(Job(root, world, save_every=2, keep_last=2).run(life))
        assert all(f == found[0] for f in found) and found[0][0] == 7 * n
    assert published(root) == ["step-27", "step-28"] or published(root) == ["step-26", "step-28"]
    committed = [e["step"] for e in events(root, "committed")]
    assert committed == sorted(set(committed)) and committed[-1] == 28 and {7, 14, 21} <= set(committed)


def test_a_series_has_a_schedule_of_its_own(tmp_path: Path) -> None:
    """``poll`` speaks of the main line; a failed save of the one does not ask for a step of the other again."""
    def train(manager: distckpt.CheckpointManager) -> None:
        rolling = manager.series("rolling", keep_last=1, save_every=2)
        assert [s for s in range(9) if rolling.should_save(s)] == [2, 4, 6, 8]
        assert [s for s in range(9) if manager.should_save(s)] == [3, 6]
        rolling.save(2, Piece("p"))
        assert not rolling.should_save(2) and rolling.should_save(4)
        manager.async_save(3, Piece("p"))
        manager.wait_until_finished()
        assert not manager.should_save(3) and not manager.poll(3).save
        rolling.save(4, Piece("p", _boom), background=True)
        with pytest.raises(SaveError):
            manager.wait()
        assert rolling.should_save(4) and not manager.poll(3).save
        rolling.resume()
        assert not rolling.should_save(2) and not manager.poll(3).save

    values(Job(tmp_path / "root", 2, save_every=3).run(train))
    assert published(tmp_path / "root") == ["step-2-rolling", "step-3"]
