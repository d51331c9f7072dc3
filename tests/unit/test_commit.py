"""The commit and what surrounds it, when one operation goes wrong: the n-th of a save fails, for every n.

On a disk in memory and on a real directory. Whatever fails: what was committed before still loads, the error says what
the disk said, an fsync that failed is never tried again on the same file, and the next save works.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distckpt import catalog
from distckpt.durable import REAL, Files
from distckpt.errors import ConfigError, DiskFull, SaveError, StepAlreadyExists
from distckpt.layout import MARKER
from distckpt.manager import CheckpointManager
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.faults import Fault, FaultyFiles, Killed, Operation, call, die, fail, refuse
from tests.onerank import Blob, Machine, close, quick_folder, standing, tidy, unclean
from tests.support import ROOT, crash_disk


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
def real(tmp_path: Path) -> Iterator[Lab]:
    with quick_folder(tmp_path) as folder:
        root, original = folder / "run", folder / "original"
        machine = Machine(str(root))
        _first_two(REAL, machine)
        root.rename(original)

        def fresh() -> Files:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(original, root)
            return REAL

        yield Lab(fresh, machine)


def _never_synced_again(files: FaultyFiles, failed: Operation) -> None:
    """A second fsync of a file would report success over pages that the kernel has dropped."""
    for operation in files.log[failed.n:]:
        if operation.path == failed.path and operation.op in ("open", "unlink"):
            return  # another file of that name
        assert not (operation.path == failed.path and operation.op in ("fsync", "fsync_file")), operation


def _one_fails(lab: Lab, fault: Fault, step: int, rule: str, exchange: bool) -> tuple[str, Operation | None]:
    """One operation of a process that starts, saves ``step`` and tidies up fails: (how it ended, that operation)."""
    n, number = fault.at, fault.number
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
@pytest.mark.parametrize("kind, where", [("EIO", "memory"), ("EIO", "real"), ("ENOSPC", "memory"),
                                         ("EIO, but it happened", "memory"), ("EIO, but it happened", "real")])
def test_the_nth_operation_fails_once_and_nothing_that_was_committed_is_lost(
        request: pytest.FixtureRequest, kind: str, where: str, step: int, rule: str, exchange: bool) -> None:
    """The last kind is a lost reply (S14)."""
    lab: Lab = request.getfixturevalue(where)
    ends: dict[str, list[Operation]] = {}
    operation: Operation | None
    for n in itertools.count(1):
        fault = fail(errno.ENOSPC if kind == "ENOSPC" else errno.EIO, n, after="happened" in kind)
        ended, operation = _one_fails(lab, fault, step, rule, exchange)
        if operation is None:
            break
        ends.setdefault(ended, []).append(operation)
    assert n > 80 and len(ends["aborted"]) > 15 and len(ends["no start"]) > 20 and len(ends["done"]) > 5, (n, ends)
    published = ("rename", "exchange")
    assert [o.op for o in ends["unknown"]] == ["fsync_dir", "fsync_dir"], ends["unknown"]
    happened = [o for o in ends["done"] if o.op in published and lab.machine.layout.final(f"step-{step}") in (o.path, o.other)]
    assert bool(happened) == ("happened" in kind), happened


@pytest.mark.parametrize("step, rule, exchange", [(3, "error", True), (2, "replace", True), (2, "replace", False)])
def test_from_the_nth_operation_on_everything_fails_and_the_next_start_finds_the_old_or_the_new(
        memory: Lab, step: int, rule: str, exchange: bool) -> None:
    """A disk that turns read-only, say. Nothing can be cleaned up then; the next process does."""
    outcomes = set()
    for n in itertools.count(1):
        fault = fail(errno.EROFS, n, forever=True)
        files, manager = FaultyFiles(memory.fresh(), fault, *([] if exchange else [refuse()])), None
        committed = False
        try:
            manager = memory.machine.boot(files)
            save(manager, step, "new", on_exists=rule)
            committed = True
        except (ConfigError, SaveError) as error:
            assert os.strerror(errno.EROFS) in str(error)
            outcomes.add(getattr(error, "outcome", "no start"))
        if manager is not None:
            tidy(manager)
            if not fault.fired:
                files.faults.remove(fault)  # the run needed no more operations
            close(manager)
        assert isinstance(files.inner, CrashFiles)
        disk = files.inner.after_kill()
        again = memory.machine.boot(disk)
        resumed = again.resume(verify="digest")
        assert resumed.checkpoint is not None and not resumed.skipped
        new = resumed.checkpoint.meta["text"] == "new"
        assert new or (resumed.checkpoint.step == 2 and not committed)
        wanted = {"step-1": "one", "step-2": "two"} if not new else {f"step-{step}": "new"}
        assert standing(disk, memory.machine.layout).items() >= wanted.items()
        save(again, 9, "nine")
        close(again)
        assert len(memory.standing(disk)) == 2 and not unclean(disk, memory.machine.layout)
        if committed and not fault.fired:
            break
    assert n > 80 and outcomes == {"no start", "aborted", "unknown"}, (n, outcomes)


# -- S2, S13: replacing ---------------------------------------------------------------------------------------------------

def _final(step: int) -> Callable[[str], bool]:
    return lambda path: path == f"{ROOT}/step-{step}"


@pytest.mark.parametrize("exchange", [True, False])
def test_S2_a_kill_at_any_operation_of_a_replace_leaves_the_old_or_the_new(memory: Lab, exchange: bool) -> None:
    """Among them the one between the exchange and its clean-up, when staging holds the old one under a valid marker."""
    ends = []
    for n in itertools.count(1):
        death, done = die(n), False
        files = FaultyFiles(memory.fresh(), death, *([] if exchange else [refuse()]))
        try:
            manager = memory.machine.boot(files)
            save(manager, 2, "again", on_exists="replace")
            done = True
            close(manager)
        except Killed:
            pass
        assert isinstance(files.inner, CrashFiles)
        disk = files.inner.after_kill()
        again = memory.machine.boot(disk)
        resumed = again.resume(verify="digest").checkpoint
        assert resumed is not None and resumed.step == 2
        close(again)
        found = memory.standing(disk)
        assert found in ({"step-1": "one", "step-2": "again"}, {"step-1": "one", "step-2": "two"})
        assert found["step-2"] == "again" or not done
        assert not unclean(disk, memory.machine.layout)
        ends.append(found["step-2"])
        if not death.fired:
            break
    first = ends.index("again")
    assert n > 100 and ends == ["two"] * first + ["again"] * (len(ends) - first), "once committed, it is never swapped back"
    exchanged = next(o.n for o in files.log if o.op == "exchange")
    assert first < exchanged, "it is committed, and recovery publishes it, before the names change"


def test_S13_what_stands_under_the_final_name_is_never_overwritten(memory: Lab) -> None:
    """Somebody puts a directory there between begin and publish; a plain rename refuses to replace what is not empty."""
    def intrude(operation: Operation) -> None:
        disk.mkdir(f"{ROOT}/step-3")
        disk.open(f"{ROOT}/step-3/theirs").close()

    files, manager = memory.boot(call(intrude, op="open", path=lambda p: p.endswith(f"step-3/{MARKER}")))
    disk = files.inner
    with pytest.raises(SaveError, match="not empty") as caught:
        save(manager, 3, "three")
    assert caught.value.outcome == "aborted" and files.fired
    assert [item.name for item in disk.scan(f"{ROOT}/step-3")] == ["theirs"]
    with pytest.raises(StepAlreadyExists, match="adopt"):
        save(manager, 3, "three", on_exists="replace")
    disk.unlink(f"{ROOT}/step-3/theirs")
    save(manager, 3, "three")  # an empty directory under a final name is no checkpoint, and no obstacle
    close(manager)
    assert memory.standing(disk) == {"step-2": "two", "step-3": "three"}


@pytest.mark.parametrize("settled", ["at the next start", "at the end", "at the next begin"])
def test_S13_without_exchange_the_old_one_comes_back_when_the_new_one_cannot_be_published(memory: Lab, settled: str) -> None:
    """Every step between the two renames fails as well, in turn, and so does every step of putting it back."""
    outcomes = []
    for n in itertools.count(1):
        also = fail(errno.EIO, n, path=lambda p: _final(2)(p) or p == ROOT or p.endswith("/trash/2"))
        files, manager = memory.boot(refuse())
        files.faults += [also, fail(errno.ENOSPC, op="rename", path=lambda p: "/staging/" in p and p.endswith("/step-2"))]
        with pytest.raises(SaveError) as caught:
            save(manager, 2, "again", on_exists="replace")
        files.faults.remove(also)
        there, outcome = memory.standing(files), caught.value.outcome
        outcomes.append(outcome)
        assert there == {"step-1": "one", "step-2": "two"} or (outcome == "unknown" and there == {"step-1": "one"}), there
        disk = files.inner
        assert isinstance(disk, CrashFiles)
        if settled == "at the next start":
            disk = disk.after_kill()
        elif settled == "at the next begin":
            save(manager, 3, "three")
        if settled != "at the next start":
            close(manager)
        again = memory.machine.boot(disk)
        found = memory.standing(disk)
        assert found["step-2"] in ("two", "again") if outcome == "unknown" else found["step-2"] == "two", found
        save(again, 4, "four")
        close(again)
        assert len(memory.standing(disk)) == 2 and not unclean(disk, memory.machine.layout)
        if not also.fired:
            break
    assert n > 5 and outcomes[-1] == "aborted" and "unknown" in outcomes, outcomes


@pytest.mark.parametrize("settled", ["at the next start", "at the end"])
def test_S13_what_a_failed_replace_left_in_trash_survives_the_replace_of_another_step(memory: Lab, settled: str) -> None:
    """Step 2 cannot be put back as long as the disk is bad; tidying up after step 1 must not take it for its own leftover."""
    files, manager = memory.boot(refuse())
    disk = files.inner
    stuck = fail(errno.EIO, 2, op="rename", path=_final(2), forever=True)
    files.faults.append(stuck)
    assert _outcome(manager, 2, "again", on_exists="replace") == "unknown"
    save(manager, 1, "one again", on_exists="replace")
    tidy(manager)
    assert stuck.fired > 2 and memory.standing(files) == {"step-1": "one again"}
    files.faults.remove(stuck)
    if settled == "at the end":
        close(manager)
    else:
        assert isinstance(disk, CrashFiles)
        disk = disk.after_kill()
        close(memory.machine.boot(disk))
    assert memory.standing(disk) == {"step-1": "one again", "step-2": "two"}


# -- S3, S12, S14: what cannot be taken back, and what cannot be told ----------------------------------------------------

def _marker(path: str) -> bool:
    return path.endswith(f"/{MARKER}")


def _outcome(manager: CheckpointManager, step: int, text: str, **options: object) -> str:
    with pytest.raises(SaveError) as caught:
        save(manager, step, text, **options)
    return caught.value.outcome


def test_S3_an_abort_takes_the_marker_back_durably_before_anybody_hears_of_it(memory: Lab) -> None:
    files, manager = memory.boot(fail(errno.EIO, op="rename", path=_final(3)))
    seen: list[str] = []
    committer = manager._committer
    assert committer is not None
    announced = committer.aborted
    committer.aborted = lambda *args, **more: (seen.extend(map(str, files.log)), announced(*args, **more))  # type: ignore
    assert _outcome(manager, 3, "three") == "aborted" and files.fired
    published = next(i for i, line in enumerate(seen) if line.endswith(f"-> {ROOT}/step-3"))
    assert [line.split(" ")[1] for line in seen[published + 1:]] == ["unlink", "fsync_dir"]
    assert seen[-1].endswith("/step-3") and seen[-2].endswith(f"/{MARKER}"), "before it is announced and moved away"


@pytest.mark.parametrize("op", ["unlink", "fsync_dir"])
@pytest.mark.parametrize("after", ["the next save", "the next start"])
def test_S3_a_marker_that_cannot_be_taken_back_is_an_unknown_outcome(memory: Lab, op: str, after: str) -> None:
    """The next save sweeps it, or the next start publishes it; it never comes back over a newer one."""
    withdrawal = fail(errno.EIO, 1 if op == "unlink" else 3, op=op,
                      path=lambda p: _marker(p) if op == "unlink" else "/staging/" in p and p.endswith("/step-3"))
    files, manager = memory.boot(fail(errno.EIO, op="rename", path=_final(3)))
    files.faults.append(withdrawal)
    if op == "fsync_dir":  # the ranks' own, the tree's, the marker's, then this one
        withdrawal.at = 4
    assert _outcome(manager, 3, "three") == "unknown" and files.fired, [str(o) for o in files.log]
    assert memory.standing(files) == {"step-1": "one", "step-2": "two"}
    if after == "the next save":
        save(manager, 3, "three again")
        close(manager)
    assert isinstance(files.inner, CrashFiles)
    again = memory.machine.boot(disk := files.inner.after_kill())
    resumed = again.resume(verify="digest").checkpoint
    assert resumed is not None
    published = "three again" if after == "the next save" else "three" if op == "unlink" else "two"
    assert resumed.meta["text"] == published
    save(again, 4, "four")
    close(again)
    assert not unclean(disk, memory.machine.layout)


@pytest.mark.parametrize("which", ["the attempt's directory", "the root"])
def test_S12_what_is_in_doubt_does_not_count_and_a_new_save_of_its_step_replaces_it(memory: Lab, which: str) -> None:
    parent = fail(errno.EIO, op="fsync_dir", path=lambda p: re.search("/staging/2/[0-9a-f]{16}$", p) is not None, at=2)
    if which == "the root":
        parent = fail(errno.EIO, 2, op="fsync_dir", path=lambda p: p == ROOT)  # the first is at the start
    files, manager = memory.boot(parent)
    with pytest.raises(SaveError, match="outcome is unknown") as caught:
        save(manager, 3, "doubtful")
    assert caught.value.outcome == "unknown" and files.fired
    assert memory.standing(files) == {"step-1": "one", "step-2": "two", "step-3": "doubtful"}, "not removed, nothing rotated"
    assert catalog.read_pointer(files, memory.machine.layout) == "step-2", "the pointer does not move to it"
    resumed = manager.resume()
    assert resumed.checkpoint is not None and resumed.checkpoint.step == 2 and "unknown" in resumed.skipped["step-3"]
    skipped = manager.save(3, Blob("sure"), meta={"text": "sure"}, on_exists="skip")
    assert not skipped.skipped, "skip is not satisfied by it"
    save(manager, 4, "four")
    close(manager)
    assert memory.standing(files) == {"step-1": "one", "step-2": "two", "step-3": "sure", "step-4": "four"}, \
        "this process rotates nothing any more"
    again = memory.machine.boot(files.inner)
    save(again, 5, "five")
    close(again)
    assert memory.standing(files) == {"step-4": "four", "step-5": "five"}


def test_S12_at_the_next_start_what_was_in_doubt_is_made_durable_and_counts(memory: Lab) -> None:
    files, manager = memory.boot(fail(errno.EIO, 2, op="fsync_dir", path=lambda p: p == ROOT))
    assert _outcome(manager, 3, "doubtful") == "unknown"
    assert isinstance(files.inner, CrashFiles)
    for disk in files.inner.crash_states(60):
        again = memory.machine.boot(disk)
        resumed = again.resume(verify="digest").checkpoint
        assert resumed is not None and resumed.meta["text"] in ("two", "doubtful")
        save(again, 4, "four")
        close(again)
        assert memory.standing(disk) == {f"step-{resumed.step}": resumed.meta["text"], "step-4": "four"}


def test_S14_a_publishing_rename_whose_fate_cannot_be_told_is_an_unknown_outcome(memory: Lab) -> None:
    files, manager = memory.boot(fail(errno.EIO, op="rename", path=_final(3), after=True))
    blind = fail(errno.EIO, op="read", path=_marker, forever=True)
    files.faults.append(call(lambda operation: files.faults.append(blind), op="rename", path=_final(3), after=True))
    files.faults.reverse()
    assert _outcome(manager, 3, "three") == "unknown" and blind.fired
    files.faults.remove(blind)
    resumed = manager.resume()
    assert resumed.checkpoint is not None and resumed.checkpoint.step == 2, "it does not count in this process"
    save(manager, 3, "three again")
    close(manager)
    assert memory.standing(files)["step-3"] == "three again"


def test_S11_a_seq_is_never_given_twice_whatever_became_of_it(memory: Lab) -> None:
    files, manager = memory.boot()
    given = []
    for step, fault in ((3, fail(errno.EIO, op="rename", path=_final(3))), (4, fail(errno.EIO, op="write", path="/step-4/")),
                        (5, None), (6, fail(errno.EIO, op="fsync_dir", path=lambda p: p == ROOT)), (6, None)):
        if fault is not None:
            files.faults.append(fault)
            _outcome(manager, step, "fails")
        else:
            save(manager, step, "works")
            tidy(manager)  # the next fault is for the commit, not for the pointer
        assert manager._owned is not None
        given.append(manager._owned.highest_seq)
    assert given == [3, 4, 5, 6, 7]
    seqs = {e.name: e.head.seq for e in manager._owned.entries() if e.head is not None}
    assert seqs == {"step-2": 2, "step-5": 5, "step-6": 7}
    close(manager)
    again = memory.machine.boot(files.inner)
    save(again, 7, "seven")
    assert again._owned is not None and again._owned.highest_seq == 8


def test_an_fsync_that_failed_is_never_retried_into_success(memory: Lab) -> None:
    """The disk drops the bytes and reports success the second time, as ext4, XFS and Btrfs do."""
    files, manager = memory.boot()
    disk = files.inner
    assert isinstance(disk, CrashFiles)
    files.faults.append(call(lambda o: disk.poison(o.path), op="fsync", path="/step-3/model"))
    assert _outcome(manager, 3, "three") == "aborted" and files.fired
    save(manager, 3, "three again")
    close(manager)
    for state in disk.crash_states(60):
        again = memory.machine.boot(state)
        resumed = again.resume(verify="digest").checkpoint
        assert resumed is not None and resumed.meta["text"] == "three again"
