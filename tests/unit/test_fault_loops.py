"""Operation 1, 2, 3 ... of a start and of a rotation fails, until a run needs no fault: nothing that loads is ever lost."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from distckpt import catalog
from distckpt.durable import Files
from distckpt.errors import ConfigError
from distckpt.layout import MARKER, Layout
from distckpt.recovery import REPLACED, recover
from distckpt.retention import KeepLast
from distckpt.rotation import Context
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.faults import READS, WRITES, FaultyFiles, fail
from tests.support import (
    ROOT,
    STEP,
    attempt_id,
    crash_disk,
    left_by_a_dead_owner,
    make_checkpoint,
    open_owned,
    reopen,
    stage_attempt,
    standing,
)

LAYOUT = Layout.at(ROOT)


def loadable(files: Files) -> list[int]:
    """Steps that load, newest commit first; a committed name that does not load is an error."""
    found = []
    for entry in catalog.scan(files, LAYOUT, STEP):
        assert entry.committed, entry
        whole = catalog.read_marker(files, LAYOUT.final(entry.name))
        assert catalog.check_files(files, LAYOUT.final(entry.name), whole.files, digest=True) == [], entry
        found.append(entry.step)
    return found


def left(clock: VirtualClock) -> CrashFiles:
    """A dead owner's root: two commits, a commit that is not published, a replace under way, and half an attempt."""
    disk = crash_disk()
    runtime = VirtualRuntime(clock, pid=1)
    open_owned(disk, runtime)
    runtime.die()
    for step, seq in ((1, 1), (2, 2)):
        make_checkpoint(disk, step, seq)
    stage_attempt(disk, 2, 3)
    stage_attempt(disk, 3, 4)
    disk.mkdir(LAYOUT.staging(1, attempt_id(9)))
    return disk


@pytest.mark.parametrize(("ops", "forever", "exchange"), [
    (WRITES, False, True), (WRITES, False, False), (WRITES, True, True), (READS, False, True), (READS, True, False)])
def test_a_start_that_fails_at_any_operation_loses_nothing(ops: tuple[str, ...], forever: bool, exchange: bool) -> None:
    clock = VirtualClock()
    for n in range(1, 400):
        disk = left(clock)
        disk.exchange_supported = exchange
        files = FaultyFiles(disk, fail(errno.EIO, n, op=ops, forever=forever))
        second = VirtualRuntime(clock, pid=2)
        with suppress(OSError, ConfigError):
            assert open_owned(files, second).highest_seq == 4, n
        second.die()
        for state in [disk, *disk.crash_states(limit=3)]:
            open_owned(state, VirtualRuntime(clock, host="other", boot="other"))
            assert loadable(state) == [3, 2, 1], (n, files.log[-1:], files.reads[-1:])
            assert catalog.read_marker(state, LAYOUT.final("step-2")).head.seq == 3
        if not files.fired:
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize(("ops", "number"), [(WRITES, errno.EIO), (WRITES, errno.ENOSPC), (READS, errno.ESTALE)])
def test_a_rotation_that_fails_at_any_operation_warns_and_loses_no_survivor(ops: tuple[str, ...], number: int) -> None:
    for n in range(1, 400):
        disk = crash_disk()
        one = open_owned(disk)
        for step in (1, 2, 3, 4):
            make_checkpoint(disk, step, one.next_seq())
        files = FaultyFiles(disk, fail(number, n, op=ops))
        one.files = one.janitor._files = one.watch._files = files
        one.rotate("main", KeepLast(2), Context({}, {}))
        one.runtime.run("janitor", waits=3)  # type: ignore[attr-defined]
        for state in [disk, *disk.crash_states(limit=4)]:
            assert loadable(state)[:2] == [4, 3], n
        if not files.fired:
            assert n > 5 and loadable(disk) == [4, 3]
            return
    raise AssertionError("it never ended")


# -- S23: cannot tell is not bad ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "path"), [("stat", "sub/optim.pt"), ("read", f"step-2/{MARKER}"), ("scan", attempt_id(2))])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_S23_an_attempt_that_cannot_be_read_is_never_swept(op: str, path: str, number: int) -> None:
    disk = left_by_a_dead_owner((1, 1))
    stage_attempt(disk, 2, 2)
    files = FaultyFiles(disk, fail(number, op=op, path=path, forever=True))
    with pytest.raises(OSError):
        recover(files, LAYOUT, STEP, 1)
    with pytest.raises(OSError):
        reopen(files)
    reopen(disk, pid=3)
    assert files.fired and standing(disk) == {"step-1": attempt_id(1), "step-2": attempt_id(2)}


@pytest.mark.parametrize("path", [LAYOUT.final("step-2") + f"/{MARKER}", LAYOUT.trash(2, "step-9.x", MARKER)])
def test_S23_a_published_marker_that_cannot_be_read_may_be_the_newest(path: str) -> None:
    """Else a seq would be given twice, and an older attempt exchanged for it, with the newer one swept."""
    disk = left_by_a_dead_owner((1, 1), (2, 5))
    make_checkpoint(disk, 9, 9, directory=LAYOUT.trash(1, "step-9.x"))
    stage_attempt(disk, 2, 4)
    refused = 0
    for at in range(1, 9):  # the first look fails, or the second, ...
        files = FaultyFiles(disk.after_kill(), fail(errno.EIO, at, op="read", path=path))
        try:
            assert reopen(files).highest_seq == 9
        except OSError:
            refused += 1
        reopen(files.inner, pid=3)
        assert standing(files.inner)["step-2"] == attempt_id(5)
    assert refused >= 1


@pytest.mark.parametrize(("op", "path"), [("stat", "model.pt"), ("read", MARKER)])
def test_S23_an_old_half_that_cannot_be_read_is_never_deleted(op: str, path: str) -> None:
    disk = left_by_a_dead_owner()
    make_checkpoint(disk, 7, 1, directory=LAYOUT.trash(1, f"step-7.{attempt_id(1)}{REPLACED}"))
    files = FaultyFiles(disk, fail(errno.EIO, op=op, path=path, forever=True))
    with pytest.raises(OSError):
        recover(files, LAYOUT, STEP, 1)
    with pytest.raises(OSError):
        reopen(files)
    reopen(disk, pid=3)
    assert files.fired and standing(disk) == {"step-7": attempt_id(1)}
