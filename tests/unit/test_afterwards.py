"""What follows a commit: not on the caller's thread, after the commit, one after the other, and done before anybody needs it."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from distckpt.afterwards import Afterwards
from distckpt.durable import REAL, Files
from distckpt.errors import DiskFull, SaveError
from distckpt.layout import Layout
from distckpt.leases import take
from distckpt.manager import CheckpointManager
from distckpt.marker import parse
from distckpt.options import Seams, Timeouts
from distckpt.payloads.base import Ranks
from distckpt.runtime import NICE, SYSTEM
from distckpt.saving.files import RankFiles
from distckpt.testing.clock import VirtualRuntime
from distckpt.testing.faults import FaultyFiles, Operation, call, fail
from tests.onerank import Blob, Machine, tidy
from tests.support import ROOT, crash_disk

LAYOUT = Layout.at(ROOT)
LIMIT = 20.0


def save(manager: CheckpointManager, step: int, **options: object) -> None:
    manager.save(step, Blob(f"{step}"), meta={"text": f"{step}"}, **options)  # type: ignore[arg-type]


def steps(files: Files, root: str = ROOT) -> list[int]:
    return sorted(int(item.name[5:]) for item in files.scan(root) if item.name.startswith("step-"))


def pointer(files: Files) -> str:
    return files.read(LAYOUT.pointer, 100).decode().strip()


def moves(files: FaultyFiles) -> list[Operation]:
    """Renames into trash."""
    return [o for o in files.log if o.op == "rename" and "/trash/" in o.other]


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(crash_disk())


@pytest.fixture
def manager(files: FaultyFiles) -> CheckpointManager:
    """It keeps the last two and has saved three; what follows the third is still to be done."""
    found = Machine().boot(files)
    for step in (1, 2):
        save(found, step)
    tidy(found)
    save(found, 3)
    return found


def test_save_returns_before_the_pointer_and_the_rotation(files: FaultyFiles, manager: CheckpointManager) -> None:
    assert steps(files) == [1, 2, 3] and pointer(files) == "step-2" and moves(files) == []
    tidy(manager)
    assert steps(files) == [2, 3] and pointer(files) == "step-3" and len(moves(files)) == 1


@pytest.mark.parametrize("look", [
    lambda m: m.wait(), lambda m: m.close(), lambda m: m.resume(), lambda m: m.all_steps(), lambda m: m.checkpoints(),
    lambda m: save(m, 3, on_exists="skip")], ids=["wait", "close", "resume", "all_steps", "checkpoints", "skip"])
def test_who_looks_next_sees_what_retention_says(files: FaultyFiles, manager: CheckpointManager,
                                                 look: Callable[[CheckpointManager], object]) -> None:
    look(manager)
    assert steps(files) == [2, 3] and pointer(files) == "step-3"


def test_who_leaves_by_an_exception_has_rotated_though_another_has_the_root_open(files: FaultyFiles) -> None:
    machine = Machine()
    one, other = machine.boot(files), machine.boot(files, same=True)
    with pytest.raises(ZeroDivisionError), one:
        for step in (1, 2, 3):
            save(one, step)
        raise ZeroDivisionError
    assert steps(files) == [2, 3]
    other.close()


def test_the_end_lets_go_what_a_reader_held_at_the_last_rotation(files: FaultyFiles, manager: CheckpointManager) -> None:
    """FIELD_CASES B76: no other save comes that would."""
    attempt = parse(files.read(f"{LAYOUT.final('step-1')}/commit.json", 1 << 20)).head.attempt
    held = take(files, LAYOUT, VirtualRuntime(host="reader"), "step-1", attempt, "evaluation", None)
    tidy(manager)
    assert steps(files) == [1, 2, 3]
    held.release()
    manager.close()
    assert steps(files) == [2, 3]


def test_a_forked_child_rotates_nothing(files: FaultyFiles, manager: CheckpointManager) -> None:
    manager._pid += 1
    assert manager.all_steps() == [1, 2, 3] and steps(files) == [1, 2, 3]


def test_the_next_begin_waits_for_it(files: FaultyFiles, manager: CheckpointManager) -> None:
    """The disk holds what retention says, one more, and the one in flight: never two more."""
    before = len(files.log)
    manager._rotated = lambda: None  # type: ignore[method-assign]  # as the finaliser begins, which is not the caller
    save(manager, 4)
    since = files.log[before:]
    moved = next(n for n, o in enumerate(since) if o.op == "rename" and "/trash/" in o.other)
    assert moved < next(n for n, o in enumerate(since) if o.op == "mkdir" and "/staging/" in o.path)


def test_the_rotation_comes_after_the_commit_and_never_after_a_failure(files: FaultyFiles, manager: CheckpointManager) -> None:
    """P3, S12: what was not committed lets nothing go."""
    tidy(manager)
    assert manager._owned is not None
    for fault in (fail(errno.EIO, op="write", path="/step-4/"), fail(errno.EIO, op="fsync_dir", path=lambda p: p == ROOT)):
        files.faults.append(fault)
        with pytest.raises(SaveError):
            save(manager, 4)
        assert fault.fired and manager._owned.afterwards.done()
    moved = len(moves(files))
    tidy(manager)
    assert len([o for o in moves(files)[moved:] if "/step-" in o.path and "/staging/" not in o.path]) == 0


class _WithTool(Blob):
    def write(self, files: RankFiles, ranks: Ranks) -> None:
        super().write(files, ranks)
        with files.writer("tool.py", exact=True) as out:
            out.write(b"a tool")
        files.beside("tool.py")


def test_latest_has_left_what_goes_and_the_tools_are_there_before_anything_goes(
        files: FaultyFiles, manager: CheckpointManager) -> None:
    """A rotation may hang, or the job be killed in it: ``latest`` must not name what is gone by then."""
    tidy(manager)
    before = len(files.log)
    manager.save(4, _WithTool("4"), meta={"text": "4"})
    tidy(manager)
    made = [o.other for o in files.log[before:] if o.op == "rename" and not o.other.endswith("/status.json")]
    assert made[:3] == [LAYOUT.final("step-4"), LAYOUT.pointer, f"{ROOT}/tool.py"] and "/trash/1/step-2." in made[3], made


def test_a_failed_rotation_is_a_warning_and_is_tried_again_after_the_next_save(
        files: FaultyFiles, manager: CheckpointManager, caplog: pytest.LogCaptureFixture) -> None:
    files.faults.append(fail(errno.EBUSY, op="rename", path="step-1"))
    manager.wait()
    assert steps(files) == [1, 2, 3] and "could not rotate step-1 away" in caplog.text
    save(manager, 4)
    manager.wait()
    assert steps(files) == [3, 4]


def test_what_nobody_foresaw_is_told_and_stops_nothing(files: FaultyFiles, manager: CheckpointManager,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    def broken(operation: Operation) -> None:
        raise ZeroDivisionError("mine")

    files.faults.append(call(broken, op="rename", path="latest.tmp"))
    manager.wait()
    assert "ZeroDivisionError: mine" in caplog.text and steps(files) == [1, 2, 3]
    save(manager, 4)
    manager.wait()
    assert steps(files) == [3, 4]


def test_S5_an_overtaken_owner_rotates_nothing_of_what_it_still_owes(files: FaultyFiles) -> None:
    machine = Machine()
    zombie = machine.boot(files)
    for step in (1, 2, 3):
        save(zombie, step)
    machine.boot(files)
    before = files.inner.snapshot()  # type: ignore[attr-defined]
    assert zombie._owned is not None and zombie._owned.afterwards.catch_up()
    assert files.inner.snapshot() == before and len(steps(files)) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("seen", ["before the rotation", "before the deletion had ended"])
def test_begin_counts_the_room_that_the_last_rotation_gives_back(files: FaultyFiles, manager: CheckpointManager, seen: str,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks look at the disk before rank 0 decides, and what rotated away may go in between."""
    runtime, looks = manager._seams.runtime, list[int]()
    assert isinstance(runtime, VirtualRuntime)

    def free(path: str) -> int:
        looks.append(10 if (steps(files) == [1, 2, 3] or files.scan(LAYOUT.trash(1)) or not looks) else 1 << 30)
        return looks[-1]

    runtime.hooks.append(lambda now: runtime.run("janitor", waits=0) and None)
    if seen == "before the deletion had ended":
        tidy(manager)
    monkeypatch.setattr(files, "free", free)
    manager._rotated = lambda: None  # type: ignore[method-assign]
    save(manager, 4)
    assert looks[0] == 10 and len(looks) > 1


def test_begin_refuses_when_there_is_no_room_all_the_same(files: FaultyFiles, manager: CheckpointManager,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free", lambda path: 10)
    with pytest.raises(DiskFull):
        save(manager, 4)
    assert steps(files) == [2, 3]


# -- the thread ------------------------------------------------------------------------------------------------------


def test_one_at_a_time_and_in_order_whoever_does_them() -> None:
    lock = SYSTEM.lock()
    after, inside, order = Afterwards(SYSTEM, lock), threading.Lock(), list[int]()

    def job(number: int) -> None:
        assert inside.acquire(blocking=False), "two at once"
        order.append(number)
        inside.release()

    def add() -> None:
        for _ in range(200):
            with lock:
                after.add(partial(job, next(numbers)))
            after.catch_up()

    numbers = iter(range(10_000))
    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert after.catch_up(LIMIT) and after.done() and order == list(range(800))
    after.stop(LIMIT)


def test_the_thread_does_it_where_nobody_needs_it() -> None:
    after, done, who = Afterwards(SYSTEM, SYSTEM.lock()), threading.Event(), list[str]()

    def job() -> None:
        who.append(threading.current_thread().name)
        done.set()

    after.add(job)
    assert done.wait(LIMIT) and who == ["distckpt-afterwards"]
    after.stop(LIMIT)
    after._thread.join(LIMIT)
    assert not after._thread.is_alive()


def _hanging() -> tuple[FaultyFiles, threading.Event, threading.Event]:
    """Files whose first rotation hangs; what says that it does, and what lets it go on."""
    hangs, go_on = threading.Event(), threading.Event()

    def hang(operation: Operation) -> None:
        hangs.set()
        go_on.wait(3 * LIMIT)

    return FaultyFiles(REAL, call(hang, op="rename", path=lambda path: "/trash/1/step-1." in path)), hangs, go_on


def test_a_rotation_that_hangs_keeps_close_for_its_deadline_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, hangs, go_on = _hanging()
    manager = CheckpointManager(tmp_path / "run", keep_last=1, seams=Seams(files=files), timeouts=Timeouts(close=1))
    for step in (1, 2):
        manager.save(step, {"x": step})
    assert hangs.wait(LIMIT), "the thread does not rotate"
    with caplog.at_level(logging.WARNING):
        manager.close()
    go_on.set()
    assert "its last rotation has not ended within 0.5 s" in caplog.text
    assert steps(REAL, str(tmp_path / "run"))[-1] == 2


def test_a_background_save_is_done_before_its_rotation_and_the_next_one_begins_after_it(tmp_path: Path) -> None:
    files, hangs, go_on = _hanging()
    with CheckpointManager(tmp_path / "run", keep_last=1, seams=Seams(files=files)) as manager:
        for step in (1, 2):
            handle = manager.save(step, {"x": step}, background=True)
        handle.result(LIMIT)
        assert hangs.wait(LIMIT)
        third = manager.save(3, {"x": 3}, background=True)
        assert not third.done() and not files.operations("open", "/step-3/")
        go_on.set()
        third.result(LIMIT)
        assert files.log.index(moves(files)[0]) < files.log.index(files.operations("mkdir", "/step-3")[0])
        manager.wait()
        assert steps(REAL, str(tmp_path / "run")) == [3]


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
def test_deletion_gives_way_to_training_and_nothing_else_does(tmp_path: Path) -> None:
    """The caller's own thread, and the one that moves and syncs, stay as they are: somebody may wait for them."""
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen: dict[str, set[int]] = {"unlink": set(), "rename": set()}
    files = FaultyFiles(REAL, *(call(lambda o: seen[o.op].add(priority()), op=op, path="/trash/1/step-1.", forever=True)
                                for op in seen))
    before = priority()
    with CheckpointManager(tmp_path / "run", keep_last=1, seams=Seams(files=files)) as manager:
        for step in (1, 2):
            with manager.saving(step) as work:
                for number in range(50):
                    Path(work.path, f"{number}.bin").write_bytes(b"x")
        manager.wait()
        assert manager._owned is not None and manager._owned.janitor.wait(LIMIT)
    assert len(files.operations("unlink", "/trash/1/step-1.")) == 51, "the marker and the files"
    assert seen == {"unlink": {max(before, NICE)}, "rename": {before}} and priority() == before
