"""What the table of peers rests on: what counts as bad, what a journal adds, which fsyncs came too early, which cuts count."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.replay import Mark, Names, Run, Step, Sync, Write
from scripts.proof import blocklog, peers
from scripts.proof.layer import Budget, Result
from scripts.proof.peers import blocks, table, violations
from scripts.proof.peers.child import Child
from scripts.proof.peers.judge import Goldens, Judge, Picker, Tally, verdict
from scripts.proof.peers.known import PEERS, Peer
from scripts.proof.peers.recording import Journal, Recording, tree_of
from scripts.proof.peers.table import HEAD, LAST, MODEL, WITHIN, Row, keep, kept, line

PEER = Peer("toy", "toy", None, unread="log$", optional="extra$")
GOLDEN = Goldens(PEER, {1: ("one", {"a": b"1", "extra": b"x"}), 2: ("two", {"a": b"2"})})
BASE = "/w"


class Newest(Picker):
    """The rule "the directory with the last name", without a process."""

    def __init__(self) -> None:
        self.number = 0

    def pick(self, tree: dict[str, bytes | None]) -> tuple[str, dict[str, bytes | None]] | None:
        names = sorted(path for path, data in tree.items() if data is None and "/" not in path)
        return (names[-1], {p.split("/", 1)[1]: d for p, d in tree.items() if p.startswith(f"{names[-1]}/")}) if names else None


@pytest.mark.parametrize(("found", "number"), [
    (None, 0), (("one", {"a": b"1", "extra": b"x"}), 1), (("one", {"a": b"1"}), 1), (("two", {"a": b"2", "more": b""}), 2),
    (("one", {"a": b"1", "extra": b"y"}), -1), (("one", {"extra": b"x"}), -1), (("two", {"a": b"1"}), -1), (("two", {}), -1)])
def test_only_what_is_bit_for_bit_an_acknowledged_save_is_taken_for_it(found: tuple[str, dict[str, bytes | None]] | None,
                                                                       number: int) -> None:
    assert GOLDEN.match(found) == number


def test_a_state_is_bad_when_an_acknowledged_save_is_lost_or_a_damaged_one_is_picked() -> None:
    bad = ["older one picked", "nothing left", "damaged one picked"]
    assert [verdict(picked, 2) for picked in (2, 3, 1, 0, -1)] == ["", "", *bad]
    assert [verdict(picked, 0) for picked in (0, 1, -1)] == ["", "", "damaged one picked"]


def make(*, sync_file: bool, sync_dir: bool, early: bool = False) -> Recording:
    """Two saves, each a directory with one file, of 3 bytes."""
    steps: list[Step] = []
    root, number = 2, 10
    steps.append(Names(1, 0, "root", {(root, "root"): 3}, frozenset({root}), {}, (3, "dir")))
    steps.append(Names(1, 0, "tmp", {(root, "tmp"): 4}, frozenset({root}), {}, (4, "dir")))
    steps.append(Sync(1, 0, root))
    for name in ("one", "two"):
        folder, file = number, number + 1
        number += 2
        steps.append(Names(1, 0, name, {(3, name): folder}, frozenset({3}), {}, (folder, "dir")))
        steps.append(Names(1, 0, "a", {(folder, "a"): file}, frozenset({folder}), {}, (file, "file")))
        save: list[Step] = [Write(1, 0, file, 0, name.encode())]
        if sync_file:
            save.insert(0 if early else 1, Sync(1, 0, file))
        steps += save
        if sync_dir:
            steps += [Sync(1, 0, folder), Sync(1, 0, 3)]
        steps.append(Mark(1, 0, "ACK"))
    return Recording(Run(BASE, CrashFiles(BASE), steps), f"{BASE}/root")


def wrong(recording: Recording, mode: str) -> set[str]:
    golden = Goldens(PEER, {1: ("one", {"a": b"one"}), 2: ("two", {"a": b"two"})})
    return set(Judge(PEER, recording, Newest(), golden, 64).mode(mode).bad)


def test_losses_are_found_where_they_can_happen() -> None:
    durable = make(sync_file=True, sync_dir=True)
    assert durable.fsyncs() == (2, 0, 4)
    late = {"damaged one picked"}  # this toy shows its directory before it is whole
    assert wrong(durable, "kill") == wrong(durable, "weak") == late
    assert {"nothing left", "older one picked"} <= wrong(make(sync_file=True, sync_dir=False), "weak")
    assert wrong(durable.without_fsyncs("dir"), "weak") >= {"nothing left", "older one picked"}
    assert durable.without_fsyncs("file").fsyncs() == (0, 0, 4)


def test_an_fsync_before_the_bytes_are_written_is_counted_as_early() -> None:
    assert make(sync_file=True, sync_dir=True, early=True).fsyncs() == (2, 2, 4)


def test_with_a_journal_the_fsync_of_a_file_makes_names_durable() -> None:
    found = {}
    for kind in (CrashFiles, Journal):
        disk = kind(BASE)
        disk.mkdir(f"{BASE}/d")
        out = disk.open(f"{BASE}/d/f")
        out.write(b"x")
        out.fsync()
        found[kind] = {tuple(tree_of(state, BASE)) for state in disk.crash_states(50)}
    assert found[Journal] == {("d", "d/f")}
    assert () in found[CrashFiles]


def test_only_what_is_wrong_with_distckpt_or_with_the_test_is_a_violation() -> None:
    ours = Peer("distckpt", "toy", None, ours=True)
    lost = Tally(states=3, bad={"nothing left": 2}, examples={"nothing left": "after step 4"})
    assert violations(Row(PEER, tallies={"weak": lost}, wrong_cuts=1, cuts=1)) == []
    assert violations(Row(ours, tallies={"weak": Tally(states=3)}, controls={"file": {"weak": lost}}, cuts=3)) == []
    assert len(violations(Row(ours, tallies={"kill": lost, "weak": lost}))) == 2
    assert len(violations(Row(ours, wrong_cuts=1, cuts=3))) == 1
    assert len(violations(Row(ours, controls={"dir": {"weak": Tally(states=3)}}))) == 1
    assert len(violations(Row(ours, failed="no strace"))) == 1


def test_fewer_than_five_other_libraries_is_a_violation_and_what_was_not_reached_is_named(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(failed: int, seconds: float = 1e6) -> Result:
        monkeypatch.setattr(peers, "rows", lambda seed: (
            Row(peer, failed="no wheel" if not peer.ours and others.index(peer.program) < failed else "") for peer in PEERS))
        return peers.LAYER.run(Budget(seconds))

    others = list(dict.fromkeys(peer.program for peer in PEERS if not peer.ours))
    enough = len(others) - peers.ENOUGH
    assert enough >= 1 and layer(enough).violations == []
    assert layer(enough + 1).violations == ["peers: 4 other libraries ran, fewer than 5"]
    cut = layer(0, seconds=0.0)
    assert cut.violations == ["peers: 1 other libraries ran, fewer than 5"]
    assert f"no time was left for: {PEERS[1].name}, {PEERS[2].name}" in cut.covers and PEERS[-1].name in cut.covers


def test_a_cut_inside_a_save_holds_nothing_that_was_written_after_the_last_acknowledgement(tmp_path: Path) -> None:
    log, lengths = tmp_path / "log", [0]
    with log.open("wb") as out:  # a mount, then four saves of one write each; every second one is flushed
        for number in range(7):
            out.write(struct.pack("<QI", number, 3) + b"%03d" % number)
            if number % 2:
                out.write(struct.pack("<QI", (1 << 64) - 1, 0))
            lengths.append(out.tell())
    begun, acks = lengths[1], lengths[2:6]
    epochs = blocklog.read_log(str(log), acks[-1])
    assert [[bytes(write.data) for write in epoch.writes] for epoch in epochs] == [[b"000", b"001"], [b"002", b"003"], [b"004"]]
    found = blocklog.states(epochs, random.Random(0), 200, begun)
    assert {(state.epoch, state.issued) for state in found} == {(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)}
    assert all(begun <= state.at <= acks[-1] for state in found)
    recording = blocks.Recording("", epochs, begun, acks, [], GOLDEN)
    assert [recording.acked(at) for at in (begun, acks[0] - 1, acks[0], acks[2], acks[3])] == [0, 0, 1, 3, 3]


@pytest.mark.parametrize("torn", [1, 12, 14])
def test_a_record_that_was_being_written_at_an_acknowledgement_is_not_read(torn: int, tmp_path: Path) -> None:
    record = struct.pack("<QI", 0, 3) + b"abc"
    (tmp_path / "log").write_bytes(record * 2)
    epochs = blocklog.read_log(str(tmp_path / "log"), len(record) + torn)
    assert [len(epoch.writes) for epoch in epochs] == [1] and epochs[-1].end == len(record)
    assert {state.at for state in blocklog.states(epochs, random.Random(0), 5, len(record) + torn)} == {len(record)}


def test_what_the_kernel_happens_to_do_falls_once_and_where_it_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    class Saver(Child):
        def __init__(self) -> None:
            self.says = iter([*({"acknowledged": number, "log": 10 * number} for number in range(1, 5)), {"code": 0}])

        def ask(self, line: str, limit: float = 0) -> dict[str, object]:
            return self.hear(limit)

        def hear(self, limit: float, asked: str = "") -> dict[str, object]:
            answer = next(self.says)
            done.append(answer.get("acknowledged", "end"))
            return answer

        def quiet(self, seconds: float) -> bool:
            done.append(seconds)
            return True

    monkeypatch.setitem(blocks.EVENTS, "written back", done.append)
    acks, times = blocks._hear(Saver(), "", "/mnt", blocks.Event("written back", 2, 0.5))
    assert done == [1, 2, 0.5, "/mnt", 3, 4, "end"] and acks == [10, 20, 30, 40] and len(times) == 4


def test_of_two_lines_that_come_at_once_both_are_heard(tmp_path: Path) -> None:
    program = ["sh", "-c", """printf '%s\\n%s\\n' '{"log": 1}' '{"code": 0}'; read end"""]
    with Child("toy", program, {}, tmp_path / "log") as child:
        assert [child.hear(5), child.hear(5)] == [{"log": 1}, {"code": 0}]


def test_every_row_has_a_cell_for_every_column() -> None:
    tallies = {mode: Tally(states=3) for mode in ("kill", "ordered", "weak", "inside ext4")}
    rows = (Row(PEER, failed="no wheel"), Row(PEER, tallies=tallies, real={"ext4": "0/3", "inside xfs": "not measured: EINVAL"}))
    assert {line(row).count("|") for row in rows} == {HEAD.splitlines()[0].count("|")}
    assert "| 0/3 | not measured: EINVAL | 0/3 | not run |" in line(rows[1])


def test_a_part_that_was_left_out_is_that_of_the_row_before_if_it_is_of_the_same_version(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table, "STORE", tmp_path / "rows")
    peer, days = PEERS[0], dict.fromkeys((MODEL, LAST, WITHIN), "2026-01-01")
    old, new = Tally(states=3), Tally(states=5)
    keep(Row(peer, "1", "", (1, 2, 3), {"kill": old, "inside ext4": old}, {}, {"ext4": "0/3"}, 3, 1, dates=days))
    keep(Row(peer, "1", tallies={"inside ext4": new}, dates={WITHIN: "2026-02-02"}))
    row = kept()[0]
    assert row.tallies == {"kill": old, "inside ext4": new} and row.real == {"ext4": "0/3"}
    assert (row.fsyncs, row.cuts, row.wrong_cuts) == ((1, 2, 3), 3, 1) and row.dates == {**days, WITHIN: "2026-02-02"}
    keep(Row(peer, "1", real={"inside ext4": "not measured: EINVAL"}, dates={WITHIN: "2026-02-03"}))
    assert "| 0/3 | not run | not run | not measured: EINVAL | not run | 0/3 |" in line(kept()[0])
    keep(Row(peer, "2", tallies={"inside ext4": new}, dates={WITHIN: "2026-03-03"}))
    assert kept()[0].tallies == {"inside ext4": new} and "not run" in line(kept()[0])
