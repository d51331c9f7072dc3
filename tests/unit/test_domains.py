"""Storage domains without ranks: who shares a disk, what stands on all of them, and one node's root under the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distckpt import marker as _marker
from distckpt.domains.domains import Domains, joined, ranges, ranks_text
from distckpt.domains.standing import decide, partial
from distckpt.errors import ConfigError, MarkerError
from distckpt.layout import MARKER
from distckpt.marker import Marker, build, glance, parse, parse_head
from tests.support import Command, make_checkpoint, make_marker, record_root

TWO = Domains(((0, 1), (2, 3)), 2, {0: "a", 1: "a", 2: "b", 3: "b"})
PLACES = (("a", (0, 1)), ("b", (2, 3)))


def share(part: int, of: int = 2, **more: Any) -> Marker:
    found = make_marker(5, payload={"x.bin": b"bytes"}, world=4, **more)
    return replace(found, head=replace(found.head, part=part, of=of), domains=PLACES[:of])


# -- who shares a disk ----------------------------------------------------------------------------------------------------


def test_ranges_and_how_they_read() -> None:
    assert ranges([3, 0, 1, 2, 8]) == [[0, 3], [8, 8]]
    assert (ranks_text([7]), ranks_text([0, 1]), ranks_text([0, 1, 5])) == ("rank 7", "ranks 0-1", "ranks 0-1, 5")


@pytest.mark.parametrize("seen, domains", [
    ({0: [[0, 3]], 1: [[0, 3]], 2: [[0, 3]], 3: [[0, 3]]}, [[0, 1, 2, 3]]),
    ({0: [[0, 1]], 1: [[0, 1]], 2: [[2, 3]], 3: [[2, 3]]}, [[0, 1], [2, 3]]),
    ({0: [[0, 0]], 1: [[1, 1]], 2: [[0, 0], [2, 2]], 3: [[1, 1], [3, 3]]}, [[0, 2], [1, 3]]),
    ({0: [[0, 0]], 1: [[0, 1]], 2: [[1, 2]]}, [[0, 1, 2]])])
def test_S10_one_sight_in_either_direction_joins_two_ranks(seen: dict[int, list[list[int]]], domains: list[list[int]]) -> None:
    assert joined(seen) == domains


def test_a_domain_and_its_name() -> None:
    assert (TWO.index, TWO.mine, TWO.leads, TWO.committers) == (1, (2, 3), True, [0, 2])
    assert TWO.name(0) == "a (ranks 0-1)"


# -- what stands on all of them ---------------------------------------------------------------------------------------------


def held(**more: Any) -> dict[str, Any]:
    return {"run": None, "naming": None, "seq": 0, "generation": 1, "published": [], **more}


def test_S1_what_is_published_anywhere_was_decided_and_the_count_goes_on_from_the_highest() -> None:
    said = decide(TWO, [held(run="r", seq=4, published=["x"]), held(seq=7, generation=3)], None, "new", "step-{step}")
    assert said == {"run": "r", "naming": "step-{step}", "seq": 7, "decided": ["x"], "generations": [1, 3]}
    assert decide(TWO, [held(), held()], "mine", "new", "step-{step}")["run"] == "mine"


def test_nodes_that_do_not_belong_together() -> None:
    with pytest.raises(ConfigError, match=r"not of one run: 'r' on a \(ranks 0-1\); 's' on b \(ranks 2-3\)"):
        decide(TWO, [held(run="r"), held(run="s")], None, "new", "step-{step}")
    with pytest.raises(ConfigError, match="not of one naming"):
        decide(TWO, [held(naming="a-{step}"), held(naming="b-{step}")], None, "new", "step-{step}")
    with pytest.raises(ConfigError, match=r"belongs to run 'r' on b \(ranks 2-3\), not 's'"):
        decide(TWO, [held(), held(run="r")], "s", "new", "step-{step}")


def row(attempt: str, step: int, part: int, of: int = 2) -> list[Any]:
    return [attempt, f"step-{step}", "main", step, step, part, of]


def test_what_does_not_stand_everywhere_is_partial_and_says_where_it_is() -> None:
    here = {"entries": [row("x", 1, 0), row("y", 2, 0)], "traces": [], "rejected": {}}
    there = {"entries": [row("x", 1, 1), row("z", 3, 1)], "traces": [], "rejected": {}}
    reasons, abroad = partial(TWO, [here, there])
    assert set(reasons) == {"y", "z"}
    assert reasons["y"] == "it stands on a (ranks 0-1) and not on b (ranks 2-3)"
    assert abroad.missing == [("main", "step-3", "it stands on b (ranks 2-3) and not on a (ranks 0-1)")]


def test_a_whole_copy_on_every_node_can_be_used_and_twice_the_same_share_cannot() -> None:
    def reasons(*rows: list[Any]) -> dict[str, str]:
        return partial(TWO, [{"entries": [one], "traces": [], "rejected": {}} for one in rows])[0]

    assert reasons(row("x", 1, 0, 1), row("x", 1, 0, 1)) == {}
    assert reasons(row("x", 1, 1), row("x", 1, 0)) == {}, "permuted nodes are told apart at resume, rank by rank"
    assert "its shares are" in reasons(row("x", 1, 0), row("x", 1, 0))["x"]
    assert "its shares are" in reasons(row("x", 1, 0, 3), row("x", 1, 1, 3))["x"]


def test_S7_an_empty_node_among_full_ones_is_named() -> None:
    full = {"entries": [row("x", 1, 0), row("y", 2, 0)], "traces": [], "rejected": {}}
    reasons, abroad = partial(TWO, [full, {"entries": [], "traces": ["the journal records a commit"], "rejected": {}}])
    assert "b holds no checkpoint of this run, and a has 2, the newest of step 2" in reasons["x"]
    assert abroad.traces == ["the journal records a commit on b"]


# -- the marker of a share ------------------------------------------------------------------------------------------------


def test_a_share_says_which_of_how_many_and_comes_back_as_it_was() -> None:
    found = share(1)
    data = build(found)
    assert parse(data) == found and parse_head(data).part == 1 and glance(data).head == found.head
    assert b'"part"' not in build(make_marker(5)) and b'"domains"' not in build(make_marker(5))
    assert parse(build(make_marker(5))).head.of == 1


@pytest.mark.parametrize("broken", [
    replace(share(1), domains=()), replace(share(1), domains=(*PLACES, ("c", (4,)))),
    replace(share(0, 1), domains=PLACES), replace(share(0), head=replace(share(0).head, part=2)),
    replace(share(0), head=replace(share(0).head, part=-1))])
def test_a_share_that_contradicts_itself_is_no_marker(broken: Marker) -> None:
    data = build(broken)
    for read in (parse, glance):
        with pytest.raises(MarkerError):
            read(data)


# -- one node's root under the command --------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> str:
    place = str(tmp_path / "run")
    record_root(place)
    for step in (1, 2, 3):
        found = make_checkpoint(place, step, retention="keep_last=1")
        head = replace(found.head, part=1, of=2)
        Path(place, f"step-{step}", MARKER).write_bytes(_marker.build(replace(found, head=head, domains=PLACES)))
    return place


def test_the_command_says_that_a_root_is_one_of_several(root: str, command: Command) -> None:
    for words in (("ls", root), ("verify", root)):
        answer = command(*words)
        assert answer.code == 0 and "this is one of 2 nodes' own disks (share 2)" in answer.out
    shown = command("show", f"{root}@2").out
    assert "1 of 2: a (ranks 0-1)" in shown and "2 of 2: b (ranks 2-3), this share" in shown
    assert command("ls", root, "--json").json["checkpoints"][0]["share"] == [2, 2]


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_S1_nobody_prunes_shares_by_one_nodes_view(flags: tuple[str, ...], root: str, command: Command) -> None:
    answer = command("prune", root, "--keep-last", "1", *flags)
    assert "share 2 of 2" in answer.out and "removed 0 of 3" in answer.out.replace("would remove", "removed")
    assert sorted(path.name for path in Path(root).glob("step-*")) == ["step-1", "step-2", "step-3"]
