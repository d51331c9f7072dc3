"""Which checkpoint a run goes on from, and whether starting fresh would lose anything."""

from __future__ import annotations

import errno
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distckpt import catalog, selection
from distckpt.catalog import Entry
from distckpt.durable import Files
from distckpt.layout import Layout
from distckpt.marker import Head
from distckpt.selection import abandon, abandoned, candidates, traces
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, Killed, die, fail
from tests.support import ROOT, RUN, STEP, attempt_id, crash_disk, make_checkpoint, open_owned, stage_attempt

LAYOUT = Layout.at(ROOT)


def entry(step: int, seq: int, *, series: str = "main", run: str = RUN, problem: str | None = None) -> Entry:
    head = Head(seq, step, attempt_id(seq), f"step-{step}", series, run, 1)
    return Entry(f"step-{step}", step, series, head, problem)


def names(found: selection.Candidates) -> list[str]:
    return [e.name for e in found.usable]


def test_every_other_name_is_passed_over_with_its_reason() -> None:
    entries = [entry(5, 5), entry(4, 4, run="other"), entry(3, 3), entry(2, 2, problem="its marker belongs to 'step-7'"),
               Entry("step-1", 1, "main", None, "it has files but no commit.json: never committed"),
               entry(9, 9, series="rolling")]
    found = candidates(entries, "main", RUN, {attempt_id(3): "size differs"}, [])
    assert names(found) == ["step-5"] and found.legacy == ["step-1"]
    assert found.skipped["step-4"] == "belongs to another run (other)"
    assert found.skipped["step-3"].startswith("rejected: size differs")
    assert found.skipped["step-2"].startswith("its marker belongs") and "step-9" not in found.skipped
    assert names(candidates(entries, "main", None, {}, [])) == ["step-5", "step-4", "step-3"]


def test_a_stale_5000_never_wins_the_resume_over_a_new_400() -> None:
    entries = [entry(400, 12), entry(5000, 11), entry(4000, 10), entry(300, 3)]
    ranges = abandon([], 3, 11)
    assert ranges == [(3, 11)]
    found = candidates(entries, "main", RUN, {}, ranges)
    assert names(found) == ["step-400", "step-300"]
    assert found.skipped["step-5000"] == "left behind by a rollback (name its step to use it)"
    assert names(candidates(entries[1:], "main", RUN, {}, ranges)) == ["step-300"]


def test_S24_going_back_to_an_abandoned_commit_makes_its_line_live_again() -> None:
    ranges = abandon([], 2, 5)
    assert abandon(ranges, 4, 7) == [(4, 7)]
    assert abandon(ranges, 7, 7) == [(2, 5)]
    assert abandon(ranges, 6, 7) == [(2, 5), (6, 7)]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=12))
def test_S24_after_any_rollback_its_target_is_what_resume_takes(moves: list[tuple[bool, int]]) -> None:
    """Commits and rollbacks in any order: the newest usable one is the last commit, or the target of a later rollback."""
    highest, here, ranges = 0, 0, [(0, 0)][:0]
    for commit, pick in moves:
        if commit or highest == 0:
            highest += 1
            here = highest
        else:
            here = pick % highest + 1
            ranges = abandon(ranges, here, highest)
        entries = [entry(seq, seq) for seq in range(highest, 0, -1)]
        assert candidates(entries, "main", RUN, {}, ranges).usable[0].step == here


def test_S24_an_adopted_target_leaves_every_commit_behind() -> None:
    assert abandon([], 0, 9) == [(0, 9)]


def test_S24_a_rollback_is_durable_before_anything_is_built_on_it() -> None:
    for n in range(1, 50):
        disk = crash_disk()
        owned = open_owned(disk)
        for step in (100, 200, 300):
            make_checkpoint(disk, step, owned.next_seq())
        files = owned.files = FaultyFiles(disk, die(n))
        try:
            owned.record_rollback(1)
        except Killed:
            states = [disk.after_kill()]
        else:
            states = list(disk.crash_states())
            assert n > 5
        for state in states:
            assert abandoned(state, LAYOUT) in ([], [(1, 3)])
        if not files.dead:
            assert all(abandoned(state, LAYOUT) == [(1, 3)] for state in states)
            return
    raise AssertionError("it never ended")


def test_a_torn_rollback_record_is_advice_lost_and_no_crash() -> None:
    disk = crash_disk()
    write_payload(disk, LAYOUT.rollback, b'{"abandoned": [[1, ')
    assert abandoned(disk, LAYOUT) == []


# -- S7: fresh, or not -------------------------------------------------------------------------------------------------


@pytest.fixture
def disk() -> CrashFiles:
    found = crash_disk()
    open_owned(found)
    return found


def evidence(files: Files) -> list[str]:
    return traces(files, LAYOUT, catalog.scan(files, LAYOUT, STEP))


def test_S7_a_new_root_and_a_job_killed_in_its_first_save_leave_no_trace(disk: CrashFiles) -> None:
    assert evidence(disk) == []
    write_payload(disk, LAYOUT.staging(1, attempt_id(1), "step-1", "model.pt"), b"half")
    write_payload(disk, f"{ROOT}/lost+found/x", b"")
    write_payload(disk, f"{ROOT}/notes.txt", b"")
    assert evidence(disk) == []


@pytest.mark.parametrize("leave", ["committed", "torn", "foreign", "series", "staged", "trashed", "pointer", "journal", "copy"])
def test_S7_every_trace_of_a_checkpoint_forbids_a_fresh_start(disk: CrashFiles, leave: str) -> None:
    if leave == "committed":
        make_checkpoint(disk, 1)
    elif leave == "torn":
        write_payload(disk, f"{ROOT}/step-1/model.pt", b"")
    elif leave == "foreign":
        make_checkpoint(disk, 1, run="other")
    elif leave == "series":
        make_checkpoint(disk, 1, series="rolling")
    elif leave == "staged":
        stage_attempt(disk, 1, 1)
    elif leave == "trashed":
        make_checkpoint(disk, 1, directory=LAYOUT.trash(1, f"step-1.{attempt_id(1)}"))
    elif leave == "pointer":
        write_payload(disk, LAYOUT.pointer, b"step-1\n")
    elif leave == "journal":
        disk.append(LAYOUT.journal(1), json.dumps({"event": "committed"}).encode() + b"\n")
    else:
        make_checkpoint(disk, 1, directory=f"{ROOT}/step-2")
    assert len(evidence(disk)) >= 1


@pytest.mark.parametrize(("op", "path"), [
    ("scan", "staging"), ("scan", "trash"), ("scan", ROOT), ("read", "latest"), ("scan", "journal"), ("read", "jsonl")])
def test_S7_what_cannot_be_read_is_an_error_and_not_an_absence(disk: CrashFiles, op: str, path: str) -> None:
    write_payload(disk, LAYOUT.pointer, b"step-1\n")
    files = FaultyFiles(disk, fail(errno.EIO, op=op, path=path))
    with pytest.raises(OSError):
        evidence(files)
    assert files.fired


def test_S7_a_root_that_cannot_be_listed_is_not_an_empty_root(disk: CrashFiles) -> None:
    files = FaultyFiles(disk, fail(errno.ESTALE, op="scan", path=ROOT, forever=True))
    with pytest.raises(OSError):
        catalog.scan(files, LAYOUT, STEP)
    with pytest.raises(OSError):
        open_owned(files, VirtualRuntime(VirtualClock(), pid=2))
