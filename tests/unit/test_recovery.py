"""After a crash: what was committed is published, the rest is swept, and nothing that loads is ever lost."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from distckpt import catalog, marker, recovery, rootdir
from distckpt.durable import Files
from distckpt.layout import MARKER, Layout
from distckpt.owned import OwnedRoot
from distckpt.recovery import REPLACED, publish, recover
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, Killed, die, fail, refuse
from tests.support import (
    ROOT,
    STEP,
    attempt_id,
    left_by_a_dead_owner,
    make_checkpoint,
    reopen,
    stage_attempt,
    standing,
)

LAYOUT = Layout.at(ROOT)


@pytest.fixture
def disk() -> CrashFiles:
    return left_by_a_dead_owner()


def sweep(one: OwnedRoot) -> None:
    """Let the janitor delete what stands in trash, now and on this thread."""
    one.runtime.run("janitor")  # type: ignore[attr-defined]


def names(files: Files, path: str) -> list[str]:
    return [item.name for item in files.scan(path)]


def test_a_committed_attempt_is_published_and_everything_else_is_swept(disk: CrashFiles) -> None:
    stage_attempt(disk, 1, 1)
    write_payload(disk, LAYOUT.staging(1, attempt_id(2), "step-2", "model.pt"), b"half")
    write_payload(disk, LAYOUT.staging(1, "latest.tmp"), b"step-0")
    disk.mkdir(LAYOUT.staging(1, "stranger"))
    one = reopen(disk)
    assert standing(disk) == {"step-1": attempt_id(1)}
    assert names(disk, LAYOUT.staging(2)) == [] and one.highest_seq == 1
    assert sorted(names(disk, LAYOUT.trash(2))) == sorted([attempt_id(1), attempt_id(2), "stranger"])
    sweep(one)
    assert names(disk, LAYOUT.trash(2)) == [] and standing(disk) == {"step-1": attempt_id(1)}


def test_several_committed_attempts_are_published_in_their_order(disk: CrashFiles) -> None:
    for step, seq in ((30, 3), (10, 1), (20, 2)):
        stage_attempt(disk, step, seq)
    report = recover_only(disk)
    assert report.published == ["step-10", "step-20", "step-30"]
    assert [e.name for e in catalog.scan(disk, LAYOUT, STEP)] == ["step-30", "step-20", "step-10"]


def recover_only(files: Files) -> recovery.Report:
    rootdir.make_root(files, LAYOUT)
    return recover(files, LAYOUT, STEP, 1)


def test_every_series_and_padding_of_the_root_is_recovered() -> None:
    disk = left_by_a_dead_owner()
    stage_attempt(disk, 1, 1, series="rolling")
    reopen(disk)
    assert standing(disk) == {"step-1-rolling": attempt_id(1)}


# -- S2 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [True, False])
def test_S2_a_replace_killed_at_any_operation_leaves_the_old_or_the_new_and_never_swaps_back(exchange: bool) -> None:
    def prepare() -> CrashFiles:
        disk = left_by_a_dead_owner((7, 1))
        stage_attempt(disk, 7, 2, generation=1, payload={"model.pt": b"new"})
        return disk

    for disk, files in killed_in(prepare, lambda f: publish(f, LAYOUT, 1, attempt_id(2), "step-7"), exchange):
        for state in [disk.after_kill(), *disk.crash_states(limit=12)]:
            one = reopen(state)
            for again in [state, *state.crash_states(limit=4)]:
                assert standing(again) == {"step-7": attempt_id(2)}, files.log[-1]
            sweep(one)  # what was the old half must be it after a cut, too: its bytes go now
            for again in [state, *state.crash_states(limit=6)]:
                reopen(again, pid=3)
                assert standing(again) == {"step-7": attempt_id(2)}, files.log[-1]


def killed_in(prepare: object, act: object, exchange: bool = True) -> Iterator[tuple[CrashFiles, FaultyFiles]]:
    for n in range(1, 200):
        disk: CrashFiles = prepare()  # type: ignore[operator]
        disk.exchange_supported = exchange
        files = FaultyFiles(disk, die(n))
        try:
            act(files)  # type: ignore[operator]
        except Killed:
            yield disk, files
        else:
            yield disk, files
            assert n > 3
            return
    raise AssertionError("it never ended")


def test_S2_the_old_half_in_staging_has_a_valid_marker_and_goes_to_trash(disk: CrashFiles) -> None:
    make_checkpoint(disk, 7, 2, attempt=attempt_id(2))
    make_checkpoint(disk, 7, 1, directory=LAYOUT.staging(1, attempt_id(2), "step-7"))
    reopen(disk)
    assert standing(disk) == {"step-7": attempt_id(2)} and names(disk, LAYOUT.staging(2)) == []


def test_S2_an_attempt_must_name_its_own_directory(disk: CrashFiles) -> None:
    stage_attempt(disk, 7, 5, attempt=attempt_id(5))
    make_checkpoint(disk, 8, 6, directory=LAYOUT.staging(1, attempt_id(6), "step-9"), attempt=attempt_id(6))
    make_checkpoint(disk, 9, 7, directory=LAYOUT.staging(1, attempt_id(99), "step-9"), attempt=attempt_id(7))
    make_checkpoint(disk, 10, 8, directory=LAYOUT.staging(1, attempt_id(8), "not-ours"), attempt=attempt_id(8), name="not-ours")
    reopen(disk)
    assert standing(disk) == {"step-7": attempt_id(5)}


def test_S2_what_replaces_must_be_newer_than_what_stands(disk: CrashFiles) -> None:
    make_checkpoint(disk, 7, 5)
    stage_attempt(disk, 7, 4)
    reopen(disk)
    assert standing(disk) == {"step-7": attempt_id(5)}


def test_S2_a_replace_by_trash_whose_second_half_never_became_committed_is_undone(disk: CrashFiles) -> None:
    make_checkpoint(disk, 7, 1, directory=LAYOUT.trash(1, f"step-7.{attempt_id(1)}{REPLACED}"))
    write_payload(disk, LAYOUT.staging(1, attempt_id(2), "step-7", "model.pt"), b"half")
    reopen(disk)
    assert standing(disk) == {"step-7": attempt_id(1)}


@pytest.mark.parametrize("spoil", ["no marker", "torn", "partial", "standing"])
def test_S2_only_a_whole_old_half_is_put_back(disk: CrashFiles, spoil: str) -> None:
    old = LAYOUT.trash(1, f"step-7.{attempt_id(1)}{REPLACED}")
    make_checkpoint(disk, 7, 1, directory=old)
    if spoil == "no marker":
        disk.unlink(f"{old}/{MARKER}")
    elif spoil == "torn":
        data = disk.read(f"{old}/{MARKER}", 1 << 20)
        disk.unlink(f"{old}/{MARKER}")
        write_payload(disk, f"{old}/{MARKER}", data[:-20])
    elif spoil == "partial":
        disk.unlink(f"{old}/model.pt")
    else:
        make_checkpoint(disk, 7, 2)
    reopen(disk)
    assert standing(disk) == ({"step-7": attempt_id(2)} if spoil == "standing" else {})


# -- S3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "short", "long", "directory", "link"])
def test_S3_a_marker_over_a_partial_tree_is_swept(disk: CrashFiles, damage: str) -> None:
    stage_attempt(disk, 1, 1)
    path = LAYOUT.staging(1, attempt_id(1), "step-1", "sub/optim.pt")
    disk.unlink(path)
    if damage in ("short", "long"):
        write_payload(disk, path, b"" if damage == "short" else b"x" * 99)
    elif damage == "directory":
        disk.mkdir(path)
    elif damage == "link":
        disk.symlink(path)
    reopen(disk)
    assert standing(disk) == {} and names(disk, LAYOUT.staging(2)) == []


def test_S3_an_attempt_whose_removal_was_killed_is_not_resurrected() -> None:
    for n in range(1, 60):
        disk = left_by_a_dead_owner((1, 1))
        one = reopen(disk)
        stage_attempt(disk, 2, 2, generation=2)
        disk.unlink(LAYOUT.staging(2, attempt_id(2), "step-2", MARKER))  # what an abort does first
        disk.fsync_dir(LAYOUT.staging(2, attempt_id(2), "step-2"))
        files = FaultyFiles(disk, die(n))
        one.files = one.janitor._files = files
        try:
            one.remove_attempt(attempt_id(2))
            sweep(one)
        except Killed:
            pass
        for state in [disk.after_kill(), *disk.crash_states(limit=10)]:
            reopen(state, pid=3)
            assert standing(state) == {"step-1": attempt_id(1)}
        if not files.dead:
            return
    raise AssertionError("it never ended")


def test_S3_a_seal_that_does_not_match_is_no_marker(disk: CrashFiles) -> None:
    found = stage_attempt(disk, 1, 1)
    path = LAYOUT.staging(1, attempt_id(1), "step-1", MARKER)
    disk.unlink(path)
    write_payload(disk, path, marker.build(found).replace(b'"world":1', b'"world":2'))
    reopen(disk)
    assert standing(disk) == {}


# -- S8 --------------------------------------------------------------------------------------------------------------


def test_S8_a_marker_that_only_the_page_cache_holds_is_written_anew_before_it_is_published() -> None:
    disk = left_by_a_dead_owner((1, 1))
    stage_attempt(disk, 2, 2)
    disk.condemn(LAYOUT.staging(1, attempt_id(2), "step-2", MARKER))  # its fsync failed, and the owner died of it
    reopen(disk)
    assert standing(disk) == {"step-1": attempt_id(1), "step-2": attempt_id(2)}
    for state in disk.crash_states():
        assert standing(state) == {"step-1": attempt_id(1), "step-2": attempt_id(2)}


def test_S8_an_attempt_that_was_never_synced_at_all_is_durable_once_it_is_published() -> None:
    disk = left_by_a_dead_owner((1, 1))
    stage_attempt(disk, 2, 2, durable=False)
    reopen(disk)
    for state in disk.crash_states():
        assert standing(state) == {"step-1": attempt_id(1), "step-2": attempt_id(2)}


def test_S8_a_tree_that_cannot_be_synced_is_not_published() -> None:
    disk = left_by_a_dead_owner((1, 1))
    stage_attempt(disk, 2, 2, durable=False)
    disk.poison(LAYOUT.staging(1, attempt_id(2), "step-2", "sub/optim.pt"))
    with pytest.raises(OSError) as caught:
        reopen(disk)
    assert caught.value.errno == errno.EIO and standing(disk) == {"step-1": attempt_id(1)}


def test_S8_recovery_killed_or_cut_at_any_operation_still_ends_with_the_commit() -> None:
    def prepare() -> CrashFiles:
        disk = left_by_a_dead_owner((1, 1))
        stage_attempt(disk, 2, 2)
        return disk

    for disk, files in killed_in(prepare, lambda f: recover(f, LAYOUT, STEP, 1)):
        for state in [disk.after_kill(), *disk.crash_states(limit=30)]:
            reopen(state)
            assert standing(state) == {"step-1": attempt_id(1), "step-2": attempt_id(2)}, files.log[-1]
            assert MARKER + ".again" not in names(state, LAYOUT.final("step-2"))


def test_S7_a_share_that_was_not_decided_is_in_trash_without_its_marker_after_a_cut_too() -> None:
    """In trash it would pass for a trace of a checkpoint, and a job that was killed in its first save could not start again."""
    def prepare() -> CrashFiles:
        disk = left_by_a_dead_owner()
        staged = stage_attempt(disk, 1, 1, world=2)
        share = replace(staged, head=replace(staged.head, part=1, of=2), domains=(("node-0", (0,)), ("node-1", (1,))))
        place = LAYOUT.staging(1, attempt_id(1), "step-1")
        disk.unlink(f"{place}/{MARKER}")
        write_payload(disk, f"{place}/{MARKER}", marker.build(share, None))
        return disk

    moved = 0
    for disk, files in killed_in(prepare, lambda f: recover(f, LAYOUT, STEP, 1, ())):
        for state in [disk.after_kill(), *disk.crash_states(limit=30)]:
            trash = [path for path in state.snapshot() if "/trash/1/" in path]
            moved += bool(trash)
            assert not [path for path in trash if path.endswith(MARKER)], files.log[-1]
    assert moved


def test_S8_an_inherited_checkpoint_is_synced_before_it_counts() -> None:
    disk = left_by_a_dead_owner()
    make_checkpoint(disk, 1, 1, durable=False)
    one = reopen(disk)
    one.vouch(one.entries()[0])
    disk.fsync_dir(ROOT)
    for state in disk.crash_states():
        assert standing(state) == {"step-1": attempt_id(1)}


# -- S11 -------------------------------------------------------------------------------------------------------------


def test_S11_an_old_staged_attempt_is_never_rolled_over_a_newer_commit(disk: CrashFiles) -> None:
    make_checkpoint(disk, 20, 5)
    stage_attempt(disk, 10, 4)
    stage_attempt(disk, 30, 6)
    reopen(disk)
    assert standing(disk) == {"step-20": attempt_id(5), "step-30": attempt_id(6)}


def test_S11_a_newer_commit_counts_even_where_its_body_is_torn(disk: CrashFiles) -> None:
    """The head orders: what stands at seq 5 was published, so an attempt of seq 4 is not newer than everything."""
    make_checkpoint(disk, 20, 5)
    disk.unlink(LAYOUT.final("step-20") + "/model.pt")
    stage_attempt(disk, 10, 4)
    reopen(disk)
    assert "step-10" not in names(disk, ROOT)


@pytest.mark.parametrize("start", [reopen, recover_only])
def test_S11_nothing_is_rolled_over_a_commit_that_cannot_be_read(disk: CrashFiles, start: Callable[[Files], object]) -> None:
    """The start looks before it recovers, and recovery does too."""
    make_checkpoint(disk, 20, 5)
    stage_attempt(disk, 10, 4)
    marker = LAYOUT.final("step-20") + "/commit.json"
    files = FaultyFiles(disk, fail(errno.EIO, op="read", path=lambda path: path == marker, forever=True))
    with pytest.raises(OSError, match="cannot tell"):
        start(files)
    assert "step-10" not in names(disk, ROOT)


@pytest.mark.parametrize("where", ["root", "staging", "staged torn tree", "trash", "trash attempt", "rollback", "foreign copy"])
def test_S11_a_seq_that_was_ever_used_is_never_given_again(disk: CrashFiles, where: str) -> None:
    if where == "root":
        make_checkpoint(disk, 1, 9)
    elif where == "staging":
        stage_attempt(disk, 1, 9)
    elif where == "staged torn tree":
        stage_attempt(disk, 1, 9)
        disk.unlink(LAYOUT.staging(1, attempt_id(9), "step-1", "model.pt"))
    elif where == "trash":
        make_checkpoint(disk, 1, 9, directory=LAYOUT.trash(1, f"step-1.{attempt_id(9)}"))
    elif where == "trash attempt":
        make_checkpoint(disk, 1, 9, directory=LAYOUT.trash(1, attempt_id(9), "step-1"))
    elif where == "rollback":
        write_payload(disk, LAYOUT.rollback, b'{"abandoned": [[3, 9]]}')
    else:
        make_checkpoint(disk, 1, 9, directory=f"{ROOT}/step-5")
    one = reopen(disk)
    assert one.next_seq() == 10 and one.next_seq() == 11


def test_S11_recovery_ends_before_the_first_attempt_can_be_made(disk: CrashFiles) -> None:
    stage_attempt(disk, 1, 1)
    files = FaultyFiles(disk)
    one = reopen(files)
    before = files.count
    one.make_attempt(attempt_id(2), "step-2")
    assert all(o.op in ("mkdir", "fsync_dir") for o in files.log[before:])
    assert [o for o in files.log[:before] if o.op == "rename" and o.other == LAYOUT.final("step-1")]


# -- S13, S14 --------------------------------------------------------------------------------------------------------


def test_S13_an_empty_directory_under_the_final_name_is_no_checkpoint_and_no_obstacle(disk: CrashFiles) -> None:
    stage_attempt(disk, 1, 1)
    disk.mkdir(LAYOUT.final("step-1"))
    reopen(disk)
    assert standing(disk) == {"step-1": attempt_id(1)}


@pytest.mark.parametrize("what", ["file", "legacy"])
@pytest.mark.parametrize("exchange", [True, False])
def test_S13_what_stands_under_the_final_name_moves_aside_by_one_rename(disk: CrashFiles, what: str, exchange: bool) -> None:
    disk.exchange_supported = exchange
    stage_attempt(disk, 1, 1)
    if what == "file":
        write_payload(disk, LAYOUT.final("step-1"), b"")
    else:
        write_payload(disk, LAYOUT.final("step-1") + "/pytorch_model.bin", b"old")
    reopen(disk)
    assert standing(disk) == {"step-1": attempt_id(1)}


def test_S13_no_claiming_by_mkdir_under_the_final_name(disk: CrashFiles) -> None:
    stage_attempt(disk, 1, 1)
    files = FaultyFiles(disk, refuse())
    reopen(files)
    assert not [o for o in files.operations("mkdir") if o.path == LAYOUT.final("step-1")]


def test_S14_a_publish_whose_reply_was_lost_is_found_published_at_the_next_start(disk: CrashFiles) -> None:
    stage_attempt(disk, 1, 1)
    files = FaultyFiles(disk, fail(errno.EIO, op="rename", path=LAYOUT.final("step-1"), after=True))
    with pytest.raises(OSError):
        reopen(files)
    reopen(disk, pid=3)
    assert files.fired and standing(disk) == {"step-1": attempt_id(1)}


def test_a_foreign_marker_in_staging_keeps_its_own_run(disk: CrashFiles) -> None:
    stage_attempt(disk, 1, 1, run="another-run")
    one = reopen(disk)
    assert [e.name for e in one.foreign(one.entries())] == ["step-1"]
