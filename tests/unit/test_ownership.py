"""One writer per root: the takeover, the wait for a sign of life, and the fence against the ones before."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

import pytest

from distckpt import catalog, rootdir
from distckpt.durable import Files
from distckpt.errors import RootInUse
from distckpt.layout import Layout
from distckpt.ownership import BEAT, STILL, Ownership, highest
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, Killed, Operation, call, die, fail
from tests.support import ROOT, crash_disk, make_checkpoint, open_owned, stage_attempt

LAYOUT = Layout.at(ROOT)


def beat_each_sleep(files: Files, generation: int) -> Callable[[float], None]:
    """A hook: the owner of ``generation`` beats while somebody else waits."""
    def beat(now: float) -> None:
        files.overwrite(LAYOUT.owner(generation, "beat"), b"%020d" % int(now))
    return beat


def elsewhere(clock: VirtualClock, **more: object) -> VirtualRuntime:
    """Another machine, which cannot see the processes of ``host-a``."""
    return VirtualRuntime(clock, host="host-b", boot="boot-b", **more)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def disk() -> CrashFiles:
    return crash_disk()


# -- S6: who may take over ---------------------------------------------------------------------------------------------


def test_S6_a_live_process_on_this_kernel_is_refused_at_once(disk: CrashFiles, clock: VirtualClock) -> None:
    open_owned(disk, VirtualRuntime(clock, pid=100))
    second = VirtualRuntime(clock, pid=101)
    with pytest.raises(RootInUse, match="pid 100 on host-a.*wait for it or stop it") as caught:
        open_owned(disk, second)
    assert (caught.value.host, caught.value.pid, caught.value.generation) == ("host-a", 100, 1)
    assert second.slept == 0


def test_S6_a_dead_process_on_this_kernel_is_succeeded_at_once(disk: CrashFiles, clock: VirtualClock) -> None:
    first = VirtualRuntime(clock, pid=100)
    open_owned(disk, first)
    first.die()
    second = VirtualRuntime(clock, pid=101)
    assert open_owned(disk, second).generation == 2 and second.slept == 0


def test_S6_a_reused_pid_is_another_process(disk: CrashFiles, clock: VirtualClock) -> None:
    first = VirtualRuntime(clock, pid=100, started="1")
    open_owned(disk, first)
    first.die()
    VirtualRuntime(clock, pid=100, started="777")
    assert open_owned(disk, VirtualRuntime(clock, pid=101)).generation == 2


def test_S6_a_reboot_ends_every_process_only_where_one_can_tell(disk: CrashFiles, clock: VirtualClock) -> None:
    open_owned(disk, VirtualRuntime(clock, pid=100))
    rebooted = VirtualRuntime(clock, pid=100, boot="boot-a2")
    assert open_owned(disk, rebooted).generation == 2
    assert rebooted.slept >= STILL  # the same host name is no evidence: the old boot might be another machine


@pytest.mark.parametrize("other", [{"pidns": "pid:[2]"}, {"host": "host-b", "boot": "boot-b"}])
def test_S6_two_containers_with_one_host_name_and_two_hosts_must_see_the_counter_move(
        disk: CrashFiles, clock: VirtualClock, other: dict[str, str]) -> None:
    open_owned(disk, VirtualRuntime(clock, pid=100))
    second = VirtualRuntime(clock, pid=100, **other)  # type: ignore[arg-type]
    second.hooks.append(lambda now: beat_each_sleep(disk, 1)(now) if now >= 1_000 + BEAT else None)
    with pytest.raises(RootInUse):
        open_owned(disk, second)
    assert BEAT <= second.slept < 2 * BEAT
    assert highest(disk, LAYOUT) == 1


def test_S6_a_counter_that_stands_still_for_90_s_is_succeeded(disk: CrashFiles, clock: VirtualClock) -> None:
    open_owned(disk, VirtualRuntime(clock, pid=100))
    disk.overwrite(LAYOUT.owner(1, "beat"), b"%020d" % 5)
    second = elsewhere(clock)
    said: list[str] = []
    assert open_owned(disk, second, waiting=said.append).generation == 2
    assert STILL <= second.slept <= STILL + 5 and "waiting 90 s more" in said[0]


def test_S6_a_beat_in_the_last_second_still_counts(disk: CrashFiles, clock: VirtualClock) -> None:
    open_owned(disk, VirtualRuntime(clock, pid=100))
    second = elsewhere(clock)
    second.hooks.append(lambda now: beat_each_sleep(disk, 1)(now) if now >= 1_000 + STILL - 1 else None)
    with pytest.raises(RootInUse):
        open_owned(disk, second)


def test_S6_the_counter_is_read_by_a_fresh_open_each_time(disk: CrashFiles, clock: VirtualClock) -> None:
    open_owned(disk, VirtualRuntime(clock))
    files = FaultyFiles(disk)
    open_owned(files, elsewhere(clock))
    assert len([o for o in files.reads if o.op == "read" and o.path.endswith("1.beat")]) > 40


@pytest.mark.parametrize("skew", [-1e6, 1e6])
def test_S6_clocks_are_never_compared(disk: CrashFiles, clock: VirtualClock, skew: float) -> None:
    open_owned(disk, VirtualRuntime(clock, skew=skew))
    beating = elsewhere(clock, born=skew)
    beating.hooks.append(beat_each_sleep(disk, 1))
    with pytest.raises(RootInUse) as caught:
        open_owned(disk, beating)
    assert caught.value.age == pytest.approx(2.0 - skew, abs=1)  # for people only
    still = VirtualRuntime(clock, host="host-c", boot="boot-c", skew=-skew)
    assert open_owned(disk, still).generation == 2


@pytest.mark.parametrize(("job", "restart", "at_once"), [("slurm:7", 1, True), ("slurm:7", 0, False), ("slurm:8", 1, False),
                                                         (None, 1, False)])
def test_S6_a_requeued_job_succeeds_its_former_run_at_once_and_nobody_elses(
        disk: CrashFiles, clock: VirtualClock, job: str | None, restart: int, at_once: bool) -> None:
    open_owned(disk, VirtualRuntime(clock, job="slurm:7", restart=0))
    second = elsewhere(clock, job=job, restart=restart)
    assert open_owned(disk, second).generation == 2
    assert (second.slept == 0) is at_once


def test_S6_a_released_root_is_taken_without_a_wait(disk: CrashFiles, clock: VirtualClock) -> None:
    open_owned(disk, VirtualRuntime(clock)).close()
    second = elsewhere(clock)
    assert open_owned(disk, second).generation == 2 and second.slept == 0


def test_S6_a_root_that_is_released_while_its_owner_is_watched_is_taken_at_once(disk: CrashFiles, clock: VirtualClock) -> None:
    """Two short jobs at once: the second one looks for a beat of the first, which ends before it has beaten once."""
    one = open_owned(disk, VirtualRuntime(clock))
    second = elsewhere(clock)
    second.hooks.append(lambda now: one.close() if one.users and now >= 1_005 else None)
    assert open_owned(disk, second).generation == 2 and second.slept < 10


def test_S6_a_record_that_says_nothing_is_waited_for(disk: CrashFiles, clock: VirtualClock) -> None:
    """Where there are no hard links a kill may leave an empty record: nobody can judge it, so it must stand still."""
    rootdir.make_root(disk, LAYOUT)
    write_payload(disk, LAYOUT.owner(1), b"")
    second = VirtualRuntime(clock)
    assert open_owned(disk, second).generation == 2 and second.slept >= STILL


def test_S6_of_two_takers_one_wins_and_the_other_judges_the_winner(disk: CrashFiles, clock: VirtualClock) -> None:
    rootdir.make_root(disk, LAYOUT)
    first, second = VirtualRuntime(clock, pid=1), VirtualRuntime(clock, pid=2)
    files = FaultyFiles(disk, call(lambda o: winners.append(Ownership.claim(disk, LAYOUT, second)), op="link"))
    winners: list[Ownership] = []
    with pytest.raises(RootInUse) as caught:
        Ownership.claim(files, LAYOUT, first)
    assert caught.value.pid == 2 and winners[0].generation == 1 and files.fired


def test_S6_of_two_takers_the_loser_succeeds_a_winner_that_died(disk: CrashFiles, clock: VirtualClock) -> None:
    rootdir.make_root(disk, LAYOUT)
    second = VirtualRuntime(clock, pid=2)

    def win_and_die(operation: Operation) -> None:
        Ownership.claim(disk, LAYOUT, second)
        second.die()

    files = FaultyFiles(disk, call(win_and_die, op="link"))
    assert Ownership.claim(files, LAYOUT, VirtualRuntime(clock, pid=1)).generation == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EEXIST])
def test_S6_a_claim_whose_reply_was_lost_is_ours_all_the_same(disk: CrashFiles, clock: VirtualClock, number: int) -> None:
    rootdir.make_root(disk, LAYOUT)
    files = FaultyFiles(disk, fail(number, op="link", after=True))
    assert Ownership.claim(files, LAYOUT, VirtualRuntime(clock)).generation == 1 and files.fired


def test_S6_a_claim_that_failed_lets_this_process_try_again_at_once(disk: CrashFiles, clock: VirtualClock) -> None:
    rootdir.make_root(disk, LAYOUT)
    me = VirtualRuntime(clock)
    with pytest.raises(OSError):
        Ownership.claim(FaultyFiles(disk, fail(errno.EIO, op="mkdir")), LAYOUT, me)
    assert Ownership.claim(disk, LAYOUT, me).generation == 2 and me.slept == 0


def test_S6_a_claim_that_failed_in_a_look_at_any_moment_lets_this_process_try_again(clock: VirtualClock) -> None:
    """Every read of the claim fails in turn, alone and with all that follow: the look for a newer owner among them."""
    refused = 0
    for forever in (False, True):
        for n in range(1, 100):
            disk, me = crash_disk(), VirtualRuntime(clock)
            rootdir.make_root(disk, LAYOUT)
            files = FaultyFiles(disk, fail(errno.EIO, n, op=("scan", "stat", "read"), forever=forever))
            try:
                Ownership.claim(files, LAYOUT, me)
            except OSError:
                refused += 1
                assert Ownership.claim(disk, LAYOUT, me).generation in (1, 2) and me.slept == 0, n
            if not files.fired:
                break
    assert refused > 10


def test_S6_a_beat_never_overwrites_a_new_owner(disk: CrashFiles, clock: VirtualClock) -> None:
    first = VirtualRuntime(clock, pid=100)
    one = open_owned(disk, first)
    first.die()
    open_owned(disk, VirtualRuntime(clock, pid=101))
    before = disk.snapshot()
    first.run("owner-beat", waits=3)
    after = disk.snapshot()
    assert {p for p in after if before.get(p) != after[p]} == {LAYOUT.owner(1, "beat")}
    assert int(disk.read(LAYOUT.owner(1, "beat"), 64)) == 3
    assert catalog.read_json(disk, LAYOUT.owner(2))["identity"]["pid"] == 101  # type: ignore[index]
    with pytest.raises(RootInUse):
        one.ownership.check()


def test_S6_a_beat_that_cannot_be_written_is_no_reason_to_stop(disk: CrashFiles, clock: VirtualClock) -> None:
    runtime = VirtualRuntime(clock)
    one = open_owned(disk, runtime)
    one.ownership._files = files = FaultyFiles(disk, fail(errno.EIO, op="overwrite"))
    runtime.run("owner-beat", waits=2)
    assert files.fired and int(disk.read(LAYOUT.owner(1, "beat"), 64)) == 2


@pytest.mark.parametrize("lost", ["owner", "records", "all but markers"])
def test_S6_a_lost_owner_record_never_lets_the_generation_start_over(disk: CrashFiles, clock: VirtualClock, lost: str) -> None:
    for pid in (1, 2, 3):
        runtime = VirtualRuntime(clock, pid=pid)
        one = open_owned(disk, runtime)
        runtime.die()
    assert one.generation == 3
    make_checkpoint(disk, 1, generation=3 if lost == "all but markers" else 1)
    for item in disk.scan(LAYOUT.home("owner")):
        disk.unlink(LAYOUT.home("owner", item.name))
    if lost == "owner":
        disk.rmdir(LAYOUT.home("owner"))
    if lost == "all but markers":
        disk.rmdir(LAYOUT.staging(3))
        disk.rmdir(LAYOUT.trash(3))
    assert open_owned(disk, VirtualRuntime(clock, pid=9)).generation == 4


@pytest.mark.parametrize("links", [True, False])
def test_S6_a_kill_at_any_operation_of_a_takeover_leaves_a_root_that_can_be_taken(clock: VirtualClock, links: bool) -> None:
    for n in range(1, 200):
        disk = crash_disk()
        disk.links_supported = links
        first = VirtualRuntime(clock, pid=1)
        open_owned(disk, first)
        first.die()
        make_checkpoint(disk, 1)
        stage_attempt(disk, 2, 2)
        second = VirtualRuntime(clock, pid=2)
        try:
            open_owned(FaultyFiles(disk, die(n)), second)
        except Killed:
            second.die()
        else:
            return
        for state in [disk.after_kill(), *disk.crash_states(limit=40)]:
            third = open_owned(state, VirtualRuntime(clock, pid=3))
            assert [e.step for e in third.entries() if e.committed] == [2, 1], n
            assert third.highest_seq == 2 and third.generation >= 2
    raise AssertionError("it never ended")


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_the_owner_record_says_who_and_is_durable_before_the_first_move(disk: CrashFiles, clock: VirtualClock) -> None:
    rootdir.make_root(disk, LAYOUT)
    rootdir.sync_root(disk, LAYOUT)
    files = FaultyFiles(disk, die(op="mkdir", path="/staging/1"))
    with pytest.raises(Killed):
        Ownership.claim(files, LAYOUT, VirtualRuntime(clock, job="slurm:7"))
    for state in disk.crash_states():
        record = json.loads(state.read(LAYOUT.owner(1), 4096))
        assert record["identity"]["host"] == "host-a" and record["identity"]["job"] == "slurm:7" and record["generation"] == 1


def test_old_records_are_pruned_and_recent_ones_kept(disk: CrashFiles, clock: VirtualClock) -> None:
    for pid in range(1, 15):
        open_owned(disk, VirtualRuntime(clock, pid=pid)).close()
    write_payload(disk, LAYOUT.owner(3, "dead.tmp"), b"")
    open_owned(disk, VirtualRuntime(clock, pid=99))
    numbers = sorted({int(i.name.partition(".")[0]) for i in disk.scan(LAYOUT.home("owner"))})
    assert numbers == list(range(7, 16))
    assert [i.name for i in disk.scan(LAYOUT.home("staging"))] == ["15"]


def test_a_release_that_fails_is_a_warning(disk: CrashFiles, clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    one = open_owned(disk, VirtualRuntime(clock))
    write_payload(disk, LAYOUT.owner(1, "released"), b"")
    one.close()
    assert "could not release" in caplog.text
