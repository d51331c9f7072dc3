"""A background save that fails: raised on every rank at the same poll, once, with its cause; and the next one works.

Ranks are threads over one store, each with its own faulty disk, so that a fault falls on one exact operation.
"""

from __future__ import annotations

import errno
import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt.checkpoint import Checkpoint
from distckpt.errors import (
    CoordinatorLost,
    DiskFull,
    DistckptError,
    RankDisagreement,
    SaveError,
    StepAlreadyExists,
)
from distckpt.options import Timeouts
from distckpt.payloads.base import Ranks
from distckpt.saving.files import RankFiles
from distckpt.steps import Todo, Tolerate
from distckpt.testing.faults import Fault, FaultyFiles, Operation, call, fail
from tests.inprocess import Job, await_, events, same_error, staged, values


@dataclass
class Piece:
    """A small state, one file per rank. ``on_write`` runs in the finaliser, ``on_stage`` on the training thread."""

    text: str
    on_write: Callable[[], Any] = lambda: None
    on_stage: Callable[[], Any] = lambda: None
    collective: bool = False
    members: list[str] = field(default_factory=list)

    def check(self) -> None: ...

    def tree(self) -> dict[str, Any]:
        self.on_stage()
        return {"w": torch.full((64,), float(len(self.text))), "text": self.text}

    def of(self, tree: dict[str, Any]) -> Piece:
        return Piece(tree["text"], self.on_write)

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        self.on_write()
        with files.writer("x.bin") as out:
            out.write(self.text.encode() * 10)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        raise NotImplementedError


def published(root: str | Path) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir() if path.name.startswith("step-"))


def until_raised(manager: distckpt.CheckpointManager, first: int = 0, pause: float = 0.001) -> tuple[int, int, DistckptError]:
    """(boundary, step, error) of the poll that raises."""
    for step in range(first, first + 5000):
        try:
            manager.poll(step)
        except DistckptError as error:
            return manager._background.gate.place[0], step, error
        time.sleep(pause * (manager.rank + 1))
    raise AssertionError("no poll raised")


def _boom() -> None:
    raise ZeroDivisionError("in the writer")


FAULTS: dict[str, tuple[int, Callable[[], Fault] | None, type[SaveError], type[Exception]]] = {
    "disk full": (1, lambda: fail(errno.ENOSPC, op="write", path="x."), DiskFull, OSError),
    "quota": (1, lambda: fail(errno.EDQUOT, op="open", path="x."), DiskFull, OSError),
    "fsync": (1, lambda: fail(errno.EIO, op="fsync", path="x."), SaveError, OSError),
    "close": (1, lambda: fail(errno.EIO, op="close", path="x."), SaveError, OSError),
    "writer": (1, None, SaveError, ZeroDivisionError),
    "publishing rename": (0, lambda: fail(errno.EIO, op="rename", path=lambda p: p.endswith("/step-3")), SaveError, OSError),
    "marker": (0, lambda: fail(errno.ENOSPC, op="write", path="commit.json"), SaveError, OSError),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_failure_on_one_rank_is_raised_on_all_at_one_poll(what: str, tmp_path: Path) -> None:
    bad, fault, kind, cause = FAULTS[what]
    files = FaultyFiles()
    job = Job(tmp_path / "root", 3, files={bad: files})

    def train(manager: distckpt.CheckpointManager) -> tuple[Any, ...]:
        manager.save(2, Piece("before"))
        if manager.rank == bad and fault is not None:
            files.faults.append(fault())
        writes = _boom if fault is None and manager.rank == bad else (lambda: None)
        manager.poll(3)
        handle = manager.save(3, Piece("bad", writes), background=True)
        at, step, error = until_raised(manager)
        assert isinstance(error, kind) and error.background and error.step == 3
        assert list(error.failures) == [bad]
        if manager.rank == bad:
            assert isinstance(error.__cause__, cause) and handle.exception() is error
        with pytest.raises(SaveError):
            handle.result(5)
        for later in range(50):  # once
            assert not manager.poll(step + 1 + later).stop
        good = manager.save(300, Piece("good"), background=True)
        manager.wait()
        assert good.result(5).step == 300
        return at, step, type(error), str(error), error.outcome

    seen = values(job.run(train))
    assert len({str(s) for s in seen}) == 1, seen
    assert published(tmp_path / "root") == ["step-2", "step-300"] and staged(tmp_path / "root") == []
    assert fault is None or files.fired


def test_a_failed_step_may_be_saved_again(tmp_path: Path) -> None:
    """The attempt left nothing in the way; and ``poll`` asks for the step again, as it is not committed."""
    files = FaultyFiles()
    job = Job(tmp_path / "root", 2, files={1: files}, save_every=5)

    def train(manager: distckpt.CheckpointManager) -> Todo:
        assert manager.poll(5).save
        if manager.rank == 1:
            files.faults.append(fail(errno.ENOSPC, op="write", path="x."))
        manager.save(5, Piece("bad"), background=True)
        assert not manager.poll(5).save, "it is in flight"
        with pytest.raises(DiskFull):
            manager.wait()
        todo = manager.poll(5)
        manager.save(5, Piece("good"), background=True)
        manager.wait()
        assert not manager.poll(5).save, "it is committed"
        return todo

    assert values(job.run(train)) == [Todo(True, False, "every 5 steps")] * 2
    assert published(tmp_path / "root") == ["step-5"]


def test_poll_never_waits_for_a_finalisation_that_still_runs(tmp_path: Path) -> None:
    job, hold, writing, looked = Job(tmp_path / "root", 2), threading.Event(), threading.Event(), threading.Barrier(2, timeout=20)

    def block() -> None:
        writing.set()
        assert hold.wait(20)

    def train(manager: distckpt.CheckpointManager) -> float:
        handle = manager.save(1, Piece("slow", block if manager.rank == 1 else lambda: None), background=True)
        assert writing.wait(10)
        slowest = 0.0
        for step in range(2, 2000):
            begun = time.perf_counter()
            assert manager.poll(step) == Todo()
            slowest = max(slowest, time.perf_counter() - begun)
        assert not handle.done() and manager.status()["in_flight"] == 1 and not manager.wait(0.01)
        looked.wait()  # the other rank may still be polling
        hold.set()
        manager.wait()
        assert handle.done() and manager.status()["in_flight"] is None
        return slowest

    print("slowest poll in seconds:", values(job.run(train)))
    assert published(tmp_path / "root") == ["step-1"]


@pytest.mark.parametrize("how", ["save", "background save", "saving", "wait", "resume", "close"])
def test_whoever_comes_first_raises_it_once(how: str, tmp_path: Path) -> None:
    """Collective calls do what ``poll`` does: the failure is raised there, on all ranks, and nothing is written."""
    job = Job(tmp_path / "root", 2)
    raised = []

    def train(manager: distckpt.CheckpointManager) -> None:
        manager.save(3, Piece("bad", _boom if manager.rank == 1 else lambda: None), background=True)
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: manager.save(4, Piece("next")), "wait": manager.wait, "resume": manager.resume,
            "close": manager.close,
            "background save": lambda: manager.save(4, Piece("next"), background=True),
            "saving": lambda: manager.saving(4).__enter__()}
        try:
            calls[how]()
        except SaveError as error:
            raised.append((manager.rank, str(error), error.step, error.background))
        if how != "close":
            for step in range(60):
                manager.poll(step)
                time.sleep(0.002)
            manager.save(5, Piece("next"))

    values(job.run(train))
    assert len(raised) == 2 and len({r[1:] for r in raised}) == 1 and raised[0][2:] == (3, True)
    assert published(tmp_path / "root") == ([] if how == "close" else ["step-5"])
    Job(tmp_path / "root", 2).run(lambda manager: None)  # the root was given back


def test_tolerated_failures(tmp_path: Path) -> None:
    """Two in a row are warnings, the third is raised; a success between them starts over. Alike on every rank."""
    fails = {1: True, 2: True, 3: False, 4: True, 5: True, 6: True, 7: False}
    job = Job(tmp_path / "root", 2, on_failure=Tolerate(2), save_every=1)

    def train(manager: distckpt.CheckpointManager) -> list[Any]:
        seen: list[Any] = []
        for step, bad in fails.items():
            assert manager.poll(step).save
            manager.save(step, Piece("p", _boom if bad and manager.rank == 1 else lambda: None), background=True)
            try:
                manager.wait()
            except SaveError as error:
                seen.append(error.step)
            seen.append(manager.status()["failures_in_a_row"])
        return seen

    seen = values(job.run(train))
    assert seen[0] == seen[1] == [1, 2, 0, 1, 2, 6, 0, 0]
    assert published(tmp_path / "root") == ["step-3", "step-7"]
    found = json.loads((tmp_path / "root/.distckpt/status.json").read_text())
    assert [a["state"] for a in found["attempts"]] == ["failed", "failed", "committed", "failed", "failed", "failed", "committed"]


def test_close_raises_what_was_never_reported(tmp_path: Path) -> None:
    job = Job(tmp_path / "root", 3)

    def train(manager: distckpt.CheckpointManager) -> None:
        manager.poll(3)
        manager.save(3, Piece("bad", _boom if manager.rank == 2 else lambda: None), background=True)

    errors = same_error(job.run(train), SaveError)
    assert all(error.background and error.step == 3 for error in errors)
    assert isinstance(errors[2].__cause__, ZeroDivisionError)
    values(Job(tmp_path / "root", 3).run(lambda manager: manager.save(3, Piece("good")).path))


def test_another_exception_is_not_masked_and_gets_a_note(tmp_path: Path) -> None:
    job = Job(tmp_path / "root", 2)

    def train(manager: distckpt.CheckpointManager) -> None:
        manager.save(3, Piece("bad", _boom if manager.rank == 1 else lambda: None), background=True)
        raise KeyError("in the training loop")

    for outcome in job.run(train):
        assert isinstance(outcome.error, KeyError)
        notes = getattr(outcome.error, "__notes__", [])
        assert len(notes) == 1 and "a background save had failed as well: save of step 3" in notes[0]


def test_a_failure_raised_by_poll_leaves_the_block_as_it_is(tmp_path: Path) -> None:
    """The error in flight is the failed save's own: nothing to note, and it leaves alike on every rank."""
    job = Job(tmp_path / "root", 2)

    def train(manager: distckpt.CheckpointManager) -> None:
        manager.save(3, Piece("bad", _boom if manager.rank == 1 else lambda: None), background=True)
        raise until_raised(manager)[2]

    for error in same_error(job.run(train), SaveError):
        assert not getattr(error, "__notes__", [])


def test_save_save_close_back_to_back(tmp_path: Path) -> None:
    def train(manager: distckpt.CheckpointManager) -> list[distckpt.SaveHandle]:
        return [manager.save(step, Piece(f"of {step}"), background=True) for step in (1, 2)]

    for handles in values(Job(tmp_path / "root", 3).run(train)):
        assert [h.done() for h in handles] == [True, True] and [h.result().step for h in handles] == [1, 2]
    assert published(tmp_path / "root") == ["step-1", "step-2"]


def test_close_while_a_save_is_in_flight(tmp_path: Path) -> None:
    """``close`` flushes: the writer that hangs at the moment of the close is waited for."""
    job, hold = Job(tmp_path / "root", 2), threading.Event()

    def train(manager: distckpt.CheckpointManager) -> distckpt.SaveHandle:
        handle = manager.save(1, Piece("slow", lambda: hold.wait(20) if manager.rank == 1 else None), background=True)
        closes = threading.Thread(target=lambda: (await_(lambda: manager._background.gate.closing), hold.set()))
        closes.start()
        manager.close()
        closes.join(10)
        return handle

    assert all(h.done() and h.result().step == 1 for h in values(job.run(train)))


@pytest.mark.parametrize("bad", [False, True])
def test_an_exception_in_the_loop_while_a_save_is_in_flight(bad: bool, tmp_path: Path) -> None:
    """The save ends in a known state before the exception goes on: committed, or cleanly failed."""
    job = Job(tmp_path / "root", 2)
    handles: dict[int, distckpt.SaveHandle] = {}
    dying = threading.Barrier(2)

    def write() -> None:
        dying.wait(10)
        time.sleep(0.1)  # well into the exit of the training loop
        if bad:
            raise OSError(5, "bad disk")

    def train(manager: distckpt.CheckpointManager) -> None:
        handles[manager.rank] = manager.save(1, Piece("p", write if manager.rank == 0 else lambda: None), background=True)
        if manager.rank == 0:
            dying.wait(10)
        raise KeyError("in the training loop")

    assert all(isinstance(o.error, KeyError) for o in job.run(train))
    assert all(h.done() for h in handles.values())
    assert published(tmp_path / "root") == ([] if bad else ["step-1"]) and staged(tmp_path / "root") == []
    assert all((h.exception() is not None) == bad for h in handles.values())


@pytest.mark.parametrize("news", ["failure", "stop"])
def test_s18_news_while_one_rank_is_before_its_last_step_and_another_in_close(news: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "root", 2)
    closing = threading.Event()

    def write() -> None:
        assert closing.wait(10)
        if news == "failure":
            raise OSError(28, "No space left on device")

    def train(manager: distckpt.CheckpointManager) -> Any:
        behind = manager._background
        for step in range(5):
            manager.poll(step)
        manager.save(4, Piece("p", write if manager.rank == 1 else lambda: None), background=True)
        if manager.rank == 1:
            watch = threading.Thread(target=lambda: (await_(lambda: behind.gate.closing), closing.set()))
            watch.start()
            manager.close()
            return None
        assert closing.wait(10)
        if news == "stop":
            behind.signals.raised = "SIGTERM"
        todo = manager.poll(5)
        if news == "failure":
            await_(lambda: behind.gate.flag)
        todo = manager.poll(6)
        manager.close()
        return todo

    outcomes = job.run(train)
    if news == "failure":
        same_error(outcomes, DiskFull)
    else:
        values(outcomes)
        assert published(tmp_path / "root") == ["step-4"]


def test_a_state_that_cannot_be_copied_is_told_to_every_rank(tmp_path: Path) -> None:
    """One rank cannot stage: no rank is left waiting for it, and the error is everybody's at one poll."""
    job = Job(tmp_path / "root", 2)

    def train(manager: distckpt.CheckpointManager) -> tuple[int, str]:
        manager.save(3, Piece("p", on_stage=_boom if manager.rank == 1 else lambda: None), background=True)
        at, _, error = until_raised(manager)
        assert isinstance(error, SaveError) and list(error.failures) == [1]
        manager.save(4, Piece("p"))
        return at, str(error)

    seen = values(job.run(train))
    assert seen[0] == seen[1] and "in the writer" in seen[0][1]


@pytest.mark.parametrize("mode", ["exists", "other steps", "other series"])
def test_what_begin_refuses_is_raised_at_one_poll(mode: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "root", 2)

    def train(manager: distckpt.CheckpointManager) -> tuple[int, int, str]:
        manager.save(3, Piece("p"))
        rolling = manager.series("rolling", keep_last=1)
        if mode == "other series" and manager.rank == 1:
            rolling.save(4, Piece("p"), background=True)
        else:
            step = {"exists": 3, "other steps": 4 + manager.rank, "other series": 4}[mode]
            manager.save(step, Piece("p"), background=True)
        at, step, error = until_raised(manager, 10)
        assert isinstance(error, StepAlreadyExists if mode == "exists" else RankDisagreement)
        manager.save(9, Piece("p"), background=True)
        return at, step, str(error)

    seen = values(job.run(train))
    assert seen[0] == seen[1]
    assert published(tmp_path / "root") == ["step-3", "step-9"]


def test_different_steps_to_poll_are_a_disagreement_on_all(tmp_path: Path) -> None:
    job, meet = Job(tmp_path / "root", 2), threading.Barrier(2)

    def train(manager: distckpt.CheckpointManager) -> None:
        for step in range(4):
            manager.poll(step + manager.rank)
        meet.wait(10)
        if manager.rank == 1:
            manager._background._messenger.tell(distckpt.coordination.gate.Act("save", "asked"))
        await_(lambda: manager._background.gate.flag)
        meet.wait(10)
        manager.poll(4 + manager.rank)

    same_error(job.run(train), RankDisagreement)


def test_a_save_that_hangs_does_not_hold_close_beyond_its_deadline(tmp_path: Path) -> None:
    job, hold = Job(tmp_path / "root", 2, timeouts=Timeouts(arrive=10, progress=10, visible=2, close=0.6)), threading.Event()

    def train(manager: distckpt.CheckpointManager) -> None:
        manager.save(1, Piece("slow", lambda: hold.wait(30) if manager.rank == 1 else None), background=True)
        begun = time.monotonic()
        try:
            manager.close()
        finally:
            assert time.monotonic() - begun < 15
            hold.set()

    for outcome in job.run(train):
        # whoever is first names the save that hangs; the other may find rank 0's store gone meanwhile
        assert isinstance(outcome.error, (SaveError, CoordinatorLost)), outcome.text
        assert not isinstance(outcome.error, SaveError) or outcome.error.outcome in ("unknown", "aborted")


@pytest.mark.parametrize("bad", [False, True])
def test_nothing_keeps_the_payload_once_the_save_has_ended(bad: bool, tmp_path: Path) -> None:
    """FIELD_CASES B147: neither the finaliser nor, through its traceback, the error of a failed save."""
    job = Job(tmp_path / "root", 2, on_failure=Tolerate(5))
    kept: list[weakref.ref[Any]] = []
    kept_tensors: list[weakref.ref[Any]] = []

    class Heavy(Piece):
        def of(self, tree: dict[str, Any]) -> Piece:
            staged_piece = Heavy(tree["text"], self.on_write)
            staged_piece.tensor = tree["w"]  # type: ignore[attr-defined]
            kept.append(weakref.ref(staged_piece))
            kept_tensors.append(weakref.ref(tree["w"]))
            return staged_piece

    def train(manager: distckpt.CheckpointManager) -> distckpt.SaveHandle:
        def write() -> None:
            held = torch.ones(100)
            kept_tensors.append(weakref.ref(held))
            if bad and manager.rank == 1:
                _boom()
        handle = manager.save(1, Heavy("p", write), background=True)
        manager.wait()
        assert bad == (handle.exception() is not None)
        return handle

    handles = values(job.run(train))
    assert len(kept) == 2 and [r() for r in kept] == [None, None] and {r() for r in kept_tensors} == {None}
    assert len(handles) == 2


def test_the_journal_and_the_status_tell_of_every_attempt(tmp_path: Path) -> None:
    """Pending while it runs, committed or failed after the fact; nothing says so before the rename."""
    root = tmp_path / "root"
    during: list[str] = []

    def look(operation: Operation) -> None:
        during.append(json.loads((root / ".distckpt/status.json").read_text())["attempts"][-1]["state"])
        assert not events(root, "committed")

    files = FaultyFiles()
    files.faults.append(call(look, op="rename", path=lambda p: p.endswith("/step-1")))
    files.faults.append(fail(errno.EIO, op="rename", path=lambda p: p.endswith("/step-2")))
    job = Job(root, 2, files={0: files})

    def train(manager: distckpt.CheckpointManager) -> None:
        manager.save(1, Piece("p"), background=True)
        manager.wait()
        manager.save(2, Piece("p"), background=True)
        with pytest.raises(SaveError):
            manager.wait()

    values(job.run(train))
    assert during == ["pending"]
    found = json.loads((root / ".distckpt/status.json").read_text())["attempts"]
    assert [(a["step"], a["state"]) for a in found] == [(1, "committed"), (2, "failed")] and found[1]["error"]
    assert [e["step"] for e in events(root, "committed")] == [1] and [e["step"] for e in events(root, "aborted")] == [2]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_save_that_could_not_begin_and_one_in_doubt_are_told_of_too(bad: int, tmp_path: Path) -> None:
    """Each counts as a failure in a row, in the status and in the journal (FIELD_CASES B26)."""
    root = tmp_path / "root"
    files = FaultyFiles()
    job = Job(root, 2, files={0: files}, on_failure=Tolerate(5))

    def train(manager: distckpt.CheckpointManager) -> None:
        manager.save(1, Piece("p"), background=True, metrics={"loss": "much"} if manager.rank == bad else None)
        manager.wait()
        if manager.rank == 0:
            files.faults.append(fail(errno.EIO, op="fsync_dir", path=lambda p: p == str(root)))
        manager.save(2, Piece("p"), background=True)
        manager.wait()
        if manager.rank == 0:
            assert manager.status()["failures_in_a_row"] == 2
        manager.save(3, Piece("p"), background=True)
        manager.wait()

    values(job.run(train))
    found = json.loads((root / ".distckpt/status.json").read_text())
    assert [(a["step"], a["state"]) for a in found["attempts"]] == [(1, "failed"), (2, "unknown"), (3, "committed")]
    refused, doubtful = events(root, "refused"), events(root, "unknown")
    assert [(e["step"], e["failures_in_a_row"]) for e in (*refused, *doubtful)] == [(1, 1), (2, 2)]
    assert found["attempts"][0]["attempt"] is None and "loss" in refused[0]["error"]
