"""The commit and what surrounds it, when one operation goes wrong: the n-th of a save fails, for every n.

On a disk in memory and on a real directory. Whatever fails: what was committed before still loads, the error says what
the disk said, an fsync that failed is never tried again on the same file, and the next save works.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.onerank import Blob, Machine, close, marker_of, standing, tidy, unclean
from tests.support import ROOT, crash_disk

from distckpt import catalog
from distckpt.durable import REAL, Files
from distckpt.errors import ConfigError, DiskFull, SaveError
from distckpt.manager import CheckpointManager
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.faults import Fault, FaultyFiles, Killed, Operation, die, fail, refuse


@dataclass
class Lab:
    """A root with steps 1 and 2, made anew for every try."""

    fresh: Callable[[], Files]
    machine: Machine

    def boot(self, *faults: Fault, **options: object) -> tuple[FaultyFiles, CheckpointManager]:
        files = FaultyFiles(self.fresh(), *faults)
        return files, self.machine.boot(files, **options)

    def standing(self, files: Files) -> dict[str, str]:
        return standing(files, self.machine.layout)


def save(manager: CheckpointManager, step: int, text: str, **options: object) -> None:
    manager.save(step, Blob(text), meta={"text": text}, **options)


def _first_two(files: Files, machine: Machine) -> None:
    manager = machine.boot(files)
    save(manager, 1, "one")
    save(manager, 2, "two")
    close(manager)


@pytest.fixture
def memory() -> Lab:
    disk, machine = crash_disk(), Machine()
    _first_two(disk, machine)
    return Lab(disk.after_kill, machine)


@pytest.fixture
def real(tmp_path: Path) -> Lab:
    root, original = tmp_path / "run", tmp_path / "original"
    machine = Machine(str(root))
    _first_two(REAL, machine)
    root.rename(original)

    def fresh() -> Files:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(original, root)
        return REAL

    return Lab(fresh, machine)


@pytest.fixture(params=["memory", "real"])
def lab(request: pytest.FixtureRequest) -> Lab:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Lab)
    return found


def _never_synced_again(files: FaultyFiles, failed: Operation) -> None:
    """A second fsync of a file would report success over pages that the kernel has dropped."""
    for operation in files.log[failed.n:]:
        if operation.path == failed.path and operation.op in ("open", "unlink"):
            return  # another file of that name
        assert not (operation.path == failed.path and operation.op in ("fsync", "fsync_file")), operation


def _one_fails(lab: Lab, number: int, n: int, step: int, rule: str, exchange: bool) -> tuple[str, Operation | None]:
    """The ``n``-th operation of a process that starts, saves ``step`` and tidies up fails: (how it ended, that operation)."""
    fault = fail(number, n)
    disk = lab.fresh()
    files = FaultyFiles(disk, fault, *([] if exchange else [refuse()]))
    before = lab.standing(disk)
    ended = "done"
    try:
        manager = lab.machine.boot(files)
    except ConfigError as error:
        assert fault.fired and os.strerror(number) in str(error), error
        ended = "no start"
        manager = lab.machine.boot(files, same=True)  # and once more, in the same process: nothing is in its way
    new = {f"step-{step}": "new"}
    if not fault.fired or ended == "no start":
        try:
            save(manager, step, "new", on_exists=rule)
        except SaveError as error:
            assert fault.fired and error.failures[0].type, error
            assert os.strerror(number) in str(error) and os.strerror(number) in error.failures[0].message
            assert (type(error) is DiskFull) == (number == errno.ENOSPC), error
            ended = error.outcome
            there = lab.standing(files)
            assert there.items() >= before.items() if ended == "aborted" else there.items() >= {"step-1": "one"}.items()
            assert ended == "unknown" or there == before
            tidy(manager)
            assert ended == "unknown" or not unclean(disk, lab.machine.layout), unclean(disk, lab.machine.layout)
            assert lab.standing(files) == there
            save(manager, step, "new", on_exists=rule)  # the next save of the same step works, and no wish is needed for it
    elif fault.fired:
        ended = "start went on"
        save(manager, step, "new", on_exists=rule)
    there = lab.standing(files)
    assert there.items() >= new.items() and len(there) >= 2, there
    tidy(manager)
    fault.at = 0  # one that has not fired by now never will
    save(manager, 9, "nine")  # a save of another step works too, and rotation goes on
    stopped = manager._owned is not None and manager._owned.no_rotation is not None
    close(manager)
    failed = files.log[n - 1] if fault.fired else None
    if failed is not None:
        _never_synced_again(files, failed)
    # S12, S8: after a directory of the root, or a survivor, could not be synced, this process rotates nothing any more
    assert stopped if ended == "unknown" else not stopped or (failed is not None and "/step-2" in failed.path), failed
    assert lab.standing(disk) == {**(before if stopped else {}), **new, "step-9": "nine"}
    again = lab.machine.boot(disk)
    resumed = again.resume(verify="digest")
    assert resumed.checkpoint is not None and resumed.checkpoint.step == 9 and not resumed.skipped
    save(again, 10, "ten")
    close(again)
    assert lab.standing(disk) == {"step-9": "nine", "step-10": "ten"}
    assert not unclean(disk, lab.machine.layout), unclean(disk, lab.machine.layout)
    return ended, failed


@pytest.mark.parametrize("step, rule, exchange", [(3, "error", True), (2, "replace", True), (2, "replace", False)])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_the_nth_operation_fails_once_and_nothing_that_was_committed_is_lost(
        lab: Lab, number: int, step: int, rule: str, exchange: bool) -> None:
    ends: dict[str, int] = {}
    n = 0
    while True:
        n += 1
        ended, operation = _one_fails(lab, number, n, step, rule, exchange)
        if operation is None:
            break
        print(n, ended, operation)
        ends[ended] = ends.get(ended, 0) + 1
    assert n > 80 and ends["aborted"] > 15 and ends["no start"] > 20 and ends["done"] > 5, (n, ends)
    assert ends["unknown"] == 2, ends
