"""The fault loops are green on this library, red on one that is broken on purpose, and meet what they say they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import distckpt
from distckpt.testing.checker import standing, tree_of
from distckpt.testing.forks import Ended
from scripts.proof import l2
from scripts.proof.layer import Budget, Result
from scripts.proof.loops import judge, schedule, traced, zygote
from scripts.proof.loops.judge import Item, Judged, Known
from scripts.proof.loops.mutants import MUTANTS
from scripts.proof.loops.program import PROGRAMS
from scripts.proof.loops.strikes import KINDS, Strike, every
from scripts.proof.loops.zygote import Pool

PROBED = 9
"""What rank 1 does before its first save: it tries the storage."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, ["sync", "background", "every option"]) as made:
        yield made


def of(known: Known, rank: int, op: str, name: str = "", after: int = 0, which: int = 0) -> int:
    """The n of the ``which``-th such operation beyond ``after``."""
    found = [n for n, (done, where) in enumerate(known.order[rank], 1) if n > after and done == op and name in where]
    return found[which]


def judged(pool: Pool, *items: Item) -> list[Judged]:
    found = dict(pool.judge(iter(items)))
    return [found[item] for item in items]


def test_every_kind_of_fault_fires_and_no_promise_is_broken(pool: Pool) -> None:
    known = pool.known["sync"]
    write = of(known, 1, "write", after=PROBED)
    items = [Item("sync", Strike(1, kind, write if kind in ("error", "kill", "kill after", "slow") else 3,
                                 "EIO" if "error" in kind else "")) for kind in KINDS if kind != "stop"]
    items += [Item("background", Strike(0, "kill", of(pool.known["background"], 0, "mkdir"))),
              Item("sync", Strike(0, "error", of(known, 0, "open", "commit.json"), "ENOSPC", forever=True))]
    for item, found in zip(items, judged(pool, *items), strict=True):
        assert found.fired and found.checked and found.hangs == 0, str(item)
        assert found.violations == [], (str(item), found.logs)


def test_every_option_on_keeps_every_promise(pool: Pool) -> None:
    """Its links and what they rest on fail, die and lie; a second series, the best one and what an optimizer steps beside it."""
    options = pool.known["every option"]
    link, synced = of(options, 1, "link"), of(options, 1, "fsync_file")
    items = [Item("every option", strike) for strike in (
        Strike(1, "error", link, "EIO"), Strike(1, "kill after", link), Strike(0, "lie", 1, forever=True),
        Strike(1, "error", synced, "ENOSPC"), Strike(0, "kill", of(options, 0, "open", "commit.json", which=3) + 5))]
    for item, found in zip(items, judged(pool, *items), strict=True):
        assert found.fired and found.checked and found.hangs == 0, str(item)
        assert found.violations == [], (str(item), found.logs)


def test_a_loop_ends_where_nothing_is_left_to_strike(pool: Pool) -> None:
    known = pool.known["sync"]
    beyond = Item("sync", Strike(1, "error", known.count(Strike(1, "error", 1)) + schedule.MARGIN, "EIO"))
    (found,) = judged(pool, beyond)
    assert not found.fired and found.violations == []
    reached = found.reached
    assert reached == known.count(beyond.strike), "it counted itself"
    assert schedule.complaint(beyond, known, True, reached) and not schedule.complaint(beyond, known, False, reached)
    assert schedule.complaint(Item("sync", Strike(1, "error", 1, "EIO")), known, False, 0) == "its fault never fired"


def broken(pool: Pool) -> dict[str, tuple[Item, str]]:
    """Per mutant, a run that shows it and the invariant that it breaks. Some of them do more, and so come to it later."""
    known, fresh, options = pool.known["sync"], pool.known["background"], pool.known["every option"]
    return {
        "ack without fsync": (Item("sync", Strike(1, "error", of(known, 1, "fsync", after=PROBED), "EIO")), "I9"),
        "close unchecked": (Item("sync", Strike(1, "error", of(known, 1, "close", after=PROBED), "ENOSPC")), "I9"),
        "silent failure": (Item("sync", Strike(1, "error", of(known, 1, "write", after=PROBED), "EIO")), "I9"),
        "rotate first": (Item("background", Strike(0, "kill", of(fresh, 0, "open", "commit.json", which=2) + 5)), "I5"),
        "publish first": (Item("sync", Strike(0, "kill", of(known, 0, "open", "commit.json") + 2)), "I4"),
        "makes its way": (Item("sync", Strike(1, "stop", of(known, 1, "open", after=PROBED))), "I4"),
        "no fence": (Item("every option", Strike(1, "slow", of(options, 1, "link"))), "I1"),
        "link without fsync": (Item("every option", Strike(1, "error", of(options, 1, "fsync_file"), "EIO")), "I9"),
    }


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_library_is_found(mutant: str, pool: Pool) -> None:
    item, invariant = broken(pool)[mutant]
    good, bad = judged(pool, item, Item(item.program, item.strike, mutant))
    assert good.fired and good.violations == [], (good.violations, good.logs)
    assert bad.fired and any(line.startswith(f"{invariant}:") for line in bad.violations), bad.violations


@pytest.mark.skipif(traced.missing() is not None, reason=str(traced.missing()))
def test_strace_and_the_seam_agree(pool: Pool) -> None:
    """On every system call, and on the finaliser's thread too."""
    known, fresh = pool.known["sync"], pool.known["background"]
    strikes = {op: Strike(0, "error", of(known, 0, op), "EIO") for op in
               ("fsync", "close", "fsync_file", "fsync_dir", "append", "mkdir", "rename", "exchange", "unlink", "rmdir")
               if any(op == done for done, _ in known.order[0])}
    strikes["unlinkat"] = Strike(0, "error", of(known, 0, "rmdir", "probe-"), "EIO")
    strikes |= {op: Strike(1, "error", of(known, 1, op, after=PROBED), "ENOSPC") for op in ("open", "write")}
    items = [Item("sync", strike, traced=True) for strike in strikes.values()]
    items += [Item("sync", Strike(0, "kill", of(known, 0, "open", "commit.json")), traced=True),
              Item("background", Strike(1, "error", of(fresh, 1, "write", after=PROBED), "EIO"), traced=True)]
    for item, found in zip(items, judged(pool, *items), strict=True):
        assert found.jobs >= 4 and found.fired and found.checked, str(item)
        assert found.violations == [], (str(item), found.violations, found.logs)


@pytest.mark.skipif(traced.missing() is not None, reason=str(traced.missing()))
def test_a_seam_that_is_not_what_the_kernel_sees_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam says what the verdict is that strace's does not agree with."""
    told = {False: ("aborted", True), True: ("committed", True)}
    monkeypatch.setattr(traced, "judge", lambda item, known, folder, outside=None: Judged(
        fired=True, checked=True, verdicts=told[outside is not None]))
    found = traced.judge_traced(LAST_WRITE, KNOWN, "/nowhere")
    assert len(found.violations) == 1 and found.violations[0].startswith("the seam and strace disagree")


def test_a_seed_means_the_same_everywhere_and_the_first_ones_meet_every_kind() -> None:
    items = schedule.runs(list(PROGRAMS))
    assert schedule.runs(["dcp"]) == schedule.runs(["dcp"]) and len(set(items)) == len(items)
    assert {item.strike.kind for item in items[:40]} == set(KINDS)
    assert {(item.program, item.strike.rank) for item in items[:128]} == {(name, rank) for name in PROGRAMS for rank in (0, 1)}


def test_one_program_meets_everything_at_every_operation_of_both_ranks() -> None:
    met = {(item.strike.rank, item.strike.kind, item.strike.number, item.strike.forever, item.strike.n)
           for item in schedule.runs(["sync"]) if not item.traced}
    assert met == {(rank, *what, n) for rank in (0, 1) for what in every() for n in range(1, schedule._MOST + 1)}


def test_the_layer_makes_the_runs_that_it_is_asked_for(pool: Pool, tmp_path: Path) -> None:
    result = l2.run(Budget(50.0, seed=3), runs=2, own=pool, walked=tmp_path / "walked")
    assert result.runs == result.states >= 1 and result.violations == [] and result.hangs == 0
    assert f"{result.runs} faults fired in all, " in result.covers and " left)" in result.covers


class Played:
    """In place of a pool: one program of few operations, whose every fault fires as long as there are operations."""

    def __init__(self, bad: Callable[[Item], bool] = lambda item: False) -> None:
        self.known = {name: Known({}, [{"write": 2}, {"write": 1}], [[], []], None) for name in ("sync", "background")}
        self.bad, self.made = bad, list[Item]()

    def judge(self, items: Iterator[Item]) -> Iterator[tuple[Item, Judged]]:
        for item in items:
            self.made.append(item)
            fired = item.strike.n <= self.known[item.program].count(item.strike)
            yield item, Judged(fired=fired, checked=True, jobs=2, violations=["I1: on purpose"] if self.bad(item) else [])


def played(walked: Path, seconds: float = 60.0, bad: Callable[[Item], bool] = lambda item: False) -> tuple[Played, Result]:
    pool: Any = Played(bad)
    return pool, l2.run(Budget(seconds), own=pool, walked=walked)


def test_the_loops_are_walked_to_their_end_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = tmp_path / "walked"
    first, result = played(walked, bad=lambda item: item.strike.kind == "kill")
    loops: dict[tuple[object, ...], set[int]] = {}
    for item in first.made:
        loops.setdefault((item.program, item.strike.rank, item.strike.kind, item.strike.number, item.strike.forever),
                         set()).add(item.strike.n)
    assert all(ns == set(range(1, 3 - key[1] + schedule.MARGIN)) for key, ns in loops.items()  # type: ignore[operator]
               if key[0] == "sync" and key[2] != "read error"), "each n, until none fires"
    assert result.runs == result.states < len(first.made), "faults are counted, not jobs and not the ends of loops"
    kills = [item for item in first.made if item.strike.kind == "kill"]
    assert f"({sum(item.program == 'sync' for item in kills)} left)" in result.covers
    again, _ = played(walked)
    assert sorted(map(str, again.made)) == sorted(map(str, kills)), "what was violated is walked again, and nothing else"
    done, result = played(walked)
    assert done.made == [] and result.runs == 0 and "(0 left)" in result.covers
    monkeypatch.setattr("scripts.proof.__main__.code", lambda: "ffff")
    assert len(played(walked)[0].made) == len(first.made), "other code"


def test_a_long_run_takes_one_program_whole_first_and_a_short_one_begins_where_it_is_told() -> None:
    items = schedule.runs(["sync", "background"])
    numbers = schedule.fitting(items, Played().known)
    first = sorted(number for number in numbers if number < schedule._FIRST)
    long, short = (schedule.order(numbers, items, whole, 5000) for whole in (True, False))
    assert long[:len(first)] == short[:len(first)] == first and sorted(long) == sorted(short) == sorted(numbers)
    names = [items[number].program for number in long[len(first):]]
    assert names == sorted(names, reverse=True) and len(set(names)) == 2
    assert short[len(first)] == min(number for number in numbers if number >= 5000)


# -- what a run must show --------------------------------------------------------------------------------------------------

KNOWN = Known({}, [{"write": 10, "read": 10}, {}], [[], []], None)
LAST_WRITE = Item("sync", Strike(0, "error", 10, "EIO"))


def surely(monkeypatch: pytest.MonkeyPatch, *made: Judged, item: Item = LAST_WRITE) -> list[str]:
    left = list(made)
    monkeypatch.setattr(zygote, "judge", lambda *_: left.pop(0))
    found = zygote.surely(item, KNOWN, "").violations
    assert left == []
    return found


def test_a_run_that_was_not_checked_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert surely(monkeypatch, Judged(fired=True, checked=True)) == []
    assert surely(monkeypatch, Judged(fired=True)) == ["the checker did not run"]
    assert surely(monkeypatch, Judged(checked=True), Judged(fired=True)) == ["the checker did not run"]


def test_a_fault_that_does_not_fire_is_tried_once_more_and_then_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = Judged(checked=True)
    assert surely(monkeypatch, missed, Judged(checked=True)) == ["its fault never fired"], "it is the last operation"
    assert surely(monkeypatch, Judged(checked=True), Judged(fired=True, checked=True)) == []
    beyond = Item("sync", Strike(0, "error", 11, "EIO"))
    assert surely(monkeypatch, Judged(checked=True), item=beyond) == []


def test_which_rank_reads_is_luck_so_a_run_in_which_it_did_not_read_so_often_is_the_end_of_its_loop(
        monkeypatch: pytest.MonkeyPatch) -> None:
    read = Item("sync", Strike(0, "read error", 10, "EIO"))
    fewer, missed = Judged(reached=9, checked=True), Judged(reached=10, checked=True)
    assert surely(monkeypatch, fewer, fewer, item=read) == []
    assert surely(monkeypatch, fewer, missed, item=read) == ["its fault never fired"]
    more = Item("sync", Strike(0, "read error", 10 + schedule.margin(read.strike), "EIO"))
    assert schedule.fitted(more, 0, KNOWN) == more
    (word,) = surely(monkeypatch, Judged(fired=True, checked=True), item=more)
    assert word == "there are more operations than the 10 that were counted"


def lied_away(monkeypatch: pytest.MonkeyPatch, root: Path, *told: str) -> Judged:
    """A run whose only checkpoint is zeros after a lie of its fsync; its rank says ``told``."""
    with distckpt.CheckpointManager(root) as manager, manager.saving(2) as files, files.writer("data.bin") as out:
        out.write(b"bytes")
    known = Known({2: standing(tree_of(str(root)))["step-2"][1], 90: ""}, [], [], None)
    (name,) = (path.name for path in (root / "step-2").iterdir() if path.name.startswith("data"))
    struck = {"what": "struck", "op": "fsync", "path": f"/.distckpt/staging/1/{'0' * 16}/step-2/{name}", "other": "", "at": 1.0}
    lines = [{"what": "begin", "save": 0, "at": 0.0}, struck, {"what": "told", "save": 0, "outcome": "committed", "at": 2.0},
             *({"what": what, "save": 0, "at": 3.0} for what in told)]
    monkeypatch.setattr(judge, "_run", lambda *_: [Ended(error="NoUsableCheckpoint", text="none")] * 2)
    found = Judged()
    program = replace(PROGRAMS["sync"], before=(), saves=((2, 2, "error"),))
    judge._look(program, Item("sync", Strike(0, "lie", 1)), known, str(root), [Ended(), Ended()], [lines, []], 90, found)
    return found


def test_a_lie_that_leaves_nothing_is_checked_for_all_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = lied_away(monkeypatch, tmp_path / "good")
    assert found.checked and found.violations == []
    found = lied_away(monkeypatch, tmp_path / "bad", "disturbed")
    assert found.checked and found.violations == ["I11: a failed save changed the state in save 0"]
