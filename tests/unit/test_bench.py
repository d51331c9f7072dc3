"""``scripts/bench``: a missed target is red, one within the slack is not; what it says of the place; the charts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import __main__ as bench
from scripts.benchmarks import peers, place
from scripts.benchmarks.report import Row, missed, shown, table
from scripts.benchmarks.rounds import rotated, scenarios

NAME = "toy"


def compared(ratio: float, target: float | None) -> Row:
    """The median is ``ratio``, and no other round has it."""
    return Row(NAME, [ratio, 100.0, 0.001], [1.0, 1.0, 1.0], target, case=1, least=3)


def once(*arguments: Any, **more: Any) -> Row:
    return Row(NAME, *arguments, **more, least=1)


@pytest.mark.parametrize(("row", "red"), [
    (compared(1.14, 1.0), False), (compared(1.16, 1.0), True), (compared(0.5, 1.0), False), (compared(9.0, None), False),
    (compared(1 / 40 * 1.1, 1 / 40), False), (compared(1 / 40 * 1.2, 1 / 40), True),
    (once([3.4e-3], [], limit=3e-3), False), (once([3.5e-3], [], limit=3e-3), True),
    (once([17e6], [], limit=16e6, unit="B"), False), (once([19e6], [], limit=16e6, unit="B"), True),
    (once([0.0], [], limit=0.0, unit=""), False), (once([1.0], [], limit=0.0, unit=""), True),
    (once([2.0], [100.0], 1.0, limit=1.0), True), (once([2.0], [1.0], 1.0, limit=3.0), True),
    (Row(NAME, [], [], 1.0), True), (Row(NAME, [], [], limit=1.0), True), (Row(NAME, [], []), False)])
def test_a_median_is_red_beyond_the_slack_only(row: Row, red: bool) -> None:
    assert bool(missed([row])) == red
    assert bool(row.as_json()["missed"]) == red


def test_what_was_missed_is_named_with_its_case() -> None:
    assert missed([compared(2.0, 1.0)]) == ["case 1: toy: ratio 2, at most 1 wanted"]
    assert missed([once([5e-3], [], limit=2e-6)]) == ["toy: 5 ms, at most 2 µs wanted"]
    assert missed([Row(NAME, [], [], 1.0, "it did not install")]) == ["toy: nothing to compare: it did not install"]


@pytest.mark.parametrize(("rounds", "least", "said"), [
    (8, None, ["toy: 8 rounds, at least 9 wanted"]), (9, None, []),
    (19, 20, ["toy: 19 rounds, at least 20 wanted"]), (20, 20, [])])
def test_a_row_of_too_few_rounds_is_missed_whatever_its_median(rounds: int, least: int | None, said: list[str]) -> None:
    row = Row(NAME, [1.0] * rounds, [], **{} if least is None else {"least": least})
    assert missed([row]) == said and ("MISSED" in table([row])) == bool(said) and f"{rounds} rounds" in table([row])


def test_rows_are_shown_in_the_scale_of_their_unit() -> None:
    assert [shown(v, "s") for v in (2.5, 0.0025, 2.5e-6, 0.0)] == ["2.5 s", "2.5 ms", "2.5 µs", "0 µs"]
    assert [shown(v, "B") for v in (16e6, 120.0)] == ["16 MB", "120 B"] and shown(1.5, "") == "1.5"
    rows = [compared(2.0, 1.0), once([16e6], [], limit=20e6, unit="B"), Row(NAME, [], [], note="no peer")]
    lines = table(rows).splitlines()
    assert "0.001/2/100 s" in lines[1] and "<= 1 MISSED" in lines[1] and "2 [" in lines[1]
    assert "16/16/16 MB" in lines[2] and "<= 20 MB" in lines[2] and "MISSED" not in lines[2]
    assert lines[3].endswith("no peer")


def _main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: list[Row], *arguments: str) -> int:
    def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
        yield from rows

    monkeypatch.setattr(bench, "GROUPS", {"toys": run})
    return bench.main(["toys", "--dir", str(tmp_path / "place"), *arguments])


def test_check_ends_with_1_where_something_was_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = compared(1.0, 1.0), compared(2.0, 1.0)
    assert _main(monkeypatch, tmp_path, [good], "--check") == 0
    assert _main(monkeypatch, tmp_path, [good, bad], "--check") == 1
    printed = capsys.readouterr().out
    assert "MISSED case 1: toy: ratio 2, at most 1 wanted\n2 rows with a target; 1 missed, by more than 15%" in printed
    assert _main(monkeypatch, tmp_path, [bad], "--json", str(tmp_path / "rows.json")) == 0, "without --check it only says so"
    row = json.loads((tmp_path / "rows.json").read_text())["groups"]["toys"][0]
    assert row["ratios"] == [2.0, 100.0, 0.001] and row["target"] == 1.0 and row["case"] == 1 and row["missed"] and "load" in row


def test_a_peer_that_is_not_here_is_no_miss_and_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(monkeypatch, tmp_path, [compared(1.0, 1.0), Row("beside gone", [], [], note="did not install: no"),
                                         Row("ours", [], [], 1.0)], "--check") == 1
    printed = capsys.readouterr().out
    assert "NOT MEASURED beside gone: did not install: no\n" in printed and printed.count("NOT MEASURED") == 1
    assert "2 rows with a target; 1 missed" in printed and "1 peers not measured" in printed


def test_a_chart_for_each_scenario(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="of the extra bench")
    rows = [Row(NAME, [1.0], [1.0], scenario=name, least=1) for name in ("toys", "caller 4,000 files", "toys")]
    assert _main(monkeypatch, tmp_path, rows, "--charts", str(tmp_path / "charts")) == 0
    drawn = {path.name: path.read_text() for path in (tmp_path / "charts").iterdir()}
    assert sorted(drawn) == ["toys-caller-4-000-files.svg", "toys.svg"]
    assert "scripts/bench toys caller 4,000 files: " in drawn["toys-caller-4-000-files.svg"]


def test_a_group_that_ends_early_is_red_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(place: Path, quick: bool, only: str) -> Iterator[Row]:
        yield compared(1.0, 1.0)
        raise RuntimeError("a rank died")

    def works(place: Path, quick: bool, only: str) -> Iterator[Row]:
        yield Row("another", [1.0], [1.0])

    monkeypatch.setattr(bench, "GROUPS", {"breaks": breaks, "works": works})
    assert bench.main(["--dir", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "another" in out and "FAILED breaks" in out and "a rank died" in err


def test_a_run_of_nothing_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        _main(monkeypatch, tmp_path, [], "--check")


@pytest.mark.parametrize("arguments", [["nothing"], ["toys", "--size", "3"], ["--loop", "ntfs", "8G"], ["--loop", "ext4", "8"]])
def test_what_cannot_be_run_is_refused_first(arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
        raise AssertionError("it ran")

    monkeypatch.setattr(bench, "GROUPS", {"toys": run})
    with pytest.raises(SystemExit) as ended:
        bench.main([*arguments, "--dir", str(tmp_path)])
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err


def test_help_names_every_group() -> None:
    done = subprocess.run([sys.executable, "-m", "scripts.benchmarks", "--help"], capture_output=True, text=True, timeout=60,
                          cwd=peers.REPOSITORY)
    assert done.returncode == 0 and all(f"\n  {name} " in done.stdout for name in bench.GROUPS), done.stdout


def test_scenarios_run_in_directories_of_their_own_that_are_gone_afterwards(tmp_path: Path,
                                                                             capsys: pytest.CaptureFixture[str]) -> None:
    def scenario(folder: Path, quick: bool) -> Iterator[Row]:
        assert folder.is_dir() and quick
        yield Row(folder.name, [1.0], [])

    def fails(folder: Path, quick: bool) -> Iterator[Row]:
        raise OSError("full")
        yield

    found = list(scenarios(tmp_path, True, "n", {"one": scenario, "nine": scenario, "two": fails}))
    assert [(row.name, row.scenario) for row in found] == [("one", "one"), ("nine", "nine")]
    assert not missed(found), "a quick run is exempt from the least number of rounds"
    printed = capsys.readouterr().out
    assert all(f"-- {name}: load " in printed for name in ("one", "nine")) and printed.count("at the end") == 2
    with pytest.raises(OSError, match="full"):
        list(scenarios(tmp_path, True, "two", {"two": fails}))
    assert not list(tmp_path.iterdir())


def test_nobody_always_follows_the_same_one() -> None:
    names = ["a", "b", "c"]
    before = {name: {order[order.index(name) - 1] if order.index(name) else "" for order in (rotated(names, t) for t in range(6))}
              for name in names}
    assert all(len(seen) == 3 for seen in before.values()), before


MOUNTS = """\
21 1 {device} / / rw - ext4 /dev/older rw
22 1 {device} / / rw,relatime shared:1 master:2 - {kind} /dev/none-such rw
23 1 9999:1 / /boot rw - xfs /dev/other rw
"""


@pytest.mark.parametrize(("kind", "said"), [
    ("ext4", "ext4 on /dev/none-such (journal not known)"), ("xfs", "xfs on /dev/none-such (journal)"),
    ("tmpfs", "tmpfs on /dev/none-such (memory: nothing is durable, and an fsync costs nothing)")])
def test_the_file_system_is_named_with_what_an_fsync_means(kind: str, said: str, tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS.format(device=f"{os.major(device)}:{os.minor(device)}", kind=kind))
    assert place.describe(tmp_path, mounts) == said
    assert place.describe(tmp_path, tmp_path / "nothing") == "an unknown file system"


def test_sizes_of_a_loop_are_read() -> None:
    assert place.size_of("8G") == 8 << 30 and place.size_of("800m") == 800 << 20
    for text in ("", "8", "G", "-1G", "0G", "8T"):
        with pytest.raises(ValueError, match="8G"):
            place.size_of(text)


@pytest.mark.root_only
@pytest.mark.parametrize("kind", place.LOOPS)
def test_a_loop_is_a_journaled_file_system_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    if place.disks.missing(f"mkfs.{kind}"):
        pytest.skip(f"no {kind} can be mounted here")
    program = ("import sys; from pathlib import Path; from scripts.benchmarks.place import describe, loop\n"
               "with loop(sys.argv[1], 400 << 20, Path(sys.argv[2])) as place: print(describe(place))")
    done = subprocess.run([sys.executable, "-c", program, kind, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{kind} on /dev/loop") and "(journal" in done.stdout and "not known" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_charts_are_drawn_of_everything_that_was_measured(tmp_path: Path) -> None:
    charts = pytest.importorskip("scripts.benchmarks.charts", reason="needs matplotlib, of the extra bench")
    rows = [compared(2.0, 1.0), compared(0.3, 0.5), compared(1.0, None), Row("only a limit", [1e-6], [], limit=2e-6, case=14),
            Row("not measured", [], [], 1.0), Row("no target", [1.0], []), Row("lost nothing", [-1.0, 2.0], [1.0, 1.0])]
    charts.draw("toys", rows, "ext4", tmp_path / "toys.svg")
    drawn = (tmp_path / "toys.svg").read_text()
    assert all(text in drawn for text in ("case 1", "case 14", "only a limit", "lost nothing", "2x", "scripts/bench toys: ext4"))
    assert "not measured" not in drawn and "no target" not in drawn.replace("median, no target", "")
    charts.draw("none", [Row("not measured", [], [])], "ext4", tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


# -- peers in environments of their own ----------------------------------------------------------------------------------


SAMPLE = {"stall": 0.2, "ended": 1.0, "durable": 2.0}


def test_the_best_peer_that_copies_sets_the_target_and_one_that_overlaps_a_target_of_its_own() -> None:
    found: peers.Samples = {
        ("distckpt", "sync"): [SAMPLE], ("distckpt", "background"): [SAMPLE],
        ("distckpt", "overlap"): [{**SAMPLE, "stall": 0.001}],
        ("write + fsync", "sync"): [SAMPLE],
        ("slow", "sync"): [SAMPLE], ("slow", "background"): [SAMPLE],
        ("quick", "sync"): [{**SAMPLE, "durable": 4.0}], ("quick", "background"): [{**SAMPLE, "stall": 0.1}],
        ("quick", "overlap"): [{**SAMPLE, "stall": 0.002}]}
    rows = {row.name: row for row in (*peers.durable_rows(found, "1 MB"), *peers.stall_rows(found, "1 MB"))}
    assert rows["Durable save, 1 MB / quick + fsync"].ratios == [0.5]
    assert all(rows[f"Durable save, 1 MB / {name} + fsync"].target == 1.0 for name in ("quick", "slow"))
    assert rows["Durable save, 1 MB / write + fsync"].target == 0.85
    assert rows["Durable save, 1 MB / quick as it ends"].ratios == [2.0], "ours durable beside theirs that is not"
    assert "Durable save, 1 MB / write + fsync" in rows and "Durable save, 1 MB / write + fsync as it ends" not in rows
    best = rows["Stall, overlap, 1 MB / quick, the best that copies"]
    assert best.target == 1 / 40 and best.limit == 3e-3 and best.case == 2 and best.ratios == [0.01]
    assert all(row.least == 20 for name, row in rows.items() if name.startswith("Stall"))
    assert rows["Stall, overlap, 1 MB / slow"].target is None
    assert rows["Stall, both overlap, 1 MB / quick"].target == 1.0
    assert rows["Background, durable, 1 MB / slow, background, + fsync"].case == 4


PROGRAM = """\
import os, sys
from common import Peer, Pending, main

def start(place, state):
    def sync(path, turn):
        print("a peer prints", flush=True)
        os.mkdir(path)
        with open(path + "/x", "wb") as out:
            out.write(bytes(100))
    def background(path, turn):
        if {dies}:
            sys.exit("out of luck")
        sync(path, turn)
        return Pending(lambda: None)
    return Peer("7", {{"sync": sync, "background": background, "overlap": background}})

main(start)
"""


def test_a_peer_that_does_not_install_or_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Path(peers.__file__).parent / "programs"
    for name, dies in (("works", False), ("dies", True)):
        found = f"import sys; sys.path.insert(0, {str(programs)!r})\n"
        (tmp_path / f"{name}.py").write_text(found + PROGRAM.format(dies=dies))
    monkeypatch.setattr(peers, "PROGRAMS", tmp_path)
    monkeypatch.setattr(peers, "environment", lambda folder, packages: "pip says\nno")
    toys = (peers.Peer("distckpt", "works"), peers.Peer("bad luck", "dies"), peers.Peer("gone", "gone", ("gone==1",)),
            peers.Peer("no program", "nowhere"), peers.Peer("other", "works"))
    place = tmp_path / "place"
    place.mkdir()
    every = list(peers.run(place, True, "", toys))
    assert {row.scenario for row in every} == {"durable", "stall"}
    rows = {row.name: row for row in every}
    assert len(rows["Durable save, 24 MB, 1 process / other + fsync"].ratios) == 1
    assert "out of luck" in rows["beside bad luck"].note and "bad luck, background" not in str(rows)
    assert rows["beside gone"].note == "did not install: pip says no" and rows["beside gone"].absent
    why = rows["beside no program"].note
    assert "did not start" in why and "nowhere.py" in why
    with pytest.raises(RuntimeError, match="ours was not measured"):
        list(peers.run(place, True, "stall", (peers.Peer("distckpt", "nowhere"), peers.Peer("other", "works"))))
