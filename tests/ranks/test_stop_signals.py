"""Stop signals on real ranks: whoever gets one, all save the same step and leave; at any moment of a save.

The ranks step together, by a collective, as training does.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt.checkpoint import Checkpoint
from distckpt.durable import REAL, Files
from distckpt.options import Seams
from distckpt.payloads.base import Ranks
from distckpt.saving.files import RankFiles
from distckpt.testing.faults import FaultyFiles, Operation, call
from tests.harness import Running, start, values

LIMIT = 20.0


def _touch(folder: str, name: str, rank: int) -> None:
    Path(folder, f"{name}-{rank}").touch()


def _await(folder: str, name: str, world: int) -> None:
    until = time.monotonic() + 40
    while not all(Path(folder, f"{name}-{rank}").exists() for rank in range(world)):
        assert time.monotonic() < until, f"{name}: {sorted(os.listdir(folder))}"
        time.sleep(0.005)


def _train(rank: int, world: int, folder: str, background: bool) -> dict[str, Any]:
    """The loop of the README, until told to stop."""
    chained: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: chained.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    state = {"w": torch.zeros(100)}
    todos, step = [], 0
    with distckpt.CheckpointManager(os.path.join(folder, "root")) as manager:
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            todo = manager.poll(step)
            if todo.save:
                manager.save(step, state, background=background)
            if todo.save or todo.stop:
                todos.append((step, *todo))
            if todo.stop:
                break
            dist.all_reduce(state["w"])
            step += 1
            if step == 5:
                _touch(folder, "ready", rank)
            time.sleep(0.001)
        posted = manager._background._posted_stop
        late = manager.poll(step)
    assert signal.getsignal(signal.SIGTERM) is mine, "the handler before ours is back"
    return {"todos": todos, "chained": chained, "posted": posted, "late": tuple(late), "latest": manager.latest_step()}


def _agreed(running: Running, reason: str) -> list[dict[str, Any]]:
    """All ranks stopped and saved at one step, once."""
    found = values(running.join(40))
    todos = found[0]["todos"]
    assert all(f["todos"] == todos for f in found), [f["todos"] for f in found]
    assert len(todos) == 1 and todos[0][1:3] == (True, True) and reason in todos[0][3]
    assert all(f["latest"] == todos[0][0] for f in found)
    assert all(f["late"][:2] == (False, True) for f in found), "the step is saved, and the stop stays one"
    return found


@pytest.mark.parametrize(("who", "number", "times"), [
    ([0], signal.SIGTERM, 1), ([1], signal.SIGUSR1, 1), ([1, 2], signal.SIGTERM, 1), ([0, 1, 2], signal.SIGUSR1, 1),
    ([0, 1, 2], signal.SIGTERM, 2), ([2], signal.SIGTERM, 3)])
def test_signals_to_some_stop_all_at_one_step(who: list[int], number: signal.Signals, times: int, tmp_path: Path) -> None:
    running = start(3, _train, str(tmp_path), len(who) != 2)
    _await(str(tmp_path), "ready", 3)
    for _ in range(times):
        for rank in who:
            running.kill(rank, number)
    found = _agreed(running, number.name)
    for rank in range(3):
        assert (rank in who) == found[rank]["posted"] or len(who) > 1
        assert set(found[rank]["chained"]) == ({int(number)} if rank in who else set()), "the handler before ours was called"


def test_two_signals_to_two_ranks_are_one_stop(tmp_path: Path) -> None:
    running = start(2, _train, str(tmp_path), True)
    _await(str(tmp_path), "ready", 2)
    running.kill(0, signal.SIGTERM)
    running.kill(1, signal.SIGUSR1)
    _agreed(running, "SIG")


class _State:
    """A payload that lets a signal arrive at one moment of its save."""

    collective = False
    members: list[str] = []

    def __init__(self, moment: str, stops: Any) -> None:
        self.moment, self.stops = moment, stops

    def check(self) -> None: ...

    def tree(self) -> dict[str, Any]:
        if self.moment == "staging":
            os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 5
            while not self.stops.raised and time.monotonic() < until:
                time.sleep(0.001)
        return {"w": torch.ones(10)}

    def of(self, tree: dict[str, Any]) -> _State:
        return self

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        if self.moment == "write":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.moment == "close":
            time.sleep(0.3)  # the training thread is in close by then
            os.kill(os.getpid(), signal.SIGTERM)
        with files.writer("x.bin") as out:
            out.write(b"x" * 100)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None: ...


def _moment(rank: int, world: int, folder: str, moment: str, bad: int, background: bool) -> Any:
    """A signal to rank ``bad`` at one moment of the save of step 5."""
    files: Files = REAL
    if moment in ("rename", "marker") and rank == bad:
        def strike(operation: Operation) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
        path = (lambda p: p.endswith("/step-5")) if moment == "rename" else "commit.json"
        files = FaultyFiles(REAL, call(strike, op="rename" if moment == "rename" else "fsync", path=path))
    before = signal.getsignal(signal.SIGTERM)
    with distckpt.CheckpointManager(os.path.join(folder, "root"), seams=Seams(files=files)) as manager:
        stops, found, step = manager._background.signals, [], 0
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            todo = manager.poll(step)
            if todo.save or todo.stop:
                found.append((step, *todo))
            if step == 5 or todo.save:
                manager.save(step, _State(moment if rank == bad and step == 5 else "", stops), background=background)
            if todo.stop or (moment == "close" and step == 5):
                break
            dist.all_reduce(torch.ones(1))
            step += 1
            time.sleep(0.001)
    assert signal.getsignal(signal.SIGTERM) == before
    return found, stops.raised, manager.all_steps()


@pytest.mark.parametrize(("moment", "bad", "background"), [
    ("staging", 1, True), ("write", 1, True), ("write", 0, False), ("marker", 0, True), ("rename", 0, True), ("rename", 0, False),
    ("close", 1, True), ("close", 0, True)])
def test_a_signal_at_any_moment_of_a_save(moment: str, bad: int, background: bool, tmp_path: Path) -> None:
    """The save under way is committed; then all ranks save the step at which they stop, and leave."""
    found = values(start(2, _moment, str(tmp_path), moment, bad, background).join(40))
    assert found[0][0] == found[1][0] and found[bad][1] == "SIGTERM"
    if moment == "close":
        assert found[0][0] == [] and found[0][2] == [5]
        return
    (step, save, stop, reason), = found[0][0]
    assert stop and save == (step != 5) and reason == f"SIGTERM on rank {bad}"
    assert found[0][2] == found[1][2] == sorted({5, step})
