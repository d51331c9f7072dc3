"""What goes, and how: never before something newer is durable, never more than the policy says, never under a reader."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from distckpt import catalog, rotation
from distckpt.durable import Files
from distckpt.errors import MarkerError
from distckpt.layout import MARKER, Layout
from distckpt.owned import OwnedRoot
from distckpt.retention import KeepAll, KeepBest, KeepEvery, KeepLast, Policy
from distckpt.rotation import Context
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, Killed, die, fail
from tests.support import ROOT, RUN, STEP, attempt_id, crash_disk, make_checkpoint, open_owned

LAYOUT = Layout.at(ROOT)
NOTHING = Context({}, {})


@pytest.fixture
def disk() -> CrashFiles:
    return crash_disk()


@pytest.fixture
def one(disk: CrashFiles) -> OwnedRoot:
    return open_owned(disk)


def steps(files: Files, series: str = "main") -> list[int]:
    """Steps that load: whole marker, every file right, in the order of their commits."""
    found = []
    for entry in catalog.scan(files, LAYOUT, STEP):
        if entry.committed and entry.series == series:
            with suppress(MarkerError):
                whole = catalog.read_marker(files, LAYOUT.final(entry.name))
                if not catalog.check_files(files, LAYOUT.final(entry.name), whole.files, digest=True):
                    found.append(entry.step)
    return found


def commit(one: OwnedRoot, step: int, **more: object) -> None:
    make_checkpoint(one.files, step, one.next_seq(), **more)  # type: ignore[arg-type]


def reasons(one: OwnedRoot, policy: Policy, context: Context = NOTHING, series: str = "main") -> dict[str, str]:
    return {v.entry.name: ("+ " if v.keep else "- ") + v.reason
            for v in rotation.plan(series, one.entries(), RUN, policy, context, one.vouch)}


def test_keep_last_holds_exactly_that_many_in_the_steady_state(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in range(100, 1000, 100):
        commit(one, step)
        one.point_to(f"step-{step}")
        one.rotate("main", KeepLast(3), NOTHING)
        assert steps(disk) == list(range(step, 0, -100))[:3]


def test_the_newest_stays_whatever_the_policy_says(disk: CrashFiles, one: OwnedRoot) -> None:
    class Nothing(Policy):
        def __call__(self, records: object) -> dict[str, str]:
            return {}

        @property
        def spec(self) -> str:
            return "nothing"

    commit(one, 1)
    commit(one, 2)
    assert one.rotate("main", Nothing(), NOTHING) == ["step-1"] and steps(disk) == [2]


def test_no_limit_reads_no_marker_and_removes_nothing(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in range(1, 6):
        commit(one, step)
    files = one.files = FaultyFiles(disk)
    assert one.rotate("main", KeepAll(), NOTHING) == [] and steps(disk) == [5, 4, 3, 2, 1] and files.log == []
    assert all(o.path.endswith(("/" + MARKER, "latest")) for o in files.reads if o.op == "read")


def test_a_stale_5000_beside_a_new_400_never_wins_a_slot(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in (300, 4000, 5000):
        commit(one, step, branch="b1")
    commit(one, 400, branch="b2")
    context = Context({}, {}, line=(("b2", 99), ("b1", 1)))
    assert one.rotate("main", KeepLast(2), context) == ["step-5000", "step-4000"]
    assert steps(disk) == [400, 300]


def test_what_this_run_came_from_stays_until_enough_newer_ones_stand(disk: CrashFiles, one: OwnedRoot) -> None:
    """S15: nobody has loaded the newer ones yet."""
    for step in (1, 2, 3):
        commit(one, step)
    origin, fresh = attempt_id(2), []
    for step in (4, 5, 6):
        commit(one, step)
        fresh.append(attempt_id(step))
        one.rotate("main", KeepLast(2), Context({}, {}, origin=origin, fresh=fresh))
        assert (2 in steps(disk)) is (step < 5), step
    assert steps(disk) == [6, 5]


def test_series_are_rotated_apart(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in (1, 2, 3):
        commit(one, step)
        make_checkpoint(disk, step, one.next_seq(), series="rolling")
    assert one.rotate("rolling", KeepLast(1), NOTHING) == ["step-2-rolling", "step-1-rolling"]
    assert steps(disk) == [3, 2, 1] and steps(disk, "rolling") == [3]


def test_what_is_not_ours_is_left_alone_and_fills_no_slot(disk: CrashFiles, one: OwnedRoot) -> None:
    commit(one, 1)
    make_checkpoint(disk, 2, one.next_seq(), run="another")
    write_payload(disk, f"{ROOT}/step-3/pytorch_model.bin", b"legacy")
    make_checkpoint(disk, 1, 1, directory=f"{ROOT}/step-4")
    write_payload(disk, f"{ROOT}/step-5", b"a file")
    disk.mkdir(f"{ROOT}/step-6")
    write_payload(disk, f"{ROOT}/step-1-rolling-tmp/x", b"")
    commit(one, 7)
    before = {p: data for p, data in disk.snapshot().items() if p.startswith(f"{ROOT}/step")}
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-1"]
    after = {p: data for p, data in disk.snapshot().items() if p.startswith(f"{ROOT}/step")}
    assert after == {p: data for p, data in before.items() if p != f"{ROOT}/step-1" and not p.startswith(f"{ROOT}/step-1/")}


def test_the_pointers_target_stays(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in (1, 2, 3):
        commit(one, step)
    one.point_to("step-1")
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-2"] and steps(disk) == [3, 1]


def test_every_verdict_has_its_reason(disk: CrashFiles, one: OwnedRoot) -> None:
    commit(one, 1, metrics={"loss": 0.1})
    for step in (2, 3, 4):
        commit(one, step, metrics={"loss": 0.5})
    found = reasons(one, KeepLast(1) | KeepBest(1) | KeepEvery(2), Context({attempt_id(3): "pinned: by hand"}, {}))
    assert found == {
        "step-4": "+ one of the last 1; step is a multiple of 2; the newest", "step-3": "+ pinned: by hand",
        "step-2": "+ step is a multiple of 2", "step-1": "+ loss=0.1 is among the best 1"}
    assert reasons(one, KeepLast(1))["step-1"] == "- outside retention last=1"


# -- S12, S15 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["short", "missing", "torn marker"])
def test_S15_good_heads_over_torn_bodies_never_push_out_the_last_one_that_loads(
        disk: CrashFiles, one: OwnedRoot, damage: str) -> None:
    for step in (1, 2, 3):
        commit(one, step)
    for step in (2, 3):
        path = LAYOUT.final(f"step-{step}") + "/" + (MARKER if damage == "torn marker" else "model.pt")
        data = disk.read(path, 1 << 20)
        disk.unlink(path)
        if damage != "missing":
            write_payload(disk, path, data[:-2])
    assert [e.committed for e in one.entries()] == [True] * 3
    assert one.rotate("main", KeepLast(2), NOTHING) == [] and steps(disk) == [1]
    assert "damaged, neither counts nor goes" in reasons(one, KeepLast(2))["step-3"]


def test_S15_what_resume_rejected_neither_counts_nor_goes(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in (1, 2, 3, 4):
        commit(one, step)
    one.reject(attempt_id(4), "step-4", "digest differs")
    assert one.rotate("main", KeepLast(2), NOTHING) == ["step-1"] and steps(disk) == [4, 3, 2]


def test_S15_a_survivor_is_read_whole_once_per_process(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in (1, 2, 3):
        commit(one, step)
    files = one.files = FaultyFiles(disk)
    one.rotate("main", KeepLast(3), NOTHING)
    first = len(files.reads)
    one.rotate("main", KeepLast(3), NOTHING)
    assert len([o for o in files.reads[first:] if o.op == "stat"]) == 0 < len([o for o in files.reads[:first] if o.op == "stat"])


def test_S12_what_is_in_doubt_neither_counts_nor_goes(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in (1, 2, 3):
        commit(one, step)
    one.in_doubt[attempt_id(3)] = "its outcome is unknown"
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-1"] and steps(disk) == [3, 2]


def test_S12_after_a_failed_fsync_of_a_parent_this_process_rotates_nothing(
        disk: CrashFiles, one: OwnedRoot, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        commit(one, step)
    one.no_rotation = "the directory of step-3 could not be synced"
    assert one.rotate("main", KeepLast(1), NOTHING) == [] and steps(disk) == [3, 2, 1]
    assert "nothing is rotated until the next start" in caplog.text


def test_S8_nothing_is_rotated_when_an_inherited_checkpoint_cannot_be_synced(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in (1, 2, 3):
        commit(one, step)
    disk.poison(LAYOUT.final("step-3") + "/model.pt")
    assert one.rotate("main", KeepLast(1), NOTHING) == [] and steps(disk) == [3, 2, 1]
    assert one.rotate("main", KeepLast(1), NOTHING) == [] and one.no_rotation is not None


# -- S21 and the disk --------------------------------------------------------------------------------------------------


def test_S21_a_rotation_killed_or_cut_at_any_operation_leaves_every_survivor_and_no_partial_one() -> None:
    clock = VirtualClock()
    for n in range(1, 200):
        disk = crash_disk()
        runtime = VirtualRuntime(clock, pid=n)
        one = open_owned(disk, runtime)
        for step in (1, 2, 3, 4):
            commit(one, step)
        files = FaultyFiles(disk, die(n))
        one.files = one.janitor._files = files
        try:
            one.rotate("main", KeepLast(2), NOTHING)
            runtime.run("janitor")
        except Killed:
            pass
        runtime.die()
        for state in [disk.after_kill(), *disk.crash_states(limit=25)]:
            found = steps(state)
            assert found[:2] == [4, 3] and set(found) <= {1, 2, 3, 4}, n
            for entry in catalog.scan(state, LAYOUT, STEP):
                assert entry.committed and entry.step in found, (n, entry)  # a partial one never stands in the root
        heir = open_owned(disk.after_kill(), VirtualRuntime(clock, pid=1000 + n))
        heir.rotate("main", KeepLast(2), NOTHING)
        heir.runtime.run("janitor")  # type: ignore[attr-defined]
        assert steps(heir.files) == [4, 3] and heir.files.scan(LAYOUT.trash(heir.generation)) == []
        if not files.dead:
            return
    raise AssertionError("it never ended")


def test_S21_the_moves_of_all_victims_are_durable_before_the_first_unlink(disk: CrashFiles, one: OwnedRoot) -> None:
    for step in (1, 2, 3):
        commit(one, step)
    files = FaultyFiles(disk)
    one.files = one.janitor._files = files
    one.rotate("main", KeepLast(1), NOTHING)
    one.runtime.run("janitor")  # type: ignore[attr-defined]
    moves = [o for o in files.log if o.op in ("rename", "fsync_dir", "unlink")]
    first = next(i for i, o in enumerate(moves) if o.op == "unlink")
    assert [o.op for o in moves[first - 4:first]] == ["rename", "rename", "fsync_dir", "fsync_dir"]
    assert [o.path for o in moves[first - 2:first]] == [LAYOUT.trash(1), ROOT]
    assert moves[first].path.endswith(MARKER)


@pytest.mark.parametrize("op", ["rename", "fsync_dir"])
def test_S21_nothing_is_deleted_when_the_move_could_not_be_made_durable(disk: CrashFiles, one: OwnedRoot, op: str) -> None:
    for step in (1, 2, 3):
        commit(one, step)
        one.vouch(one.entries()[0])
    files = FaultyFiles(disk, fail(errno.EIO, op=op, forever=True))
    one.files = one.janitor._files = files
    assert one.rotate("main", KeepLast(1), NOTHING) == []
    one.runtime.run("janitor")  # type: ignore[attr-defined]
    assert files.fired and files.operations("unlink") == []


def test_errors_of_rotation_are_warnings_and_are_tried_again(
        disk: CrashFiles, one: OwnedRoot, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        commit(one, step)
    one.files = FaultyFiles(disk, fail(errno.EBUSY, op="rename", path="step-1"))
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-2"] and "could not rotate step-1 away" in caplog.text
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-1"] and steps(disk) == [3]


@pytest.mark.parametrize(("op", "path"), [("scan", ROOT), ("read", "latest"), ("scan", "leases"), ("scan", "rejected")])
def test_a_root_that_cannot_be_read_is_not_rotated(disk: CrashFiles, one: OwnedRoot, op: str, path: str) -> None:
    for step in (1, 2):
        commit(one, step)
    one.files = FaultyFiles(disk, fail(errno.EIO, op=op, path=path))
    assert one.rotate("main", KeepLast(1), NOTHING) == [] and steps(disk) == [2, 1]


def test_a_deletion_that_fails_is_counted_and_tried_again(
        disk: CrashFiles, one: OwnedRoot, caplog: pytest.LogCaptureFixture) -> None:
    commit(one, 1)
    commit(one, 2)
    one.rotate("main", KeepLast(1), NOTHING)
    one.janitor._files = FaultyFiles(disk, fail(errno.ENOTEMPTY, op="rmdir"))
    began = one.runtime.monotonic()
    one.runtime.run("janitor")  # type: ignore[attr-defined]
    assert one.janitor.failures == 1 and "somebody still reads it" in caplog.text
    assert one.runtime.monotonic() - began == pytest.approx(30.0) and disk.scan(LAYOUT.trash(1)) == []
