"""The simulation itself: it repeats, it costs no time, and it finds what is broken on purpose."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from distckpt import leases, rotation
from distckpt.background import Background
from distckpt.coordination.rounds import Call
from distckpt.durable import Files
from distckpt.errors import CoordinatorLost, RankTimeout, SaveError
from distckpt.options import Timeouts
from distckpt.retention import KeepBest
from distckpt.saving import commit
from distckpt.steps import NOTHING, Todo
from distckpt.testing.checker import ABORTED, COMMITTED, Save, standing
from distckpt.testing.explore import schedules
from distckpt.testing.simjob import Moment
from distckpt.testing.simulation import QUICK, Run, Simulation, State, Strike, Told, _one_step, _to_be_told
from scripts.proof.l0 import Case, Tally, delayed, seeded, sweep
from scripts.proof.layer import Budget
from scripts.proof.scenarios import SCENARIOS, _late, noticed

HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
REPLAY = "world=2 scenario=background seed=17 fault=kill:1@40"


def test_one_seed_is_one_execution() -> None:
    first, second = (Case.parse(REPLAY).run(traced=True) for _ in range(2))
    assert first.trace == second.trace
    assert len(first.trace) > 500
    assert Case.parse(REPLAY.replace("seed=17", "seed=18")).run(traced=True).trace != first.trace


def test_the_line_replays_it_in_a_process_with_other_hashes() -> None:
    mine = Case.parse(REPLAY).run(traced=True)
    command = [sys.executable, "-m", "scripts.proof.l0", "--trace", "--replay", REPLAY]
    done = subprocess.run(command, cwd=HERE, env={**os.environ, "PYTHONPATH": HERE, "PYTHONHASHSEED": "7"}, capture_output=True,
                          text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:len(mine.trace)] == mine.trace
    assert done.stdout.splitlines()[-1] == "no violation"


def test_a_line_names_a_case() -> None:
    for number in range(50):
        assert Case.parse(str(seeded(number))) == seeded(number)
    line = "world=3 scenario=sync seed=4 fault=kill:1@83,stop:0@40:30 delay=12:1 apart=1"
    assert str(Case.parse(line)) == line
    with pytest.raises(ValueError, match="scenario"):
        Case.parse("scenario=none")


def test_seeds_draw_every_scenario_of_several_nodes_and_strike_each_of_their_committers() -> None:
    drawn = [seeded(number) for number in range(2000)]
    several = {name for name, scenario in SCENARIOS.items() if scenario.nodes > 1}
    assert {case.scenario for case in drawn} >= several - {"local-options"}, "it came after the seeds had a meaning"
    for case in drawn:
        nodes = SCENARIOS[case.scenario].nodes
        assert case.world >= nodes and not (case.apart and nodes > 1)
        assert nodes > 1 or not any(fault.startswith("node") for fault in case.faults)
    late = {Strike.parse(fault).rank for case in drawn if case.scenario == "local-3" for fault in case.faults
            if fault.startswith(("kill", "node")) and Strike.parse(fault).at > 200}
    assert late == {0, 1, 2}, "each of them commits"


def test_ten_minutes_take_no_time() -> None:
    def program(manager: Told, rank: int) -> None:
        if rank == 0:
            manager.save(1, State(b"alone"))
        else:
            manager._seams.runtime.sleep(3_000)

    begun = time.process_time()
    run = Simulation(2, timeouts=Timeouts(arrive=600, progress=600, visible=120, close=300), horizon=10_000).run(program)
    assert time.process_time() - begun < 1.0
    assert isinstance(run.errors[0], RankTimeout)
    assert "no word for 600 s" in str(run.errors[0])
    assert run.seconds > 600
    assert run.violations == []


def test_whoever_waits_for_ever_is_found_and_shown() -> None:
    def program(manager: Told, rank: int) -> None:
        if rank == 1:
            manager._seams.runtime.event().wait()

    run = Simulation(2).job(program)
    assert run.violations == ["I6: 1.1 never ended"]
    assert "runtime.event().wait()" in run.stacks


def test_an_endless_loop_is_found() -> None:
    def program(manager: Told, rank: int) -> None:
        while rank == 1:
            manager._seams.runtime.event().is_set()

    run = Simulation(2, limit=20_000).job(program)
    assert "I6: 1.1 never ended" in run.violations


def test_schedules_are_counted() -> None:
    ran: list[dict[int, int]] = []

    def width(delays: Any) -> list[int]:
        ran.append(dict(delays))
        return [1, 2, 3]

    assert [dict(d) for d in schedules(1, width)] == [{}, {1: 1}, {2: 1}, {2: 2}]
    assert len(list(schedules(2, width))) == 1 + 3 + 2  # after a delay at point 1, two at point 2
    assert ran[0] == {}


# -- broken on purpose ---------------------------------------------------------------------------------------------------


def _first(cases: Iterator[Case] | list[Case]) -> tuple[Case, Run] | None:
    for case in cases:
        run = case.run()
        if run.violations:
            return case, run
    return None


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def break_(what: str) -> None:
        MUTANTS[what](monkeypatch)

    return break_


def _commit_before_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Call.gather

    def gather(self: Call, keys: dict[int, str], timeout: float, progress: bool = False, abort: str | None = None) -> Any:
        return whole(self, {0: keys[0]} if abort is not None else keys, timeout, progress, abort)

    monkeypatch.setattr(Call, "gather", gather)


def _flag_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def poll(self: Background, step: int) -> Todo:
        gate = self.gate
        flag = gate.flag
        gate.place = (gate.place[0] + 1, step)
        return self._attend(step) if flag or self.signals.raised or self.stop_reason else NOTHING

    monkeypatch.setattr(Background, "poll", poll)


def _marker_unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(files: Files, path: str, data: bytes) -> None:
        out = files.open(path)
        out.write(data)
        out.close()

    monkeypatch.setattr(commit, "write_new", write)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "commit before the acks": _commit_before_acks, "flag before place": _flag_first, "marker not synced": _marker_unsynced}


def test_a_commit_before_the_acks_is_found(broken: Callable[[str], None]) -> None:
    broken("commit before the acks")
    found = _first([Case("two", seed=seed) for seed in range(20)])
    assert found is not None and found[1].violations[0][:2] in ("I1", "I2", "I5"), found


def test_a_flag_that_is_read_before_the_place_is_told_is_found(broken: Callable[[str], None]) -> None:
    broken("flag before place")
    found = _first([Case("stopping", seed=seed) for seed in range(200)])
    assert found is not None, "no seed of 200"
    said = found[1].violations[0]
    assert said.startswith("P5") or "ranks disagree on the step" in said


def test_a_marker_that_is_not_synced_is_found(broken: Callable[[str], None]) -> None:
    broken("marker not synced")
    found = _first(sweep("one", 2, ["power"], 7, offset=3))
    assert found is not None and found[1].violations[0].startswith("I"), found


def test_what_is_not_broken_passes_the_same() -> None:
    tally = Tally()
    for case in [Case("two", seed=seed) for seed in range(20)] + [Case("stopping", seed=seed) for seed in range(20)]:
        tally.run(case)
    assert delayed(tally, "one", 2, 1, Budget(100.0), stride=40) > 10
    assert tally.result.violations == []


@pytest.mark.parametrize("told, wrong", [(["No space left on device"], []), (["nothing of the kind"], ["ENOSPC", "EIO"])])
def test_of_two_faults_one_must_be_told(told: list[str], wrong: list[str]) -> None:
    """The second may strike a rank that is leaving already. Found by seed 998 of world 3, background: a close that failed."""
    run = SimpleNamespace(injected=[(os.strerror(errno.ENOSPC),), (os.strerror(errno.EIO),)], said=told)
    save = Save(1, "x", {0: ABORTED})
    assert len(_to_be_told(run, [save])) == len(wrong)  # type: ignore[arg-type]
    assert _to_be_told(run, [Save(1, "x", {0: COMMITTED})]) == []  # type: ignore[arg-type]
    one = SimpleNamespace(injected=run.injected[:1], said=["nothing"])
    assert len(_to_be_told(one, [save])) == 1  # type: ignore[arg-type]


# -- what it found, in the library and in its own rules ----------------------------------------------------------------------


def test_a_close_that_gives_up_on_a_save_in_flight_is_no_failed_save() -> None:
    """Rank 0 is slower than the deadline of close; the save may be committed all the same."""
    run = Case.parse("world=2 scenario=background seed=463 fault=slow:0@286:0.5,fail:0@276:EIO").run()
    assert run.violations == []
    assert all(run.managers[rank].overdue and "has not ended within 20 s" in str(run.errors[rank]) for rank in (0, 1))


def test_a_rotation_slower_than_the_deadline_of_close_is_left_to_the_next_start() -> None:
    """It follows the save on rank 0's thread for it: no rank waits for it longer than it said."""
    run = Case.parse("world=2 scenario=background seed=1921 fault=slow:0@351:2").run()
    assert run.violations == [] and run.errors == {} and run.fired and run.seconds > 20


@pytest.mark.parametrize("world, fault", [(2, "fail:0@73:EIO"), (2, "fail:0@85:EIO"), (2, "fail:1@10:EIO"), (3, "fail:0@64:EIO")])
def test_a_rank_that_is_behind_hears_what_failed_and_not_that_rank_0_has_left(world: int, fault: str) -> None:
    """The others raise at the boundary that was agreed on and leave, and rank 0 takes the store along, while one rank is still
    in the training step before it."""
    run = Case("uneven", world, int(fault[7:9]), (fault,)).run()
    assert run.violations == [] and run.fired
    assert {type(error) for error in run.errors.values()} == {SaveError} and len(run.errors) == world
    assert len({repr(manager.faced) for manager in run.managers.values()}) == 1


def test_a_rank_0_that_stands_still_is_given_up_on_where_each_rank_stands() -> None:
    """One rank was at its gate and the other not yet when rank 0 was stopped: there is no boundary that they could agree on."""
    run = Case.parse("world=3 scenario=stopping seed=1400101010757 fault=stop:0@149 apart=1").run()
    assert run.violations == []
    assert {type(error) for error in run.errors.values()} == {RankTimeout}


def test_why_a_rank_failed_is_told_though_it_died_since() -> None:
    """It had put its cause where the others look for it; rank 0 said only that its process has ended."""
    lines = [f"world=2 scenario=stopping seed=0 fault=fail:1@11:ENOSPC,kill:1@{at}" for at in range(38, 48)]
    runs = [Case.parse(line).run() for line in lines]
    assert [run.violations for run in runs] == [[]] * len(runs)
    assert any(run.fired and "the disk is full on rank 1" in text and "then, it has ended, or left" in text
               for run in runs for text in run.said)


@pytest.mark.parametrize("line", [
    "world=2 scenario=stopping seed=1400201000073 fault=kill:1@28",  # it was asked at the gate, and died before it answered
    "world=2 scenario=stopping seed=0 fault=kill:1@26",  # it had taken a number for its news, and died before it wrote them
    "world=3 scenario=stopping seed=1400201001252 fault=kill:1@28 apart=1",
    "world=2 scenario=background seed=1400301000462 fault=stop:0@165:45 apart=1"])  # a key came too late, while it slept
def test_nobody_stands_at_a_gate_for_the_dead(line: str) -> None:
    run = Case.parse(line).run()
    assert run.violations == [] and run.fired


def test_rank_0_does_not_wait_for_the_goodbye_of_the_dead() -> None:
    cases = [Case("sync", faults=(f"kill:1@{at}",)) for at in range(84, 91)]
    runs = [case.run() for case in cases]
    assert [run.violations for run in runs] == [[]] * len(runs)
    assert any(run.fired and not run.errors for run in runs), "none was killed after the last round"


def test_a_rank_that_is_still_in_its_start_answers_a_freeze() -> None:
    """The first rank that was through had a signal at once, and another one's listener passed the freeze over, which was tried
    again 6 s later."""
    line = "world=3 scenario=stopping seed={} fault=fail:0@27:ENOSPC apart=1"
    runs = [Case.parse(line.format(seed)).run() for seed in (600001800005059, *range(300))]
    assert [run.violations for run in runs if run.violations] == []


def test_no_answer_is_awaited_from_a_rank_that_left_before_it_heard_of_the_freeze() -> None:
    """On hosts of their own two ranks met the failure in ``wait`` and left; rank 0 stood at its gate for their answers, 5 s."""
    cases = [Case("relinking", 3, seed, (f"lost:0@{at}:EIO",), apart=True)
             for seed, at in [(800002400024309, 79), *((seed, at) for seed in range(80) for at in (77, 79, 80))]]
    assert [(str(case), run.violations) for case in cases if (run := case.run()).violations] == []


@pytest.mark.parametrize("seed", [1600004900011196, 1600004900012471])
def test_who_met_the_failure_in_its_own_save_and_left_is_not_forgotten(seed: int) -> None:
    """It passed the boundary before that save; the others, asked after it had left, must not raise at that boundary (P5)."""
    runs = [Case("leaving", 3, seed, (f"fail:0@{at}:EIO",)).run() for at in range(76, 88)]
    assert [run.violations for run in runs] == [[]] * len(runs)
    assert any({rank: type(error) for rank, error in run.errors.items()} == {0: SaveError, 1: SaveError, 2: KeyError}
               for run in runs)


@pytest.mark.parametrize("seed, fault", [(100000827, "fail:0@94:EIO"), (100001564, "fail:0@85:ENOSPC")])
def test_on_another_host_a_rank_that_leaves_by_an_exception_is_missed_at_the_deadline(seed: int, fault: str) -> None:
    assert Case("leaving", seed=seed, faults=(fault,), apart=True).run().violations == []


@pytest.mark.parametrize("fault, apart, seconds, late", [
    ("kill:1@9", False, 0.9, False), ("kill:1@9", False, 1.1, True),
    ("kill:1@9", True, 30.9, False), ("kill:1@9", True, 31.1, True), ("kill:1@2", False, 30.9, False),
    ("stop:1@9", False, 31.1, True), ("stop:0@9", False, 50.9, False), ("stop:0@9", False, 51.1, True),
    ("fail:0@9:EIO", True, 1.1, True), ("slow:0@9:0.5", False, 100.0, False), ("stop:1@9:45", False, 100.0, False)])
def test_what_is_noticed_late(fault: str, apart: bool, seconds: float, late: bool) -> None:
    strike = Strike.parse(fault)
    told = {rank: 7.0 + seconds for rank in (0, 1) if rank != strike.rank or strike.kind == "fail"}
    run = SimpleNamespace(struck={0: Moment(7.0, 30, {})}, told=told, operations={0: 20, 1: 10}, seconds=500.0)
    assert [line[:2] for line in _late(run, [strike], apart)] == ["I6"] * late  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [30, 160, 220])
def test_s4_a_rank_0_that_stands_still_is_given_up_on_after_a_deadline_and_a_quarter(at: int) -> None:
    """At start, after the ack, at a begin: it was two deadlines when the first look came only after one of them."""
    strike = Strike("stop", 0, at)
    seconds = noticed(Case("sync", faults=(str(strike),)).run(), [strike])
    assert seconds is not None and QUICK.progress <= seconds <= 1.25 * QUICK.progress


def _ended(*told: tuple[list[tuple[int, str]], int | None, bool, BaseException | None]) -> Any:
    managers = {rank: SimpleNamespace(faced=faced, lost=lost, overdue=overdue)
                for rank, (faced, lost, overdue, _) in enumerate(told)}
    return SimpleNamespace(managers=managers, errors={rank: end[3] for rank, end in enumerate(told) if end[3] is not None})


def test_what_is_asked_of_places() -> None:
    failed, lost, late = SaveError("failed"), CoordinatorLost("gone"), RankTimeout("late", missing={}, phase="close")
    at_3, at_4, nowhere = [(3, "poll 3")], [(4, "poll 4")], list[tuple[int, str]]()
    kill, slow, full = [Strike("kill", 2, 9)], [Strike("slow", 0, 9, "0.5")], [Strike("fail", 0, 9, "ENOSPC")]

    def asked(strikes: list[Strike], *told: tuple[list[tuple[int, str]], int | None, bool, BaseException | None]) -> list[str]:
        return [line[:2] for line in _one_step(_ended(*told), strikes)]

    assert asked([], (at_3, None, False, failed), (at_3, None, False, failed)) == []
    assert asked(slow, (at_3, None, False, failed), (at_4, None, False, failed)) == ["P5"]
    assert asked([], (at_3, None, False, failed), (nowhere, None, False, None)) == ["P5"]
    assert asked(kill, (at_3, None, False, failed), (at_4, None, False, failed), (nowhere, None, False, None)) == ["P5"]
    assert asked(slow, (at_4, None, False, failed), (nowhere, 4, False, lost)) == []
    assert asked(slow, (at_3, None, False, failed), (nowhere, 4, False, lost)) == ["P5"]
    assert asked(full, (at_4, None, False, failed), (nowhere, 4, False, lost)) == ["P4"]
    assert asked(slow, (nowhere, None, True, failed), (nowhere, None, False, late)) == []
    assert asked(slow, (nowhere, None, True, failed), (nowhere, None, False, None)) == ["P4"]


# -- what retention must leave: a pin, a second series ---------------------------------------------------------------------


def test_a_pin_and_a_second_series_have_what_is_theirs() -> None:
    scenario = SCENARIOS["keeping"]
    simulation = scenario.simulation()
    run = simulation.run(scenario.program)
    assert run.violations == [] and run.fired and simulation.pinned == {1}
    assert sorted(standing(simulation.tree())) == ["step-1", "step-1004", "step-3-rolling", "step-4"]
    tally = Tally()
    for case in sweep("keeping", 2, ("kill", "power"), 97):
        tally.run(case)
    assert tally.result.runs >= 15 and tally.result.violations == []


def test_the_best_one_stays_and_one_that_was_the_best_before_it_does_not() -> None:
    scenario = SCENARIOS["best"]
    simulation = scenario.simulation()
    assert simulation.run(scenario.program).violations == []
    assert sorted(standing(simulation.tree())) == ["step-1005", "step-2", "step-5"]
    tally = Tally()
    for case in sweep("best", 2, ("kill", "power"), 97):
        tally.run(case)
    assert tally.result.runs >= 15 and tally.result.violations == []


def _nothing_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeepBest, "__call__", lambda *_: {})


def _blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation sees no lease."""
    monkeypatch.setattr(leases, "leased_attempts", lambda *_: [])
    monkeypatch.setattr(leases, "listing", lambda *_: [])


def _one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation takes all checkpoints for one series."""
    real = rotation.plan
    monkeypatch.setattr(rotation, "plan", lambda series, entries, *rest: real(
        series, [replace(entry, series=series) for entry in entries], *rest))


@pytest.mark.parametrize(("fault", "scenario", "lost"), [
    (_blind, "keeping", "I5: step 1 must stand"), (_one_line, "keeping", "I5: step "),
    (_nothing_is_best, "best", "I5: step 2 must stand")])
def test_a_rotation_that_takes_what_is_not_its_own_is_found(fault: Callable[[pytest.MonkeyPatch], None], scenario: str, lost: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert any(line.startswith(lost) for line in Case(scenario).run().violations)
