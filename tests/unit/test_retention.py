"""Which checkpoints stay: pure rules, checked as rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.errors import ConfigError
from distckpt.retention import (
    AnyOf,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepTotal,
    Policy,
    Record,
    from_limits,
    newest_first,
    parse,
)
from tests.support import attempt_id


def record(step: int, seq: int, *, stale: bool = False, **metrics: float) -> Record:
    return Record(attempt_id(seq), step, seq, stale, metrics)


def kept(policy: Policy, records: list[Record]) -> list[int]:
    return [r.seq for r in records if r.attempt in policy(records)]


RECORDS = st.lists(
    st.builds(lambda seq, step, stale, loss: Record(attempt_id(seq), step, seq, stale, {} if loss is None else {"loss": loss}),
              st.integers(1, 60), st.integers(0, 40), st.booleans(), st.none() | st.floats()),
    unique_by=lambda r: r.seq, max_size=12)
SINGLE = st.one_of(st.builds(KeepLast, st.integers(1, 5)), st.builds(KeepEvery, st.integers(1, 7)),
                   st.builds(KeepBest, st.integers(1, 4), st.just("loss"), st.sampled_from(["min", "max"])), st.just(KeepAll()))
POLICIES = st.lists(SINGLE, min_size=1, max_size=3).map(lambda ps: ps[0] if len(ps) == 1 else AnyOf(tuple(ps)))


@given(RECORDS, st.integers(1, 5))
def test_the_newest_of_this_line_is_always_kept(records: list[Record], count: int) -> None:
    if records:
        assert newest_first(records)[0].attempt in KeepLast(count)(records)


@given(RECORDS, st.integers(1, 5))
def test_keep_last_keeps_exactly_the_count(records: list[Record], count: int) -> None:
    assert len(KeepLast(count)(records)) == min(count, len(records))


@given(RECORDS)
def test_keep_all_keeps_all(records: list[Record]) -> None:
    assert kept(KeepAll(), records) == [r.seq for r in records]


@given(RECORDS, SINGLE, SINGLE)
def test_a_union_keeps_what_either_keeps(records: list[Record], one: Policy, other: Policy) -> None:
    assert (one | other)(records).keys() == one(records).keys() | other(records).keys()


@given(RECORDS, POLICIES)
def test_a_second_rotation_removes_nothing_more(records: list[Record], policy: Policy) -> None:
    first = policy(records)
    survivors = [r for r in records if r.attempt in first]
    assert policy(survivors).keys() == first.keys()


@given(RECORDS, POLICIES)
def test_the_order_of_the_list_does_not_matter(records: list[Record], policy: Policy) -> None:
    assert policy(records) == policy(records[::-1])


@given(POLICIES)
def test_a_policy_is_its_spec(policy: Policy) -> None:
    assert parse(policy.spec).spec == policy.spec
    assert parse(policy.spec) == policy


@given(RECORDS, POLICIES)
def test_a_stale_step_never_takes_a_slot_of_a_live_one(records: list[Record], policy: Policy) -> None:
    live = [r for r in records if not r.stale]
    assert policy(live).keys() <= policy(records).keys()


def test_a_stale_5000_beside_a_new_400_never_wins_a_slot() -> None:
    records = [record(4000, 8, stale=True, loss=0.1), record(5000, 9, stale=True, loss=0.1), record(300, 7),
               record(400, 10, loss=0.9)]
    assert kept(KeepLast(1), records) == [10]
    assert kept(KeepLast(2), records) == [7, 10]
    assert kept(KeepLast(3), records) == [9, 7, 10]
    assert kept(KeepBest(1), records) == [10]
    assert kept(KeepEvery(1000), records) == []


def test_the_order_is_by_commit_and_not_by_step() -> None:
    assert kept(KeepLast(2), [record(900, 1), record(100, 3), record(500, 2)]) == [3, 2]


def test_S24_adopted_ones_are_older_than_every_commit_and_ordered_by_step() -> None:
    adopted = [replace(record(step, 0), attempt=attempt_id(1000 + step)) for step in (900, 100, 500)]
    order = newest_first([*adopted, record(5, 1)])
    assert [(r.seq, r.step) for r in order] == [(1, 5), (0, 900), (0, 500), (0, 100)]


def test_keep_best_passes_over_what_has_no_number_and_takes_the_newer_of_equals() -> None:
    records = [record(1, 1, loss=0.5), record(2, 2, loss=math.nan), record(3, 3), record(4, 4, loss=0.5), record(5, 5, loss=0.7)]
    assert kept(KeepBest(1), records) == [4]
    assert kept(KeepBest(2), records) == [1, 4]
    assert kept(KeepBest(9), records) == [1, 4, 5]
    assert kept(KeepBest(1, mode="max"), records) == [5]
    assert kept(KeepBest(1, "accuracy"), records) == []


def test_keep_best_with_infinities() -> None:
    records = [record(1, 1, loss=math.inf), record(2, 2, loss=-math.inf), record(3, 3, loss=0.0)]
    assert kept(KeepBest(1), records) == [2] and kept(KeepBest(1, mode="max"), records) == [1]


def test_reasons_say_which_rule() -> None:
    found = (KeepLast(1) | KeepBest(1))([record(1, 1, loss=0.5), record(2, 2, loss=0.25)])
    assert found == {attempt_id(2): "one of the last 1; loss=0.25 is among the best 1"}


@pytest.mark.parametrize("limits", [
    {}, {"keep_last": None}, {"keep_last": 0}, {"keep_last": 0, "keep_every": 0, "keep_best": None},
    {"keep_last": None, "keep_best": 2}, {"keep_every": 100}])
def test_no_limit_means_that_everything_stays(limits: dict[str, int | None]) -> None:
    records = [record(n, n) for n in range(1, 30)]
    assert len(from_limits(**limits)(records)) == 29


def test_zero_and_none_leave_a_rule_out() -> None:
    assert from_limits(3, 0, None) == KeepLast(3)
    assert from_limits(3, 100, 2, "acc", "max").spec == "last=3|every=100|best=2,acc,max"


@pytest.mark.parametrize("limits", [
    {"keep_last": -1}, {"keep_last": 3, "keep_every": -5}, {"keep_last": 3, "keep_best": -1}, {"keep_last": 1.5},
    {"keep_last": True}, {"keep_last": "3"}, {"keep_last": 1, "keep_best": 1, "best_mode": "low"},
    {"keep_last": 1, "keep_best": 1, "best_metric": "a,b"}, {"keep_last": 1, "keep_best": 1, "best_metric": ""}])
def test_a_limit_is_a_whole_number_from_zero(limits: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        from_limits(**limits)  # type: ignore[arg-type]


def test_a_negative_limit_says_what_to_write_instead() -> None:
    with pytest.raises(ConfigError, match=r"keep_last must not be negative \(-1\); None or 0 means no limit"):
        from_limits(keep_last=-1)
    for make in (KeepLast, KeepEvery, KeepBest):
        with pytest.raises(ConfigError):
            make(0)


@pytest.mark.parametrize("spec", ["", "last", "last=", "last=x", "last=0", "best=1", "best=1,loss", "never", "last=3|",
                                  "every=-1"])
def test_a_spec_that_is_not_known_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        parse(spec)


def test_B77_a_limit_in_all_counts_the_best_and_keeps_it_and_the_newest() -> None:
    """Transformers' save_total_limit: at 3, the best and the last two; at 1, both the best and the last."""
    records = [Record(f"a{s}", s, s, metrics={"best_step": best}) for s, best in [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]]
    for count, stays in {1: {2, 5}, 2: {2, 5}, 3: {2, 4, 5}, 9: {1, 2, 3, 4, 5}}.items():
        assert set(KeepTotal(count)(records)) == {f"a{s}" for s in stays}, count
    newest_best = [*records, Record("a6", 6, 6, metrics={"best_step": 6})]
    assert set(KeepTotal(2)(newest_best)) == {"a5", "a6"}
    assert set(KeepTotal(2)([replace(r, metrics={}) for r in records])) == {"a4", "a5"}
    stale = [Record("old", 2, 9, stale=True), *records]
    assert set(KeepTotal(1)(stale)) == {"a2", "a5"}, "the step of an abandoned branch is another checkpoint"
    assert parse(KeepTotal(3).spec) == KeepTotal(3) and parse("total=2,x|every=5") == KeepTotal(2, "x") | KeepEvery(5)
    for wrong in (0, -1):
        with pytest.raises(ConfigError):
            KeepTotal(wrong)
