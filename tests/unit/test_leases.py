"""Nothing is deleted under a reader who said that he reads, and a reader who lapsed is told so."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import distckpt
from distckpt import leases
from distckpt.errors import ConfigError, LeaseLost, StepNotFound
from distckpt.layout import MARKER, Layout
from distckpt.leases import Lease, Watch, listing, take
from distckpt.owned import OwnedRoot
from distckpt.removal import remove_tree
from distckpt.retention import KeepLast
from distckpt.rotation import Context
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, Killed, Operation, call, die, fail
from tests.support import ROOT, attempt_id, crash_disk, make_checkpoint, open_owned

LAYOUT = Layout.at(ROOT)
NOTHING = Context({}, {})


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def disk() -> CrashFiles:
    return crash_disk()


@pytest.fixture
def one(disk: CrashFiles, clock: VirtualClock) -> OwnedRoot:
    """An owned root with the commits of steps 1, 2 and 3."""
    found = open_owned(disk, VirtualRuntime(clock))
    for step in (1, 2, 3):
        make_checkpoint(disk, step, found.next_seq())
    return found


@pytest.fixture
def reader(clock: VirtualClock) -> VirtualRuntime:
    return VirtualRuntime(clock, host="eval-7", boot="boot-e", born=-500.0, skew=86_400.0)


def steps(disk: CrashFiles) -> list[str]:
    return [i.name for i in disk.scan(ROOT) if i.name.startswith("step-")]


def lease(disk: CrashFiles, reader: VirtualRuntime, step: int, ttl: float | None = 600.0) -> Lease:
    return take(disk, LAYOUT, reader, f"step-{step}", attempt_id(step), "evaluation", ttl)


def sweep(one: OwnedRoot) -> None:
    one.runtime.run("janitor")  # type: ignore[attr-defined]


def test_rotation_passes_over_a_leased_checkpoint_and_comes_back_later(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    held = lease(disk, reader, 1)
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-2"] and steps(disk) == ["step-1", "step-3"]
    held.release()
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-1"] and steps(disk) == ["step-3"]


def test_a_lease_is_durable_before_it_counts(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    disk.sync_all()
    lease(disk, reader, 1)
    for state in disk.crash_states():
        assert [h.reason for h in listing(state, LAYOUT, attempt_id(1))] == ["evaluation"]


def test_a_root_that_was_copied_without_its_home_can_be_leased(tmp_path: Path) -> None:
    make_checkpoint(str(tmp_path), 1)
    root = distckpt.open(tmp_path)
    with root.lease(root.at(1), reason="export"):
        assert [held.reason for held in root.leases_on(attempt_id(1))] == ["export"]


def test_a_lease_can_never_protect_what_took_its_name(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    lease(disk, reader, 1)
    remove_tree(disk, LAYOUT.root, LAYOUT.final("step-1"))
    make_checkpoint(disk, 1, 9)
    assert one.watch.holders(attempt_id(9)) == [] and one.watch.holders(attempt_id(1)) != []
    with pytest.raises(StepNotFound, match="removed or replaced"):
        lease(disk, reader, 1)
    assert len(listing(disk, LAYOUT, attempt_id(1))) == 1  # the one that was refused left nothing behind


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
def test_a_ttl_is_positive(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime, ttl: float) -> None:
    with pytest.raises(ConfigError):
        lease(disk, reader, 1, ttl)


def test_a_pin_never_expires(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    pin = lease(disk, reader, 1, ttl=None)
    assert one.watch.holders(attempt_id(1)) == ["pinned: evaluation"]
    one.runtime.sleep(1e9)
    assert one.watch.holders(attempt_id(1)) == ["pinned: evaluation"]
    pin.check()
    pin.release()
    pin.release()
    assert one.watch.holders(attempt_id(1)) == [] and not disk.is_dir(LAYOUT.leases(attempt_id(1)))


def test_an_unreadable_lease_protects(disk: CrashFiles, one: OwnedRoot) -> None:
    write_payload(disk, LAYOUT.leases(attempt_id(1), "torn.json"), b'{"reas')
    assert one.watch.holders(attempt_id(1)) == ["pinned: unreadable lease"]


# -- S22 -------------------------------------------------------------------------------------------------------------


def test_S22_a_lease_taken_between_the_plan_and_the_move_brings_the_checkpoint_back(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    got: list[Lease] = []
    one.files = FaultyFiles(disk, call(lambda o: got.append(lease(disk, reader, 1)), op="rename", path=LAYOUT.final("step-1")))
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-2"]
    assert one.files.fired and steps(disk) == ["step-1", "step-3"]
    sweep(one)
    got[0].check()
    assert disk.read(LAYOUT.final("step-1") + "/model.pt", 99) == b"weights of 1"
    for state in disk.crash_states():
        assert steps(state) == ["step-1", "step-3"]


def test_S22_what_moved_back_stands_there_after_a_cut_as_well(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    disk.sync_all()
    one.files = FaultyFiles(disk, call(lambda o: lease(disk, reader, 1) and None, op="rename", path=LAYOUT.final("step-1")))
    assert one.rotate("main", KeepLast(2), NOTHING) == []
    assert one.files.fired and {tuple(steps(state)) for state in disk.crash_states()} == {("step-1", "step-2", "step-3")}


def test_S22_a_reader_that_comes_after_the_move_finds_nothing_to_lease(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    refused: list[str] = []

    def late(operation: Operation) -> None:
        with pytest.raises(StepNotFound) as caught:
            lease(disk, reader, 1)
        refused.append(str(caught.value))

    one.files = FaultyFiles(disk, call(late, op="rename", path=LAYOUT.final("step-1"), after=True))
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-2", "step-1"]
    assert len(refused) == 1 and listing(disk, LAYOUT, attempt_id(1)) == []


def test_S22_leases_that_cannot_be_read_after_the_move_count_as_held(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    failing = FaultyFiles(disk, fail(errno.EIO, 2, op="scan", path=lambda path: path == LAYOUT.leases()))  # step-2's came first
    one.watch = Watch(failing, LAYOUT, one.runtime)
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-2"]
    assert failing.fired and steps(disk) == ["step-1", "step-3"]


def test_S22_an_owner_killed_between_move_and_second_look_leaves_the_checkpoint_to_its_reader(clock: VirtualClock) -> None:
    for n in range(1, 100):
        disk = crash_disk()
        runtime = VirtualRuntime(clock, pid=n)
        one = open_owned(disk, runtime)
        for step in (1, 2, 3):
            make_checkpoint(disk, step, one.next_seq())
        got: list[Lease] = []

        def arrive(operation: Operation, disk: CrashFiles = disk, got: list[Lease] = got) -> None:
            got.append(lease(disk, VirtualRuntime(clock, host="eval"), 1))

        take_it = call(arrive, op="rename", path=LAYOUT.final("step-1"))
        files = FaultyFiles(disk, take_it, die(n))
        one.files = one.janitor._files = files
        try:
            one.rotate("main", KeepLast(1), NOTHING)
        except Killed:
            runtime.die()
        else:
            assert files.faults[0].fired
            return
        for state in [disk.after_kill(), *disk.crash_states(limit=10)]:
            heir = open_owned(state, VirtualRuntime(clock, pid=1000 + n))
            sweep(heir)
            if got:
                assert state.read(LAYOUT.final("step-1") + "/model.pt", 99) == b"weights of 1", n
                assert state.is_dir(LAYOUT.final("step-1")) and "step-3" in steps(state)
    raise AssertionError("it never ended")


def test_S22_on_a_network_file_system_leases_are_looked_at_once_more_after_90_s(
        clock: VirtualClock, reader: VirtualRuntime) -> None:
    disk = crash_disk()
    disk.network = True
    one = open_owned(disk, VirtualRuntime(clock))
    for step in (1, 2, 3):
        make_checkpoint(disk, step, one.next_seq())
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-2", "step-1"]
    write_payload(disk, LAYOUT.leases(attempt_id(1), "late.json"), b'{"reason": "seen late", "host": "eval", "ttl": 600}')
    began = clock.now
    one.runtime.run("janitor", waits=4)  # type: ignore[attr-defined]
    assert 90 <= clock.now - began < 130
    assert steps(disk) == ["step-1", "step-3"] and disk.scan(LAYOUT.trash(1)) == []


def test_S22_what_a_replace_left_in_trash_never_takes_the_leases_of_the_attempt_that_stands(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    """The attempt's own name is on the directory in trash; the leases of that attempt are on what was published."""
    remove_tree(disk, LAYOUT.root, LAYOUT.final("step-1"))
    make_checkpoint(disk, 1, 9)
    make_checkpoint(disk, 1, 1, directory=LAYOUT.trash(1, attempt_id(9), "step-1"))
    make_checkpoint(disk, 1, 1, directory=LAYOUT.trash(1, f"step-1.{attempt_id(9)}.replaced"))
    held = take(disk, LAYOUT, reader, "step-1", attempt_id(9), "evaluation", 600.0)
    one.janitor.delete(one.janitor.leftovers())
    sweep(one)
    assert disk.scan(LAYOUT.trash(1)) == [] and [h.id for h in listing(disk, LAYOUT, attempt_id(9))] == [held.id]


def test_S22_a_removal_that_had_begun_is_never_moved_back(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    lease(disk, reader, 1)
    disk.rename(LAYOUT.final("step-1"), LAYOUT.trash(1, f"step-1.{attempt_id(1)}"))
    disk.unlink(LAYOUT.trash(1, f"step-1.{attempt_id(1)}", MARKER))
    one.janitor.delete(one.janitor.leftovers())
    sweep(one)
    assert steps(disk) == ["step-2", "step-3"] and disk.scan(LAYOUT.trash(1)) == []


def test_S22_a_lease_expires_by_the_rotators_own_time_since_it_last_saw_a_renewal(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    lease(disk, reader, 1, ttl=100.0)
    one.runtime.sleep(10_000.0)  # it was never looked at before: the clock of its host and its file times say nothing
    assert len(one.watch.holders(attempt_id(1))) == 1
    one.runtime.sleep(99.0)
    assert len(one.watch.holders(attempt_id(1))) == 1
    disk.overwrite(LAYOUT.leases(attempt_id(1), f"{listing(disk, LAYOUT, attempt_id(1))[0].id}.beat"), b"%020d" % 2)
    one.runtime.sleep(99.0)
    assert len(one.watch.holders(attempt_id(1))) == 1  # this look saw the renewal
    one.runtime.sleep(99.0)
    assert len(one.watch.holders(attempt_id(1))) == 1
    one.runtime.sleep(2.0)
    assert one.watch.holders(attempt_id(1)) == []
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-2", "step-1"]


def test_S22_a_reader_renews_three_times_per_ttl(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    held = lease(disk, reader, 1, ttl=90.0)
    began = reader.slept
    reader.run("lease", waits=3)
    assert reader.slept - began == pytest.approx(90.0)
    held.check()
    assert int(listing(disk, LAYOUT, attempt_id(1))[0].beat) == 4


def test_S22_a_reader_that_could_not_renew_is_told(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    held = lease(disk, reader, 1, ttl=90.0)
    reader.sleep(91.0)
    with pytest.raises(LeaseLost, match="not renewed for 91 s.*take a new lease"):
        held.check()
    with pytest.raises(LeaseLost), held:
        pass
    assert listing(disk, LAYOUT, attempt_id(1)) == []  # lost, and still given back: nobody waits for it any more
    held.release()


def test_S22_a_stopped_reader_that_wakes_up_does_not_renew_what_had_lapsed(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    """After a SIGSTOP its renewing thread may run before its reading one."""
    held = lease(disk, reader, 1, ttl=90.0)
    held._renewed -= 10_000.0
    reader.run("lease", waits=1)
    with pytest.raises(LeaseLost):
        held.check()
    assert listing(disk, LAYOUT, attempt_id(1))[0].beat == ""


def test_S22_a_reader_whose_lease_file_is_gone_is_told(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    held = lease(disk, reader, 1, ttl=90.0)
    one.watch.forget(attempt_id(1))
    assert listing(disk, LAYOUT, attempt_id(1)) == []  # or the renewals below would never end
    reader.run("lease")
    with pytest.raises(LeaseLost, match="its file is gone"):
        held.check()


def test_S22_a_renewal_that_fails_is_tried_again_until_the_ttl_is_over(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    files = FaultyFiles(disk, fail(errno.EIO, op="overwrite", forever=True))
    held = take(files, LAYOUT, reader, "step-1", attempt_id(1), "evaluation", 90.0)
    reader.run("lease", waits=2)
    held.check()
    reader.run("lease", waits=2)
    with pytest.raises(LeaseLost):
        held.check()


def test_a_lost_lease_never_masks_the_error_in_flight(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    held = lease(disk, reader, 1, ttl=90.0)
    with pytest.raises(ValueError, match="mine") as caught, held:
        reader.sleep(91.0)
        raise ValueError("mine")
    assert "is lost" in "".join(getattr(caught.value, "__notes__", ["is lost"]))


def test_two_readers_hold_one_checkpoint_until_both_let_go(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    first, second = lease(disk, reader, 1), lease(disk, reader, 1, ttl=None)
    first.release()
    assert one.watch.holders(attempt_id(1)) == ["pinned: evaluation"]
    second.release()
    assert one.watch.holders(attempt_id(1)) == []


def test_a_release_beside_a_lease_in_the_making_does_not_disturb_it(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    """The last release removes the directory just when the next reader wants to write into it."""
    first = lease(disk, reader, 1)
    files = FaultyFiles(disk, call(lambda o: first.release(), op="open", path="leases"))
    second = take(files, LAYOUT, reader, "step-1", attempt_id(1), "second", 600.0)
    assert files.fired and [h.id for h in listing(disk, LAYOUT, attempt_id(1))] == [second.id]


def test_a_forked_child_never_releases_its_parents_lease(
        disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    held = lease(disk, reader, 1)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        held.release()
    assert len(listing(disk, LAYOUT, attempt_id(1))) == 1


def test_a_checkpoint_that_goes_takes_its_leases_with_it(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    lease(disk, reader, 1, ttl=10.0)
    one.watch.holders(attempt_id(1))
    one.runtime.sleep(20.0)
    assert one.rotate("main", KeepLast(1), NOTHING) == ["step-2", "step-1"]
    sweep(one)
    assert leases.leased_attempts(disk, LAYOUT) == [] and disk.scan(LAYOUT.trash(1)) == []


def test_a_lease_that_was_renewed_leaves_nothing_behind(disk: CrashFiles, one: OwnedRoot, reader: VirtualRuntime) -> None:
    held = lease(disk, reader, 1)
    disk.overwrite(LAYOUT.leases(attempt_id(1), f"{held.id}.beat"), b"%020d" % 1)
    held.release()
    assert not disk.is_dir(LAYOUT.leases(attempt_id(1)))
