"""Names on disk: a name is ours only if all of it matches, and steps are numbers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt.errors import ConfigError
from distckpt.layout import (
    MARKER,
    Layout,
    Naming,
    check_member_path,
    check_series,
    check_step,
    is_taken,
    member_path_problem,
    rank_name,
    series_of,
)

TEMPLATES = ["step-{step}", "checkpoint-{step}", "global_step{step}", "epoch-{step}", "step-{step:08d}", "{step}",
             "ckpt.{step}.dir", "{step}-x", "step_{step:06}"]


@pytest.mark.parametrize("template", TEMPLATES)
@given(step=st.integers(0, 10**18 - 1))
def test_a_formatted_step_parses_back(template: str, step: int) -> None:
    naming = Naming.parse(template)
    assert naming.step_of(naming.format(step)) == step
    assert Naming.parse(naming.template) == naming
    assert series_of(naming, naming.format(step)) == ("main", step)
    rolling = naming.of_series("rolling")
    assert series_of(naming, rolling.format(step)) == ("rolling", step)
    assert naming.step_of(rolling.format(step)) is None and rolling.step_of(naming.format(step)) is None


@pytest.mark.parametrize("template", [
    "step", "", "step-{step}-{step}", "{step}{step}", "step-{Step}", "a/{step}", "../{step}", ".step-{step}", "step-{step}\n",
    " {step}", "{step} ", "step-{step:x}", "step-{step:8d}", "step1{step}", "{step}0", "{step:09999d}", "step-{step", "s-{step}}",
    "s\0{step}", "s\nt-{step}", "s{-{step}", None, 5])
def test_a_naming_that_cannot_tell_steps_apart_is_refused(template: object) -> None:
    with pytest.raises(ConfigError):
        Naming.parse(template)  # type: ignore[arg-type]


def test_a_naming_without_step_says_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"'checkpoint'.*\{step\}.*as in 'step-\{step\}'"):
        Naming.parse("checkpoint")


@pytest.mark.parametrize("name", [
    "step-", "step-1.tmp", "step-1-tmp-x", "xstep-1", "step-1 ", "step--1", "step-+1", "step-1_0", "step-\u0661", "step-1e3",
    "step-0x1", "Step-1", "step-" + "9" * 21, "step-1/..", "step-\n1", "step-1\n"])
def test_a_name_counts_only_as_a_whole(name: str) -> None:
    assert Naming.parse("step-{step}").step_of(name) is None


def test_a_name_that_only_begins_like_a_series_is_nobodys() -> None:
    naming = Naming.parse("checkpoint-{step}")
    assert naming.of_series("rolling").step_of("checkpoint-200-rolling") == 200
    assert naming.of_series("rolling").step_of("checkpoint-200-rolling-tmp") is None
    assert series_of(naming, "checkpoint-200-rolling") == ("rolling", 200)
    assert series_of(naming, "checkpoint-200-rolling-tmp") is None
    assert series_of(naming, "checkpoint-200-") is None and series_of(naming, "checkpoint--rolling") is None


def test_steps_are_numbers_whatever_the_padding() -> None:
    naming = Naming.parse("step-{step:08d}")
    assert naming.format(7) == "step-00000007"
    assert naming.step_of("step-7") == naming.step_of("step-00000007") == naming.step_of("step-0000000000007") == 7


@pytest.mark.parametrize(("one", "other", "meet"), [
    ("step-{step}", "step-{step}", True), ("step-{step}", "step-{step:08d}", True), ("step-{step}", "epoch-{step}", False),
    ("step-{step}", "step-{step}-rolling", False), ("{step}", "step-{step}", False), ("a{step}b1c", "a5b{step}c", True),
    ("a{step}b1c", "a5x{step}c", False), ("a{step}", "ab{step}", False), ("run-{step}-of-7", "run-3-of-{step}", True)])
def test_S24_templates_that_can_match_one_name_overlap(one: str, other: str, meet: bool) -> None:
    first, second = Naming.parse(one), Naming.parse(other)
    assert first.overlaps(second) is second.overlaps(first) is meet


BARE = st.text(alphabet="a1-", max_size=3)


@given(BARE, BARE, BARE, BARE, st.integers(0, 11), st.integers(0, 11))
def test_S24_overlap_is_exactly_one_name_for_both(p1: str, s1: str, p2: str, s2: str, n1: int, n2: int) -> None:
    try:
        first, second = Naming.parse(f"{p1}{{step}}{s1}"), Naming.parse(f"{p2}{{step}}{s2}")
    except ConfigError:
        return
    if second.step_of(first.format(n1)) is not None or first.step_of(second.format(n2)) is not None:
        assert first.overlaps(second)
    if first.overlaps(second):
        tries = [first.format(n) for n in range(120)] + [second.format(n) for n in range(120)]
        assert any(first.step_of(t) is not None and second.step_of(t) is not None for t in tries)


@pytest.mark.parametrize("path", [
    "", "/etc/passwd", "../x", "a/../b", "a/./b", "a//b", "a/", "./a", "..", ".", "a\nb", "a\0b", "a\x7f", "\ud800", "x" * 1025,
    MARKER, None, 7, b"bytes"])
def test_a_file_name_that_may_not_stand_in_a_checkpoint_is_refused(path: object) -> None:
    assert member_path_problem(path) is not None
    with pytest.raises(ConfigError):
        check_member_path(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["a", "a/b/c.pt", ".metadata", "sub/commit.json", "ünï.bin", "a b", "..a", "commit.json.old"])
def test_ordinary_file_names_are_fine(path: str) -> None:
    assert check_member_path(path) == path


@pytest.mark.parametrize(("path", "why"), [
    ("", "empty or not text"), (7, "empty or not text"), ("/a", "absolute"), ("a\nb", "control character"), ("a/../b", "'..'"),
    ("\ud800", "UTF-8"), ("x" * 1025, "longer than 1024"), ("/".join("d" * 34), "more than 32"), ("x" * 256, "255 bytes"),
    (MARKER, "marker's own name")])
def test_a_refused_file_name_is_told_what_is_wrong_with_it(path: object, why: str) -> None:
    assert why in (member_path_problem(path) or "")


def test_a_rank_file_keeps_its_suffix_last() -> None:
    assert rank_name("optim.pt", 3, 16) == "optim.rank-00003-of-00016.pt"
    assert rank_name("sub/rng", 0, 1) == "sub/rng.rank-00000-of-00001"
    with pytest.raises(ConfigError):
        rank_name("../optim.pt", 0, 1)


@pytest.mark.parametrize("step", [True, 1.0, "1", None, -1, 10**18])
def test_a_step_is_a_whole_number(step: object) -> None:
    with pytest.raises(ConfigError):
        check_step(step)


def test_a_step_may_be_anything_that_is_an_index() -> None:
    class Index:
        def __index__(self) -> int:
            return 7

    assert check_step(Index()) == 7 and check_step(0) == 0


@pytest.mark.parametrize("name", ["", "a-b", "a b", "a/b", "x" * 65, "é", None])
def test_a_series_is_one_plain_word(name: object) -> None:
    with pytest.raises(ConfigError):
        check_series(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("root", ["", "a\0b", "s3://bucket/x", b"bytes"])
def test_a_root_is_a_path(root: object) -> None:
    with pytest.raises(ConfigError):
        Layout.at(root)  # type: ignore[arg-type]


def test_every_name_of_ours_stands_below_the_root() -> None:
    layout = Layout.at("/r")
    places = [layout.record, layout.owner(3), layout.staging(3, "a"), layout.trash(3, "a"), layout.leases("a"),
              layout.rejected("a"), layout.rollback, layout.journal(3), layout.pointer, layout.final("step-1")]
    assert all(place.startswith("/r/") for place in places) and len(set(places)) == len(places)
    assert layout.staging(3, "a", "step-1") == "/r/.distckpt/staging/3/a/step-1"


def test_what_a_takeover_set_aside_is_told_from_an_attempt() -> None:
    assert is_taken("taken-staging-3") and not is_taken("taken-staging-3.x") and not is_taken("a" * 16)
    assert not re.fullmatch(r"[0-9a-f]{16}", "taken-trash-1")
