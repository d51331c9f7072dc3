"""Who decides a save, and what every rank is told: S4, S12, S14, S21, with threads as ranks and hooks at exact operations."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import distckpt
from distckpt import catalog
from distckpt.durable import REAL
from distckpt.errors import RankTimeout, SaveError
from distckpt.layout import Layout
from distckpt.options import Timeouts
from distckpt.testing.faults import FaultyFiles, Operation, call, fail
from tests.inprocess import Job, await_, events, holds, same_error, staged, tree, values, write

HASTY = Timeouts(arrive=10, progress=1.2, visible=2, close=10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def try_to_abort(job: Job, operation: Operation) -> Any:
    """What rank 1 does when it fails: take the decision for *aborted*. Gives what stands there afterwards."""
    attempt = next(part for part in operation.path.split("/") if len(part) == 16)
    key = f"call/{job.managers[1]._group.rounds._number}/{attempt}/decision"
    failure = {"rank": 1, "type": "OSError", "message": "late", "host": "host-a", "pid": 1, "phase": "write"}
    return job.threads.source().claim(key, {"aborted": failure})


def test_S4_an_abort_after_rank_0_fixed_committing_is_too_late_and_all_ranks_commit(root: Path) -> None:
    """Rank 0 takes the decision by compare-and-set before it writes the marker; from then on nobody can abort."""
    files, seen = FaultyFiles(REAL), []
    job = Job(root, 3, files={0: files})
    job.start()
    files.faults.append(call(lambda op: seen.append(try_to_abort(job, op)), op="open", path="commit.json"))
    values(job.each(lambda m: write(m, 1)))
    assert seen == [{"committing": True}]
    assert holds(root, 1, 3)
    job.finish()


def test_S4_an_abort_before_rank_0_decides_aborts_on_every_rank(root: Path) -> None:
    """Every ack is in, and the marker is not begun: the abort wins, and no marker is ever written."""
    files, seen = FaultyFiles(REAL), []
    job = Job(root, 3, files={0: files})
    job.start()
    values(job.each(lambda m: write(m, 1)))
    before, markers = tree(root), len(files.operations("open", "commit.json"))
    files.faults.append(call(lambda op: seen.append(try_to_abort(job, op)), op="stat", path="step-2/data.rank-00001"))
    for error in same_error(job.each(lambda m: write(m, 2)), SaveError):
        assert error.outcome == "aborted" and list(error.failures) == [1] and error.failures[1].message == "late"
    assert len(seen) == 1 and "aborted" in seen[0]
    assert len(files.operations("open", "commit.json")) == markers
    assert tree(root) == before and staged(root) == []
    values(job.each(lambda m: write(m, 2)))
    assert holds(root, 2, 3)
    job.finish()


def test_a_root_that_rank_0_can_read_no_more_is_one_error_on_every_rank(root: Path) -> None:
    """The look for a newer owner, after the first error, fails as well: rank 0 spoke of that one, and the others of another."""
    files = FaultyFiles(REAL)
    job = Job(root, 2, files={0: files})
    job.start()
    values(job.each(lambda m: write(m, 1)))
    files.faults.append(fail(errno.EMFILE, op=("scan", "stat", "read"), forever=True))
    for error in same_error(job.each(lambda m: write(m, 2)), SaveError):
        assert error.outcome == "aborted" and list(error.failures) == [0] and "Too many open files" in str(error)
    files.faults.clear()
    values(job.each(lambda m: write(m, 2)))
    assert holds(root, 2, 2)
    job.finish()


@pytest.mark.parametrize("where", ["undecided", "committing"])
def test_S4_a_waiters_deadline_ends_in_unknown_and_never_aborts(root: Path, where: str) -> None:
    """Rank 0 stands still before (or after) it fixed the decision; rank 1's deadline passes; rank 0 commits all the same."""
    go_on, stuck = threading.Event(), threading.Event()

    def stand(operation: Operation) -> None:
        stuck.set()
        assert go_on.wait(20)

    files = FaultyFiles(REAL)
    job = Job(root, 3, files={0: files}, timeouts=HASTY)
    job.start()
    point = {"undecided": ("stat", "step-1/data.rank-00001"), "committing": ("open", "commit.json")}[where]
    files.faults.append(call(stand, op=point[0], path=point[1]))

    def save(manager: distckpt.CheckpointManager) -> None:
        try:
            write(manager, 1)
        finally:
            gave_up.append(manager.rank)
            if len(gave_up) == 2:
                go_on.set()

    gave_up: list[int] = []
    outcomes = job.each(save)
    assert stuck.is_set() and outcomes[0].ok, outcomes[0].error
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, RankTimeout) and list(outcome.error.missing) == [0], outcome.error
        assert "outcome is unknown" in str(outcome.error)
    assert holds(root, 1, 3)
    assert [h.skipped for h in values(job.each(lambda m: m.save(1, {"x": 1}, on_exists="skip")))] == [True] * 3
    job.finish()


def test_S12_a_parent_fsync_that_failed_is_unknown_on_every_rank_and_nothing_follows_from_it(root: Path) -> None:
    """No pointer, no rotation, no ``skip``; a new save of the step replaces it; only a restart rotates again."""
    files = FaultyFiles(REAL)
    job = Job(root, 2, files={0: files}, keep_last=1)
    job.start()
    values(job.each(lambda m: write(m, 1, "one")))
    fault = fail(errno.EIO, op="fsync_dir", path=lambda path: path == str(root))
    files.faults.append(fault)
    for error in same_error(job.each(lambda m: write(m, 2, "doubt")), SaveError):
        assert error.outcome == "unknown" and list(error.failures) == [0] and error.failures[0].type == "OSError"
        assert "outcome is unknown" in str(error)
    assert fault.fired and Path(root, "latest").read_text() == "step-1\n"
    assert holds(root, 1, 2, "one")
    resumed = values(job.each(lambda m: m.resume()))
    assert [r.step for r in resumed] == [1, 1] and "unknown" in resumed[0].skipped["step-2"]

    values(job.each(lambda m: write(m, 2, "again", on_exists="skip")))
    assert holds(root, 2, 2, "again"), "skip was satisfied by an attempt in doubt"
    assert holds(root, 1, 2, "one"), "rotated in a process whose root directory could not be synced"
    job.crash()

    second = Job(root, 2, keep_last=1)
    second.start()
    assert [r.step for r in values(second.each(lambda m: m.resume()))] == [2, 2]
    values(second.each(lambda m: write(m, 3)))
    second.finish()
    assert sorted(p.name for p in root.glob("step-*")) == ["step-3"]


def test_S12_a_restart_counts_what_was_in_doubt(root: Path) -> None:
    files = FaultyFiles(REAL)
    job = Job(root, 2, files={0: files})
    job.start()
    values(job.each(lambda m: write(m, 1)))
    files.faults.append(fail(errno.EIO, op="fsync_dir", path=lambda path: path == str(root)))
    same_error(job.each(lambda m: write(m, 2, "doubt")), SaveError)
    job.crash()
    second = Job(root, 2)
    assert [r.step for r in values(second.run(lambda m: m.resume()))] == [2, 2]
    assert holds(root, 2, 2, "doubt")


def test_S14_a_publishing_rename_whose_reply_was_lost_is_a_commit(root: Path) -> None:
    files = FaultyFiles(REAL)
    job = Job(root, 2, files={0: files})
    job.start()
    fault = fail(errno.EIO, op="rename", path=lambda path: path == str(root / "step-1"), after=True)
    files.faults.append(fault)
    values(job.each(lambda m: write(m, 1)))
    assert fault.fired and holds(root, 1, 2) and staged(root) == []
    job.finish()


def test_S14_a_publishing_rename_that_did_not_happen_aborts_everywhere_without_a_marker(root: Path) -> None:
    """The marker goes first, durably, and is then announced as aborted; a crash right after finds nothing to roll forward."""
    files = FaultyFiles(REAL)
    job = Job(root, 2, files={0: files})
    job.start()
    values(job.each(lambda m: write(m, 1)))
    before = tree(root)
    files.faults.append(fail(errno.EIO, op="rename", path=lambda path: path == str(root / "step-2")))
    assert all(e.outcome == "aborted" for e in same_error(job.each(lambda m: write(m, 2)), SaveError))
    unlinked = files.operations("unlink", "step-2/commit.json")[0]
    synced = [o.n for o in files.operations("fsync_dir", "step-2") if o.n > unlinked.n]
    moved = [o.n for o in files.operations("rename", "/trash/") if o.n > unlinked.n]
    assert synced and moved and synced[0] < moved[0]
    assert tree(root) == before
    values(job.each(lambda m: write(m, 2)))
    job.finish()


def test_S14_when_neither_side_can_be_read_after_the_error_the_outcome_is_unknown(root: Path) -> None:
    files = FaultyFiles(REAL)
    job = Job(root, 2, files={0: files})
    job.start()

    def blind(operation: Operation) -> None:
        files.faults.append(fail(errno.EIO, 1, op="read", path="commit.json", forever=True))
        raise OSError(errno.EIO, "lost", operation.path)

    files.faults.append(call(blind, op="rename", path=lambda path: path == str(root / "step-1"), after=True))
    for error in same_error(job.each(lambda m: write(m, 1)), SaveError):
        assert error.outcome == "unknown"
    files.faults.clear()
    values(job.each(lambda m: write(m, 1, "again")))
    assert holds(root, 1, 2, "again")
    job.finish()


def test_S21_an_attempt_that_not_all_ranks_left_is_swept_by_the_next_begin_and_not_before(root: Path) -> None:
    """Rank 1 still writes when the others time out: its files stay until it has answered; then the space comes back."""
    job = Job(root, 2, timeouts=HASTY)
    job.start()
    go_on = threading.Event()

    def slow(manager: distckpt.CheckpointManager) -> list[str]:
        with manager.saving(1) as files:
            path = files.mine("a.bin")
            Path(path).write_bytes(b"x" * 1000)
            if manager.rank == 1:
                assert go_on.wait(20)
                assert os.path.exists(path), "swept under a rank that was still writing"
        return []

    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.extend(job.each(slow)))
    thread.start()
    await_(lambda: events(root, "aborted"))
    assert len(staged(root)) == 1
    go_on.set()
    thread.join(20)
    same_error(outcomes, RankTimeout)
    values(job.each(lambda m: write(m, 2)))
    assert staged(root) == []
    job.finish()


def test_S21_a_late_thread_cannot_bring_a_removed_attempt_back(root: Path) -> None:
    """Its parents are never made on the way, so whatever it still tries gets ENOENT."""
    job = Job(root, 2)
    job.start()
    kept: list[Any] = []

    def failing(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as files:
            files.writer("sub/a.bin").close()
            if manager.rank == 1:
                kept.append(files)
                raise ValueError("no")

    same_error(job.each(failing), SaveError)
    assert staged(root) == []
    for late in (lambda: kept[0].writer("sub/b.bin"), lambda: kept[0].mine("other/c.bin"),
                 lambda: Path(kept[0].path, "d.bin").write_bytes(b"x")):
        with pytest.raises(FileNotFoundError):
            late()
    assert staged(root) == []
    values(job.each(lambda m: write(m, 1)))
    assert staged(root) == [] and holds(root, 1, 2)
    job.finish()


def test_S21_both_parents_are_synced_between_the_move_to_trash_and_the_first_unlink(root: Path) -> None:
    files = FaultyFiles(REAL)
    job = Job(root, 2, files={0: files})
    job.start()

    def failing(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as mine:
            mine.writer("a.bin").close()
            if manager.rank == 1:
                raise ValueError("no")

    same_error(job.each(failing), SaveError)
    job.finish()
    generation = str(root / ".distckpt")
    moved = next(o.n for o in files.log if o.op == "rename" and "/staging/" in o.path and "/trash/" in o.other)
    unlinked = next(o.n for o in files.log if o.op == "unlink" and "/trash/" in o.path and o.n > moved)
    synced = {o.path for o in files.log if o.op == "fsync_dir" and moved < o.n < unlinked}
    assert {f"{generation}/trash/1", f"{generation}/staging/1"} <= synced


def test_S21_an_attempt_whose_begin_failed_or_came_too_late_is_swept(root: Path) -> None:
    """Rank 0 made the staging directory but nobody heard of it; the next begin must not take it for a live one."""
    files = FaultyFiles(REAL)
    job = Job(root, 2, files={0: files}, timeouts=Timeouts(arrive=0.6, progress=5, visible=2, close=10))
    job.start()
    files.faults.append(fail(errno.ENOSPC, op="mkdir", path=lambda path: path.endswith("/step-1")))
    assert all(e.failures[0].disk_full for e in same_error(job.each(lambda m: write(m, 1)), SaveError))
    values(job.each(lambda m: write(m, 2)))
    assert staged(root) == []

    gave_up = threading.Event()
    files.faults.append(call(lambda op: gave_up.wait(20), op="mkdir", path=lambda path: path.endswith("/step-3")))

    def save(manager: distckpt.CheckpointManager) -> None:
        try:
            write(manager, 3)
        finally:
            if manager.rank == 1:
                gave_up.set()

    same_error(job.each(save), RankTimeout)
    assert len(staged(root)) == 1
    values(job.each(lambda m: write(m, 4)))
    assert staged(root) == []
    job.finish()


def test_an_attempt_makes_its_directory_once_and_leaves_the_root_as_the_layout_says(root: Path) -> None:
    job = Job(root, 2)
    values(job.run(lambda m: write(m, 1)))
    found = catalog.read_marker(REAL, Layout.at(root).final("step-1"))
    assert [(e.path, e.rank) for e in found.files] == [("data.rank-00000-of-00002.bin", 0), ("data.rank-00001-of-00002.bin", 1)]
    assert found.world == 2 and found.head.seq == 1 and found.head.generation == 1
    assert [e["event"] for e in events(root, "committed")] == ["committed"]


def test_P4_causes_that_come_right_after_the_first_are_told_too(root: Path) -> None:
    """Rank 0 leaves the others a short grace when it sees the first abort: rank 2 fails only then."""
    job = Job(root, 3)
    job.start()
    pulse = job.managers[0]._group.pulse

    def seen() -> bool:
        """Rank 0's pulse has seen the abort, and perhaps ended the wait for it already."""
        watch = pulse._watch
        return aborted.is_set() and (watch is None or watch.seen_abort is not None)

    aborted = threading.Event()

    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as files:
            files.writer("a.bin").close()
            if manager.rank == 1:
                raise ValueError("first")
            if manager.rank == 2:
                await_(lambda: pulse._watch is not None and pulse._watch.abort is not None)
                await_(files._aborted)
                aborted.set()
                await_(seen)
                raise OSError("second")

    for error in same_error(job.each(save), SaveError):
        assert {r: f.message for r, f in error.failures.items()} == {1: "first", 2: "second"}
    job.finish()


def test_P3_every_rank_has_the_verdict_before_anything_is_rotated(root: Path) -> None:
    """A rank 0 that dies while it rotates leaves nobody in doubt about what is committed."""
    told, seen = threading.Event(), list[bool]()

    def rotates(_: Operation) -> None:
        seen.append(told.wait(20))

    files = FaultyFiles(REAL)
    job = Job(root, 2, files={0: files}, keep_last=1)
    job.start()
    values(job.each(lambda m: write(m, 1)))
    files.faults.append(call(rotates, op="rename", path="/trash/"))

    def save(manager: distckpt.CheckpointManager) -> None:
        write(manager, 2)
        if manager.rank == 1:
            told.set()

    values(job.each(save))
    assert seen == [True]
    job.finish()


def test_P4_whatever_fails_in_a_commit_is_told_to_every_rank_at_once(root: Path) -> None:
    """Not only what the library foresees; the others would wait for rank 0 until its heartbeat is missed."""
    job = Job(root, 2)
    job.start()

    def fails(*args: Any, **how: Any) -> Any:
        raise RuntimeError("nobody foresaw this")

    job.managers[0]._committer.commit = fails  # type: ignore[union-attr, method-assign]
    zero, one = job.each(lambda m: write(m, 1))
    assert isinstance(zero.error, RuntimeError)
    assert isinstance(one.error, SaveError) and one.error.outcome == "unknown" and "nobody foresaw this" in str(one.error)
    job.finish()


def test_S21_a_rank_that_returns_after_it_was_answered_for_gives_the_space_back_at_once(root: Path) -> None:
    """Rank 1 fails; rank 2 is answered for, so that rank 0 need not wait, and returns from its writer just then."""
    job = Job(root, 3)
    job.start()
    attempt = ""

    def save(manager: distckpt.CheckpointManager) -> None:
        nonlocal attempt
        with manager.saving(1) as files:
            if manager.rank == 1:
                attempt = next(part for part in files.directory.split("/") if len(part) == 16)
                raise OSError(errno.EIO, "a disk")
            if manager.rank == 2:
                client, number = job.threads.source(), manager._group.rounds._number
                await_(lambda: attempt and client.has(f"call/{number}/{attempt}/ack/2"))

    same_error(job.each(save), SaveError)
    assert staged(root) == []
    job.finish()


class _Together:
    """A payload whose write is a collective: who comes alone waits there for ever."""

    collective = True
    members: list[str] = []

    def __init__(self, entered: list[int]) -> None:
        self._entered = entered

    def check(self) -> None: ...

    def tree(self) -> dict[str, Any]:
        return {}

    def of(self, tree: dict[str, Any]) -> _Together:
        return self

    def write(self, files: Any, ranks: Any) -> None:
        self._entered.append(ranks.rank)
        with files.writer("data.bin") as out:
            out.write(b"x")

    def load(self, checkpoint: Any, ranks: Any) -> None: ...


def test_no_rank_enters_a_frameworks_collectives_when_another_cannot(root: Path) -> None:
    files = FaultyFiles(REAL)
    job = Job(root, 2, files={1: files})
    job.start()
    entered: list[int] = []
    files.faults.append(fail(errno.EIO, op="scan", path="/staging/", forever=True))
    begun = time.monotonic()
    for error in same_error(job.each(lambda m: m.save(1, _Together(entered))), SaveError):
        assert list(error.failures) == [1]
    assert entered == [] and time.monotonic() - begun < 6, "the other one waited out its deadline"
    files.faults.clear()
    values(job.each(lambda m: m.save(2, _Together(entered))))
    assert sorted(entered) == [0, 1]
    job.finish()


def test_P4_an_interrupted_rank_tells_the_others_before_it_leaves(root: Path) -> None:
    job = Job(root, 2)
    job.start()

    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1) as files, files.writer("data.bin") as out:
            out.write(b"x")
            if manager.rank == 1:
                raise KeyboardInterrupt

    begun = time.monotonic()
    zero, one = job.each(save)
    assert isinstance(one.error, KeyboardInterrupt)
    assert isinstance(zero.error, SaveError) and zero.error.failures[1].type == "KeyboardInterrupt"
    assert time.monotonic() - begun < 6, "rank 0 waited out its deadline"
    values(job.each(lambda m: write(m, 2)))
    job.finish()
