"""The order of operations, and who may stop them, where no single crash and no error of the disk shows it."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from distckpt import recovery
from distckpt.durable import Files
from distckpt.errors import RootInUse
from distckpt.layout import MARKER, Layout
from distckpt.leases import take
from distckpt.marker import Marker
from distckpt.ordered import write_new
from distckpt.owned import OwnedRoot
from distckpt.retention import KeepLast
from distckpt.rotation import Context
from distckpt.saving.commit import Outcome, commit
from distckpt.testing.clock import VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import Fault, FaultyFiles, Operation, call, fail, refuse
from tests.support import ROOT, STEP, attempt_id, crash_disk, make_checkpoint, make_marker, open_owned, stage_attempt, standing

LAYOUT = Layout.at(ROOT)
PAYLOAD = {"model.pt": b"new weights", "sub/optim.pt": b"new moments"}


@pytest.fixture
def disk() -> CrashFiles:
    return crash_disk()


def acked(disk: CrashFiles, *faults: Fault) -> tuple[FaultyFiles, OwnedRoot, Marker]:
    """A root with step 1 committed, and an attempt at step 1 or 2 whose files every rank has acked."""
    files = FaultyFiles(disk, *faults)
    owned = open_owned(files)
    make_checkpoint(disk, 1, owned.next_seq())
    return files, owned, _staged(disk, owned, 2)


def _staged(disk: Files, owned: OwnedRoot, step: int) -> Marker:
    found = make_marker(step, owned.next_seq(), payload=PAYLOAD)
    inner = owned.make_attempt(found.head.attempt, found.head.name)
    for path, data in PAYLOAD.items():
        write_payload(disk, f"{inner}/{path}", data, False)
    return found


def _during(files: FaultyFiles, work: Callable[[], Outcome]) -> tuple[Outcome, list[Operation]]:
    before = len(files.log)
    outcome = work()
    return outcome, files.log[before:]


def test_a_commit_is_directories_then_marker_then_name_then_parents(disk: CrashFiles) -> None:
    files, owned, found = acked(disk)
    outcome, log = _during(files, lambda: commit(owned, found, replace=False))
    assert outcome.state == "committed"
    outer = LAYOUT.staging(1, found.head.attempt)
    staged = f"{outer}/step-2"
    marker = f"{staged}/{MARKER}"
    assert [(op.op, op.path) for op in log if op.op != "write"][:9] == [
        ("fsync_dir", f"{staged}/sub"), ("fsync_dir", staged), ("open", marker), ("fsync", marker), ("close", marker),
        ("fsync_dir", staged), ("rename", staged), ("fsync_dir", outer), ("fsync_dir", ROOT)]


def test_an_owner_that_was_overtaken_and_is_not_fenced_yet_commits_nothing(disk: CrashFiles) -> None:
    _, owned, found = acked(disk)
    write_new(disk, LAYOUT.owner(2), b"{}\n")
    outcome = commit(owned, found, replace=False)
    assert outcome.state == "aborted" and isinstance(outcome.error, RootInUse)
    assert set(standing(disk)) == {"step-1"}
    assert MARKER not in [item.name for item in disk.scan(LAYOUT.staging(1, found.head.attempt, "step-2"))]


def test_a_replace_of_what_has_gone_meanwhile_publishes(disk: CrashFiles) -> None:
    _, owned, found = acked(disk)
    assert commit(owned, found, replace=True).state == "committed"
    assert standing(disk)["step-2"] == found.head.attempt


@pytest.mark.parametrize("exchange", [True, False])
def test_what_is_leased_before_the_exchange_is_never_moved(disk: CrashFiles, exchange: bool) -> None:
    """Not even for a moment: a cut then would leave the new one published, over what somebody reads."""
    files, owned, _ = acked(disk, *([] if exchange else [refuse()]))
    found = _staged(disk, owned, 1)
    take(disk, LAYOUT, VirtualRuntime(pid=9), "step-1", attempt_id(1), "evaluation", None)
    outcome, log = _during(files, lambda: commit(owned, found, replace=True))
    assert outcome.state == "aborted" and "evaluation" in str(outcome.error)
    assert [op for op in log if op.op in ("exchange", "rename")] == []
    assert standing(disk) == {"step-1": attempt_id(1)}


def test_what_is_leased_at_the_moment_of_the_exchange_comes_back(disk: CrashFiles) -> None:
    def leased(_: Operation) -> None:
        take(disk, LAYOUT, VirtualRuntime(pid=9), "step-1", attempt_id(1), "evaluation", None)

    _, owned, _ = acked(disk, call(leased, op="exchange"))
    outcome = commit(owned, _staged(disk, owned, 1), replace=True)
    assert outcome.state == "aborted" and "evaluation" in str(outcome.error)
    assert standing(disk) == {"step-1": attempt_id(1)}


def _refused(*more: Fault) -> tuple[FaultyFiles, Fault]:
    """Nothing can be exchanged, and the new one cannot get its name, so the old one is put back."""
    staged = fail(errno.EIO, op="rename", path=lambda p: "/staging/" in p and p.endswith("/step-1"))
    return FaultyFiles(crash_disk(), refuse(), staged, *more), staged


def test_what_a_failed_replace_put_back_is_synced() -> None:
    files, refusal = _refused()
    owned = open_owned(files)
    make_checkpoint(files, 1, owned.next_seq())
    found = _staged(files, owned, 1)
    outcome, log = _during(files, lambda: commit(owned, found, replace=True))
    assert outcome.state == "aborted" and refusal.fired
    back = [op.n for op in log if op.op == "rename" and op.other == LAYOUT.final("step-1") and "/trash/" in op.path]
    synced = [op.n for op in log if op.op == "fsync_dir" and op.path == ROOT]
    assert len(back) == 1 and back[0] < synced[-1]
    assert owned.no_rotation is None


def test_when_what_was_put_back_cannot_be_synced_nothing_is_rotated() -> None:
    files, _ = _refused()
    owned = open_owned(files)
    make_checkpoint(files, 1, owned.next_seq())
    found = _staged(files, owned, 1)
    files.faults.append(fail(errno.EIO, 2, op="fsync_dir", path=lambda p: p == ROOT))  # the first is that of the move to trash
    assert commit(owned, found, replace=True).state == "aborted"
    assert owned.no_rotation is not None and "step-1" in owned.no_rotation
    assert standing(files) == {"step-1": attempt_id(1)}


@pytest.mark.parametrize("exchange", [True, False])
def test_after_a_replace_nothing_is_left_that_a_start_would_put_back(exchange: bool) -> None:
    """Once the new one is rotated away, its name is free again."""
    files = FaultyFiles(crash_disk(), *([] if exchange else [refuse()]))
    owned = open_owned(files)
    make_checkpoint(files, 1, owned.next_seq())
    found = _staged(files, owned, 1)
    assert commit(owned, found, replace=True).state == "committed"
    assert [item.name for item in files.scan(LAYOUT.trash(1))] == [f"step-1.{attempt_id(1)}"]
    assert files.scan(LAYOUT.staging(1)) == []


# -- moves back, and what must be durable before anybody relies on them ------------------------------------------------


def _after(log: list[Operation], last: str, *synced: str) -> None:
    """Each of ``synced`` is synced after the last rename to ``last``."""
    moved = max(op.n for op in log if op.op == "rename" and op.other == last)
    done = {op.path for op in log if op.op == "fsync_dir" and op.n > moved}
    assert done >= set(synced), (done, log)


def _leased(disk: CrashFiles) -> None:
    take(disk, LAYOUT, VirtualRuntime(pid=9), "step-1", attempt_id(1), "evaluation", None)


def test_what_recovery_puts_back_is_durable_on_both_sides(disk: CrashFiles) -> None:
    files = FaultyFiles(disk)
    owned = open_owned(files)
    make_checkpoint(disk, 1, directory=LAYOUT.trash(1, f"step-1.{attempt_id(1)}.replaced"))
    before = len(files.log)
    recovery.put_back(owned.files, LAYOUT, 1, recovery.Report())
    assert standing(disk) == {"step-1": attempt_id(1)}
    _after(files.log[before:], LAYOUT.final("step-1"), ROOT, LAYOUT.trash(1))


def test_what_rotation_moves_back_is_durable_on_both_sides(disk: CrashFiles) -> None:
    files = FaultyFiles(disk, call(lambda _: _leased(disk), op="rename", path=LAYOUT.final("step-1")))
    owned = open_owned(files)
    for step in (1, 2, 3):
        make_checkpoint(disk, step, owned.next_seq())
    assert owned.rotate("main", KeepLast(1), Context({}, {})) == ["step-2"]
    _after(files.log, LAYOUT.final("step-1"), ROOT, LAYOUT.trash(1))


def test_what_the_janitor_moves_back_is_durable_on_both_sides(disk: CrashFiles) -> None:
    files = FaultyFiles(disk)
    owned = open_owned(files)
    make_checkpoint(disk, 1, owned.next_seq())
    _leased(disk)
    disk.rename(LAYOUT.final("step-1"), LAYOUT.trash(1, f"step-1.{attempt_id(1)}"))
    owned.janitor.delete(owned.janitor.leftovers())
    owned.runtime.run("janitor")  # type: ignore[attr-defined]
    assert standing(disk) == {"step-1": attempt_id(1)}
    _after(files.log, LAYOUT.final("step-1"), ROOT, LAYOUT.trash(1))


def test_the_janitor_is_idle_only_when_it_has_deleted_what_it_was_given(disk: CrashFiles) -> None:
    owned = open_owned(disk)
    owned.runtime.run("janitor")  # type: ignore[attr-defined]
    assert owned.janitor.wait(0)
    write_payload(disk, LAYOUT.trash(1, "old", "model.pt"), b"old")
    owned.janitor.delete(owned.janitor.leftovers())
    assert not owned.janitor.wait(0)
    owned.runtime.run("janitor")  # type: ignore[attr-defined]
    assert owned.janitor.wait(0) and disk.scan(LAYOUT.trash(1)) == []


def test_an_attempt_is_swept_though_trash_holds_its_name_twice(disk: CrashFiles) -> None:
    """Once from a sweep that was killed after its move, and once from the next one."""
    open_owned(disk, VirtualRuntime(pid=1))
    for place in (LAYOUT.staging(1, attempt_id(7)), LAYOUT.trash(1, attempt_id(7)), LAYOUT.trash(1, f"{attempt_id(7)}.again")):
        write_payload(disk, f"{place}/step-7/model.pt", b"half")
    report = recovery.recover(disk, LAYOUT, STEP, 1)
    assert report.swept == [attempt_id(7)] and disk.scan(LAYOUT.staging(1)) == []


def test_recovery_publishes_before_it_puts_back(disk: CrashFiles) -> None:
    """The old half of a replace whose new one is committed stays in trash; it must not stand again even for a moment."""
    open_owned(disk, VirtualRuntime(pid=1))
    make_checkpoint(disk, 1, 1, directory=LAYOUT.trash(1, f"step-1.{attempt_id(1)}.replaced"))
    stage_attempt(disk, 1, 2)
    report = recovery.recover(disk, LAYOUT, STEP, 1)
    assert (report.published, report.restored) == (["step-1"], [])
    assert standing(disk) == {"step-1": attempt_id(2)}


def test_what_is_relied_on_while_others_go_is_synced_whole(disk: CrashFiles) -> None:
    """An inherited checkpoint: its files, then its marker, then its directories; once."""
    files = FaultyFiles(disk)
    owned = open_owned(files)
    make_checkpoint(disk, 1, owned.next_seq(), durable=False)
    (entry,) = owned.entries()
    before = len(files.log)
    owned.vouch(entry)
    owned.vouch(entry)
    final = LAYOUT.final("step-1")
    assert [(op.op, op.path.removeprefix(final)) for op in files.log[before:]] == [
        ("fsync_file", "/model.pt"), ("fsync_file", "/sub/optim.pt"), ("fsync_file", f"/{MARKER}"), ("fsync_dir", "/sub"),
        ("fsync_dir", "")]
