"""S5: what a zombie or an overtaken taker still tries is answered by the file system itself."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from distckpt import recovery
from distckpt.errors import RootInUse
from distckpt.layout import Layout
from distckpt.owned import OwnedRoot
from distckpt.ownership import Ownership
from distckpt.retention import KeepLast
from distckpt.rotation import Context, move_to_trash
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, Killed, Operation, call, die
from tests.support import ROOT, attempt_id, crash_disk, make_checkpoint, open_owned, stage_attempt

LAYOUT = Layout.at(ROOT)


def elsewhere(clock: VirtualClock) -> VirtualRuntime:
    """Another machine, which cannot see the processes of ``host-a``."""
    return VirtualRuntime(clock, host="host-b", boot="boot-b")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def disk() -> CrashFiles:
    return crash_disk()


@pytest.fixture
def zombie(disk: CrashFiles, clock: VirtualClock) -> OwnedRoot:
    """An owner that was declared dead by the counter while it was only stopped; it has a checkpoint and two attempts."""
    runtime = VirtualRuntime(clock)
    one = open_owned(disk, runtime)
    make_checkpoint(disk, 1, one.next_seq())
    one.make_attempt(attempt_id(50), "step-50")
    write_payload(disk, LAYOUT.staging(1, attempt_id(50), "step-50", "model.pt"), b"half")
    open_owned(disk, elsewhere(clock))
    return one


def test_S5_the_fence_is_up_when_what_stood_behind_it_was_moved(disk: CrashFiles, clock: VirtualClock) -> None:
    """It looks until the old directories are empty; on a quiet disk that is soon."""
    open_owned(disk, VirtualRuntime(clock)).make_attempt(attempt_id(50), "step-50")
    files = FaultyFiles(disk, call(lambda operation: pytest.fail("it goes round and round"), at=200, op="scan", forever=True))
    open_owned(files, elsewhere(clock))
    assert [item.name for item in disk.scan(LAYOUT.home("staging"))] == ["2"]


@pytest.mark.parametrize("move", [
    lambda z: z.make_attempt(attempt_id(60), "step-60"),
    lambda z: recovery.publish(z.files, z.layout, z.generation, attempt_id(50), "step-50"),
    lambda z: z.files.mkdir(LAYOUT.staging(1, attempt_id(50), "step-50", "more")),
    lambda z: z.files.open(LAYOUT.staging(1, attempt_id(50), "step-50", "late.pt")),
    lambda z: z.files.exchange(LAYOUT.staging(1, attempt_id(50), "step-50"), LAYOUT.final("step-1")),
    lambda z: z.files.rename(LAYOUT.final("step-1"), LAYOUT.trash(1, "step-1.x")),
    lambda z: z.record_rollback(0),
    lambda z: z.reject(attempt_id(1), "step-1", "bad")])
def test_S5_after_a_takeover_the_file_system_itself_refuses_a_zombies_move(
        zombie: OwnedRoot, move: Callable[[OwnedRoot], object]) -> None:
    before = zombie.files.snapshot()  # type: ignore[attr-defined]
    with pytest.raises(OSError) as caught:
        move(zombie)
    assert caught.value.errno == errno.ENOENT
    assert zombie.files.snapshot() == before  # type: ignore[attr-defined]


def test_S5_a_zombie_rotates_nothing_and_moves_no_pointer(zombie: OwnedRoot) -> None:
    files = zombie.files
    for step in (2, 3):
        make_checkpoint(files, step)
    before = files.snapshot()  # type: ignore[attr-defined]
    zombie.point_to("step-1")
    assert zombie.rotate("main", KeepLast(1), Context({}, {})) == []
    assert move_to_trash(files, LAYOUT, 1, [e for e in zombie.entries() if e.step == 1], zombie.watch) == []
    zombie.remove_attempt(attempt_id(50))
    zombie.journal.event("committed")
    assert {p: v for p, v in files.snapshot().items() if "/journal/" not in p} == {  # type: ignore[attr-defined]
        p: v for p, v in before.items() if "/journal/" not in p}


def test_S5_what_a_zombie_had_under_way_is_swept_by_the_new_owner(zombie: OwnedRoot) -> None:
    paths = zombie.files.snapshot()  # type: ignore[attr-defined]
    assert LAYOUT.staging(1) not in paths and LAYOUT.trash(1) not in paths
    assert LAYOUT.trash(2, attempt_id(50), "step-50", "model.pt") in paths


def test_S5_an_open_file_of_a_zombie_writes_only_into_what_was_taken_away(disk: CrashFiles, clock: VirtualClock) -> None:
    one = open_owned(disk, VirtualRuntime(clock))
    inner = one.make_attempt(attempt_id(5), "step-5")
    out = disk.open(f"{inner}/model.pt")
    open_owned(disk, elsewhere(clock))
    out.write(b"late")
    out.fsync()
    out.close()
    assert [e.name for e in one.entries()] == []


def test_S5_entries_that_appear_while_the_fence_empties_a_directory_are_taken_too(disk: CrashFiles, clock: VirtualClock) -> None:
    """On a network file system a zombie's client may still hold the directory by its handle for a moment."""
    first = VirtualRuntime(clock)
    one = open_owned(disk, first)
    one.make_attempt(attempt_id(5), "step-5")
    first.die()
    late: list[str] = []

    def through_the_handle(operation: Operation) -> None:
        if len(late) < 3:
            late.append(f"{operation.path}/{attempt_id(100 + len(late))}")
            write_payload(disk, f"{late[-1]}/step-9/model.pt", b"late")

    files = FaultyFiles(disk, call(through_the_handle, op="rmdir", path="taken-staging-1", forever=True))
    second = Ownership.claim(files, LAYOUT, VirtualRuntime(clock, pid=2))
    assert len(late) == 3
    names = [i.name for i in disk.scan(LAYOUT.staging(second.generation))]
    assert names == [attempt_id(5)] + [attempt_id(100 + n) for n in range(3)]
    assert [i.name for i in disk.scan(LAYOUT.home("staging"))] == ["2"]


def test_S5_a_takeover_killed_while_it_fenced_is_finished_by_the_next(disk: CrashFiles, clock: VirtualClock) -> None:
    first = VirtualRuntime(clock)
    one = open_owned(disk, first)
    one.make_attempt(attempt_id(5), "step-5")
    first.die()
    second = VirtualRuntime(clock, pid=2)
    with pytest.raises(Killed):
        Ownership.claim(FaultyFiles(disk, die(op="rmdir", path="taken-staging-1")), LAYOUT, second)
    second.die()
    third = Ownership.claim(disk, LAYOUT, VirtualRuntime(clock, pid=3))
    assert [i.name for i in disk.scan(LAYOUT.staging(third.generation))] == [attempt_id(5)]


@pytest.mark.parametrize("at", ["before its directories", "after its directories", "in the fence"])
def test_S5_a_taker_that_was_overtaken_neither_owns_the_root_nor_fences_its_successor(
        disk: CrashFiles, clock: VirtualClock, at: str) -> None:
    """It created its record, was stopped, and lost the root to the next taker before it had fenced anybody."""
    first = VirtualRuntime(clock, pid=1)
    open_owned(disk, first)
    stage_attempt(disk, 1, 1)
    first.die()
    winner: list[OwnedRoot] = []

    def overtake(operation: Operation) -> None:
        winner.append(open_owned(disk, elsewhere(clock)))
        winner[0].make_attempt(attempt_id(77), "step-77")

    faults = {"before its directories": call(overtake, op="mkdir", path="/staging/2"),
              "after its directories": call(overtake, op="mkdir", path="/trash/2", after=True),
              "in the fence": call(overtake, op="rename", path="taken-staging-1")}
    files = FaultyFiles(disk, faults[at])
    with pytest.raises(RootInUse) as caught:
        open_owned(files, VirtualRuntime(clock, pid=2))
    assert files.fired and caught.value.generation == 3
    assert [i.name for i in disk.scan(LAYOUT.home("staging"))] == ["3"]
    assert [i.name for i in disk.scan(LAYOUT.home("trash"))] == ["3"]
    assert [i.name for i in disk.scan(LAYOUT.staging(3))] == [attempt_id(77)]
    assert [e.step for e in winner[0].entries() if e.committed] == [1]


def test_S5_a_taker_never_takes_away_the_directories_of_a_newer_one(disk: CrashFiles, clock: VirtualClock) -> None:
    """The newer one made its directories and has not fenced anybody yet, when the older one goes on with its own fence."""
    open_owned(disk, VirtualRuntime(clock, pid=1)).close()

    def overtake(operation: Operation) -> None:
        with pytest.raises(Killed):
            Ownership.claim(FaultyFiles(disk, die(op="rename")), LAYOUT, elsewhere(clock))

    files = FaultyFiles(disk, call(overtake, at=3, op="scan", path=lambda p: p == LAYOUT.home("staging")))
    with pytest.raises(RootInUse):
        Ownership.claim(files, LAYOUT, VirtualRuntime(clock, pid=2))
    assert files.fired and [i.name for i in disk.scan(LAYOUT.home("staging"))] == ["2", "3"]


def test_S5_a_fence_that_stands_still_stands_after_a_cut(zombie: OwnedRoot, disk: CrashFiles) -> None:
    """A server that lost its power gives nothing back to a zombie on another client."""
    for state in disk.crash_states():
        assert [i.name for i in state.scan(LAYOUT.home("staging"))] == ["2"]
        assert [i.name for i in state.scan(LAYOUT.home("trash"))] == ["2"]


def test_S5_what_two_generations_left_under_one_name_is_taken_from_both(disk: CrashFiles, clock: VirtualClock) -> None:
    open_owned(disk, VirtualRuntime(clock, pid=1))
    for generation in (1, 2):
        write_payload(disk, LAYOUT.staging(generation, "stranger", "file"), b"of %d" % generation)
    heir = open_owned(FaultyFiles(disk, die(300)), VirtualRuntime(clock, pid=2))  # an endless fence comes to an end
    assert heir.generation == 3 and disk.scan(LAYOUT.staging(3)) == []
    assert [i.name for i in disk.scan(LAYOUT.trash(3))] == ["stranger", "stranger.taken-staging-2"]


def test_S5_the_fence_is_synced_on_both_sides(disk: CrashFiles, clock: VirtualClock) -> None:
    open_owned(disk, VirtualRuntime(clock, pid=1)).make_attempt(attempt_id(5), "step-5")
    files = FaultyFiles(disk)
    open_owned(files, elsewhere(clock))
    for home in (LAYOUT.home("staging"), LAYOUT.home("trash")):
        moved = [op.n for op in files.log if op.op == "rename" and op.path == f"{home}/1"]
        assert len(moved) == 1 and any(op.n > moved[0] for op in files.log if (op.op, op.path) == ("fsync_dir", home)), home


def test_S5_whoever_meets_the_fence_is_told_of_the_takeover(zombie: OwnedRoot, disk: CrashFiles, clock: VirtualClock) -> None:
    met = OSError(errno.ENOENT, "no such file")
    with pytest.raises(RootInUse) as caught:
        zombie.ownership.explain(met)
    assert caught.value.__cause__ is met
    assert zombie.ownership.lost_to().startswith("; this process lost the root to generation 2: pid ")
    heir = OwnedRoot.open(disk, LAYOUT, VirtualRuntime(clock, host="host-c", boot="boot-c"))
    heir.ownership.explain(met)  # nobody overtook this one: the error speaks for itself
    assert heir.ownership.lost_to() == ""
