"""Opening a root: who it belongs to, under which names, and that it is durable before anything relies on it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from distckpt import catalog, journal, owned
from distckpt.durable import REAL
from distckpt.errors import ConfigError, MarkerError, RootInUse
from distckpt.layout import SUBDIRECTORIES, Layout, Naming
from distckpt.owned import OwnedRoot
from distckpt.rootdir import infer_naming, make_root, sync_root
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, Killed, die, fail
from tests.support import ROOT, STEP, attempt_id, crash_disk, make_checkpoint, open_owned, stage_attempt

LAYOUT = Layout.at(ROOT)
CHECKPOINT = Naming.parse("checkpoint-{step:06d}")


@pytest.fixture
def disk() -> CrashFiles:
    return crash_disk()


def reopen(files: CrashFiles, pid: int = 2, **more: object) -> OwnedRoot:
    return open_owned(files, VirtualRuntime(VirtualClock(), pid=pid), **more)  # type: ignore[arg-type]


# -- one owner per root and process ------------------------------------------------------------------------------------


def test_S24_managers_of_one_root_in_one_process_share_one_owner_and_one_seq(disk: CrashFiles) -> None:
    runtime = VirtualRuntime()
    first = OwnedRoot.open(disk, LAYOUT, runtime)
    second = OwnedRoot.open(disk, LAYOUT, runtime, STEP, first.record.run)
    assert first is second and first.next_seq() == 1 and second.next_seq() == 2
    first.close()
    assert OwnedRoot.open(disk, LAYOUT, runtime) is second
    second.close()
    second.close()
    assert OwnedRoot.open(disk, LAYOUT, runtime).generation == 2


def test_S24_one_root_by_two_paths_is_one_root(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "real")
    os.symlink(tmp_path / "real", tmp_path / "alias")
    runtime = VirtualRuntime()
    first = OwnedRoot.open(REAL, Layout.at(tmp_path / "real"), runtime)
    assert OwnedRoot.open(REAL, Layout.at(tmp_path / "alias"), runtime) is first


def test_S24_a_second_manager_cannot_ask_for_other_names_or_another_run(disk: CrashFiles) -> None:
    runtime = VirtualRuntime()
    OwnedRoot.open(disk, LAYOUT, runtime, STEP, "run-a")
    with pytest.raises(ConfigError, match="naming 'step-{step}'.*use a series or another root"):
        OwnedRoot.open(disk, LAYOUT, runtime, CHECKPOINT)
    with pytest.raises(ConfigError, match="'run-a', not 'run-b'"):
        OwnedRoot.open(disk, LAYOUT, runtime, run_id="run-b")


def test_a_failed_open_gives_the_root_back(disk: CrashFiles) -> None:
    reopen(disk).close()
    write_payload(disk, LAYOUT.staging(1, "x"), b"")
    clock = VirtualClock()
    files = FaultyFiles(disk, fail(errno.EIO, op="unlink", path=LAYOUT.staging(2, "x")))
    with pytest.raises(OSError):
        open_owned(files, VirtualRuntime(clock, pid=3))
    second = VirtualRuntime(clock, pid=4)
    assert files.fired and open_owned(disk, second).generation == 3 and second.slept == 0


# -- the root itself ---------------------------------------------------------------------------------------------------


def test_S9_a_root_is_durable_with_all_its_own_directories_before_the_first_attempt() -> None:
    disk = crash_disk()
    one = open_owned(disk, root="/disk/a/b/run")
    layout = one.layout
    for state in disk.crash_states():
        assert [i.name for i in state.scan(layout.home()) if i.kind == "dir"] == sorted(SUBDIRECTORIES)
        assert catalog.read_record(state, layout) == one.record
        assert state.is_dir(layout.staging(1)) and state.is_dir(layout.trash(1))
        open_owned(state, VirtualRuntime(pid=2), root="/disk/a/b/run")


def test_S9_an_attempts_own_names_are_durable_before_anybody_writes_into_it(disk: CrashFiles) -> None:
    one = open_owned(disk)
    inner = one.make_attempt(attempt_id(1), "step-1")
    assert inner == LAYOUT.staging(1, attempt_id(1), "step-1")
    assert all(state.is_dir(inner) for state in disk.crash_states())


def test_S9_the_root_is_synced_with_its_ancestors_up_to_the_mount_point_children_first() -> None:
    disk = CrashFiles("/a/b/run")
    layout = Layout.at("/a/b/run")
    make_root(disk, layout)
    files = FaultyFiles(disk)
    sync_root(files, layout)
    paths = [o.path for o in files.log]
    assert [o.op for o in files.log] == ["fsync_dir"] * len(paths)
    assert set(paths[:len(SUBDIRECTORIES)]) == {layout.home(name) for name in SUBDIRECTORIES}
    assert paths[len(SUBDIRECTORIES):] == [layout.home(), "/a/b/run", "/a/b", "/a", "/"]


def test_S9_an_ancestor_that_may_not_be_read_is_no_error_and_a_broken_one_is(disk: CrashFiles) -> None:
    make_root(disk, LAYOUT)
    sync_root(FaultyFiles(disk, fail(errno.EACCES, op="fsync_dir", path=lambda p: p == "/disk")), LAYOUT)
    with pytest.raises(OSError):
        sync_root(FaultyFiles(disk, fail(errno.EIO, op="fsync_dir", path=lambda p: p == "/disk")), LAYOUT)


def test_an_open_killed_or_cut_at_any_operation_leaves_a_root_that_opens() -> None:
    for n in range(1, 200):
        disk = crash_disk()
        files = FaultyFiles(disk, die(n))
        runtime = VirtualRuntime(VirtualClock(), pid=1)
        try:
            open_owned(files, runtime, run_id=None)
        except Killed:
            runtime.die()
        else:
            return
        for state in [disk.after_kill(), *disk.crash_states(limit=6)]:
            assert catalog.scan(state, reopen(state, run_id=None).layout, STEP) == []
    raise AssertionError("it never ended")


@pytest.mark.parametrize("broken", ["root", "parent", "home"])
def test_a_file_where_a_directory_must_be_is_a_config_error(disk: CrashFiles, broken: str) -> None:
    path = {"root": ROOT, "parent": "/disk/a", "home": LAYOUT.home()}[broken]
    write_payload(disk, path, b"")
    with pytest.raises(ConfigError, match="is not a directory; choose another root"):
        open_owned(disk, root="/disk/a/run" if broken == "parent" else ROOT)


def test_a_root_that_cannot_be_written_is_a_config_error(disk: CrashFiles) -> None:
    with pytest.raises(ConfigError, match="is not writable"):
        open_owned(FaultyFiles(disk, fail(errno.EROFS, op="mkdir")))  # type: ignore[arg-type]


# -- the record ----------------------------------------------------------------------------------------------------------


def test_a_root_keeps_its_run_and_its_naming(disk: CrashFiles) -> None:
    first = reopen(disk, naming=CHECKPOINT, run_id=None)
    first.close()
    again = reopen(disk, run_id=None)
    assert again.record == first.record and again.naming == CHECKPOINT
    again.close()
    with pytest.raises(ConfigError, match="was made with naming 'checkpoint-{step:06d}'"):
        reopen(disk, naming=STEP, run_id=None)
    with pytest.raises(ConfigError, match="belongs to run"):
        reopen(disk, run_id="another")


def test_two_roots_are_two_runs(disk: CrashFiles) -> None:
    runs = {open_owned(disk, VirtualRuntime(pid=n), root=f"/disk/{n}", run_id=None).record.run for n in range(5)}
    assert len(runs) == 5


def test_S7_a_lost_root_json_takes_run_and_naming_from_the_newest_marker(disk: CrashFiles) -> None:
    reopen(disk, naming=CHECKPOINT).close()
    make_checkpoint(disk, 900, 1, run="older", naming=CHECKPOINT)
    make_checkpoint(disk, 400, 2, run="newest", naming=CHECKPOINT)
    disk.unlink(LAYOUT.record)
    one = reopen(disk, run_id=None)
    assert (one.record.run, one.naming) == ("newest", CHECKPOINT)
    for state in disk.crash_states():
        assert catalog.read_record(state, LAYOUT) == one.record


def test_S7_a_lost_root_json_is_found_in_the_only_commit_even_when_that_is_still_staged(disk: CrashFiles) -> None:
    reopen(disk, naming=CHECKPOINT).close()
    stage_attempt(disk, 1, 1, run="mine", naming=CHECKPOINT)
    disk.unlink(LAYOUT.record)
    one = reopen(disk, run_id=None)
    assert (one.record.run, one.naming) == ("mine", CHECKPOINT)
    assert [e.name for e in one.entries() if e.committed] == ["checkpoint-000001"] and one.foreign(one.entries()) == []


def test_S7_a_copy_of_another_runs_checkpoint_never_names_the_run(disk: CrashFiles) -> None:
    reopen(disk).close()
    make_checkpoint(disk, 1, 1, run="mine")
    make_checkpoint(disk, 5, 80, run="theirs", directory=f"{ROOT}/step-999")
    disk.unlink(LAYOUT.record)
    assert reopen(disk, run_id=None).record.run == "mine"


def test_S7_an_unreadable_root_json_is_an_error_and_nothing_is_claimed(disk: CrashFiles) -> None:
    reopen(disk).close()
    disk.unlink(LAYOUT.record)
    write_payload(disk, LAYOUT.record, b'{"format": 1, "ru')
    with pytest.raises(MarkerError, match="restore it, or remove it"):
        reopen(disk)
    with pytest.raises(OSError):
        reopen(FaultyFiles(disk, fail(errno.EIO, op="read", path="root.json")))  # type: ignore[arg-type]
    assert [i.name for i in disk.scan(LAYOUT.home("staging"))] == ["1"]


@pytest.mark.parametrize("saved", [True, False])
def test_S7_a_root_made_while_we_waited_for_its_owner_keeps_its_run_and_naming(disk: CrashFiles, saved: bool) -> None:
    """Two jobs start on one new root. The second waits to see whether the first one beats; the first makes the record,
    saves, and leaves: the second must go on with that run and not start one of its own beside it."""
    clock = VirtualClock()
    make_root(disk, LAYOUT)
    write_payload(disk, LAYOUT.owner(1), json.dumps({
        "identity": VirtualRuntime(clock, host="host-b", boot="boot-b").me.to_json(), "time": 0.0}).encode())
    second = VirtualRuntime(clock, pid=2)
    record = catalog.RootRecord("the first run", CHECKPOINT)

    def first_saves(now: float) -> None:
        if catalog.read_record(disk, LAYOUT) is None:
            write_payload(disk, LAYOUT.record, record.to_bytes())
            if saved:
                make_checkpoint(disk, 1, 1, run=record.run, naming=CHECKPOINT)

    second.hooks.append(first_saves)
    one = open_owned(disk, second, run_id=None)
    assert one.record == record == catalog.read_record(disk, LAYOUT) and one.naming == CHECKPOINT
    assert len(one.entries()) == saved and one.foreign(one.entries()) == []


@pytest.mark.parametrize(("template", "step"), [("step-{step}", 7), ("checkpoint-{step:08d}", 7), ("global_step{step}", 100),
                                                ("v2-{step}", 2),
                                                ("{step}-of-7", 7), ("epoch-{step}.ckpt", 0), ("step-{step:08d}", 12345678)])
@pytest.mark.parametrize("series", ["main", "rolling"])
def test_S7_a_lost_naming_is_read_off_the_newest_marker(disk: CrashFiles, template: str, step: int, series: str) -> None:
    naming = Naming.parse(template)
    make_checkpoint(disk, step, 1, naming=naming, series=series)
    found = infer_naming(disk, LAYOUT)
    assert found is not None and found.of_series(series).format(step) == naming.of_series(series).format(step)
    assert found.prefix == naming.prefix or template in ("v2-{step}", "{step}-of-7")


def test_a_root_without_any_marker_has_the_default_naming(disk: CrashFiles) -> None:
    assert reopen(disk).naming == STEP


# -- attempts ------------------------------------------------------------------------------------------------------------


def test_S21_dead_attempts_of_this_generation_are_found_and_swept(disk: CrashFiles) -> None:
    one = open_owned(disk)
    for number in (1, 2):
        one.make_attempt(attempt_id(number), f"step-{number}")
    disk.mkdir(LAYOUT.staging(1, "not-an-attempt"))
    one.live.add(attempt_id(2))
    one.sweep()
    one.remove_attempt(attempt_id(99))
    assert [i.name for i in disk.scan(LAYOUT.staging(1))] == [attempt_id(2), "not-an-attempt"]
    one.runtime.run("janitor")  # type: ignore[attr-defined]
    assert disk.scan(LAYOUT.trash(1)) == []


def test_S5_no_parent_is_ever_made_on_the_way(disk: CrashFiles) -> None:
    one = open_owned(disk)
    disk.rmdir(LAYOUT.staging(1))
    with pytest.raises(FileNotFoundError):
        one.make_attempt(attempt_id(1), "step-1")


def test_the_pointer_moves_in_one_step_and_durably(disk: CrashFiles) -> None:
    one = open_owned(disk)
    one.point_to("step-1")
    one.point_to("step-2")
    assert {catalog.read_pointer(state, LAYOUT) for state in disk.crash_states()} == {"step-2"}
    one.files = FaultyFiles(disk, fail(errno.ENOSPC, op="write"))
    one.point_to("step-3")
    assert catalog.read_pointer(disk, LAYOUT) == "step-2"


def test_a_frameworks_tools_come_into_the_root_once_and_never_under_a_name_of_ours(disk: CrashFiles) -> None:
    one = open_owned(disk)
    names = ["tool.py", "sub/other.py", "latest", "step-9", "step-9-rolling", ".distckpt"]
    make_checkpoint(disk, 1, 1, payload={"tool.py": b"first", "sub/other.py": b"other", "latest": b"x", "step-9": b"x",
                                         "step-9-rolling": b"x"})
    one.put_beside("step-1", names)
    for state in disk.crash_states():
        assert {i.name for i in state.scan(ROOT)} == {".distckpt", "step-1", "tool.py", "other.py"}
        assert state.read(f"{ROOT}/tool.py", 99) == b"first"
    make_checkpoint(disk, 2, 2, payload={"tool.py": b"second"})
    one.put_beside("step-2", names[:1])
    assert disk.read(f"{ROOT}/tool.py", 99) == b"first", "the root's is its user's by now"
    one.files = FaultyFiles(disk, fail(errno.ENOSPC, op="write"))
    make_checkpoint(disk, 3, 3, payload={"new.py": b"new"})
    one.put_beside("step-3", ["new.py", "none.py"])
    assert "new.py" not in {i.name for i in disk.scan(ROOT)}


def test_a_rejection_is_durable_and_read_back(disk: CrashFiles) -> None:
    one = open_owned(disk)
    one.reject(attempt_id(1), "step-1", "digest differs")
    for state in disk.crash_states():
        assert catalog.rejections(state, LAYOUT) == {attempt_id(1): "digest differs"}
    assert one.rejections() == {attempt_id(1): "rejected: digest differs"}


def test_checkpoints_of_another_run_are_reported_once(disk: CrashFiles, caplog: pytest.LogCaptureFixture) -> None:
    one = open_owned(disk)
    make_checkpoint(disk, 1, 1, run="theirs")
    assert [e.name for e in one.foreign(one.entries())] == ["step-1"] and len(one.foreign(one.entries())) == 1
    assert caplog.text.count("checkpoints of another run") == 1


def test_what_the_owner_did_stands_in_the_journal(disk: CrashFiles) -> None:
    one = open_owned(disk)
    one.journal.event("committed", step=1)
    disk.append(LAYOUT.journal(1), b'{"torn": ')
    one.close()
    kinds = [event["event"] for event in journal.read(disk, LAYOUT) if "event" in event]
    assert kinds[:2] == ["claimed", "committed"] and journal.ever_committed(disk, LAYOUT)


def test_a_journal_that_cannot_be_written_is_one_warning(disk: CrashFiles, caplog: pytest.LogCaptureFixture) -> None:
    one = open_owned(disk)
    one.journal._files = FaultyFiles(disk, fail(errno.ENOSPC, op="append", forever=True))
    one.journal.event("a")
    one.journal.event("b")
    assert caplog.text.count("cannot write the journal") == 1


def test_two_processes_on_one_real_root(tmp_path: Path) -> None:
    """The whole of it on the real file system: refuse, take over, recover, rotate."""
    clock = VirtualClock()
    first, second = VirtualRuntime(clock, pid=1), VirtualRuntime(clock, pid=2)
    root = str(tmp_path / "run")
    one = open_owned(REAL, first, root=root)
    make_checkpoint(root, 1, one.next_seq())
    stage_attempt(REAL, 2, one.next_seq(), root=root)
    with pytest.raises(RootInUse):
        open_owned(REAL, second, root=root)
    first.die()
    two = open_owned(REAL, second, root=root)
    assert [e.name for e in two.entries() if e.committed] == ["step-2", "step-1"]
    two.runtime.run("janitor")  # type: ignore[attr-defined]
    assert os.listdir(two.layout.trash(2)) == [] and sorted(os.listdir(root)) == [".distckpt", "step-1", "step-2"]
    owned._open.clear()
