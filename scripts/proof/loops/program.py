"""What the ranks of one run do, and the diary in which each notes what it was told: it outlives its rank's death."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import distckpt
from distckpt.coordination import store
from distckpt.coordination.rounds import Call
from distckpt.durable import REAL
from distckpt.errors import DistckptError, SaveError
from distckpt.options import Seams, Timeouts
from distckpt.series import SeriesView
from distckpt.testing.checker import MAIN, tree_of
from distckpt.testing.faults import FaultyFiles, Operation
from distckpt.testing.forks import Place
from scripts.proof.loops import mutants
from scripts.proof.loops.strikes import Strike

PATIENT = Timeouts(arrive=20, progress=20, visible=2, close=20)
DEADLINE = 1.5
HASTY = Timeouts(arrive=DEADLINE, progress=DEADLINE, visible=DEADLINE, close=DEADLINE)
SILENCE = 1.0
ROLLING, ROLLING_KEEP = "rolling", 1
"""The second series, and how many of it stay."""
NEXT, LAST = 90, 91
"""Steps that the jobs after the struck one save."""


@dataclass(frozen=True)
class Program:
    """``before``: saves of an earlier job, that ended well. ``saves``: (step, value, on_exists), in order. ``rolling``: which of
    them, by their place, go into the second series. ``losses``: metrics by step; ``options``: further ones of the manager."""

    name: str
    saves: tuple[tuple[int, int, str], ...]
    before: tuple[tuple[int, int, str], ...] = ()
    payload: str = "shards"
    background: bool = False
    keep: int = 2
    staging: str = "copy"
    rolling: frozenset[int] = frozenset()
    losses: Mapping[int, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def series(self, index: int) -> str:
        return ROLLING if index in self.rolling else MAIN

    def metrics(self, index: int, step: int) -> dict[str, float] | None:
        return {"loss": self.losses[step]} if step in self.losses and index not in self.rolling else None

    @property
    def protected(self) -> frozenset[int]:
        """The step that its policy keeps once it is committed, whatever comes later."""
        best = min(self.losses, key=self.losses.__getitem__, default=None)
        return frozenset() if best is None else frozenset({best})


WIDE = 20_000
"""Numbers in a tensor. A smaller one is gathered into one write with its archive, and nothing could strike inside its file."""
_THREE = ((1, 1, "error"), (2, 2, "error"), (3, 3, "error"))

PROGRAMS = {program.name: program for program in (
    Program("sync", ((2, 2, "error"), (3, 3, "error"), (3, 4, "replace")), before=((1, 1, "error"),)),
    Program("background", _THREE, background=True),
    Program("members", _THREE[:2] + ((2, 5, "replace"),), payload="members"),
    Program("dcp", _THREE[:2] + ((2, 5, "replace"),), payload="dcp"),
    Program("dcp background", _THREE, payload="dcp", background=True),
    # A writer process writes to the real file system only, so the seam that is struck here excludes it: L1 and L3 have it.
    Program("every option", ((1, 1, "error"), (1, 11, "error"), (2, 2, "error"), (2, 12, "error"), (3, 3, "error")),
            payload="trained", background=True, keep=1, staging="overlap", rolling=frozenset({1, 3}),
            losses={1: 0.2, 2: 0.1, 3: 0.4}, options={"dedup": "link", "digest": "sha256", "keep_best": 1}),
)}
"""Later ones at the end: what runs there are of the others stays as it is."""


# -- state ---------------------------------------------------------------------------------------------------------------

class State:
    """One rank's training state, all of it told by ``value``."""

    def __init__(self, program: Program, place: Place, value: int) -> None:
        self._kind, self._place = program.payload, place
        self.weights = torch.zeros(WIDE)
        self.progress = {"value": 0, "seen": [0]}
        if self._kind == "dcp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import DTensor, Shard

            self.whole = DTensor.from_local(self.weights, init_device_mesh("cpu", (place.world,)), [Shard(0)])
        elif self._kind == "trained":
            self.frozen = {"w": torch.full((64,), -1.0 - place.rank)}
            self.weights = torch.nn.Parameter(self.weights)
            self.optimizer = torch.optim.SGD([self.weights], lr=0.5, momentum=0.9)
            self.step()  # an optimizer makes its state in its first step
        self.become(value)

    def step(self) -> None:
        """The optimizer's, which waits until what it changes is copied."""
        self.weights.grad = torch.ones(WIDE)
        self.optimizer.step()

    def become(self, value: int) -> None:
        """As a training step does: in place."""
        generator = torch.Generator().manual_seed(value * 100 + self._place.rank)
        self.weights.detach().copy_(torch.rand(WIDE, generator=generator) if value else torch.zeros(WIDE))
        if self._kind == "trained":
            self.optimizer.state[self.weights]["momentum_buffer"].copy_(2 * self.weights.detach())
        self.progress.update(value=value, seen=[value, self._place.rank])

    @property
    def payload(self) -> Any:
        if self._kind == "dcp":
            return distckpt.DCP(state={"w": self.whole})
        if self._kind == "trained":
            return {"frozen": distckpt.Shards(self.frozen, format="safetensors"), "optimizer": distckpt.Shards(self.optimizer),
                    "model": distckpt.Shards({"w": self.weights.detach()}, format="safetensors")}
        if self._kind == "members":
            return {"model": distckpt.Shards({"w": self.weights.detach()}), "loop": distckpt.TrainState(progress=self.progress)}
        return distckpt.Shards({"w": self.weights, "progress": self.progress})

    def differs(self, program: Program, value: int) -> bool:
        other = State.__new__(State)
        other._kind, other._place = "", self._place
        other.weights, other.progress = torch.zeros(WIDE), {}
        other.become(value)
        same = torch.equal(self.weights.detach(), other.weights)
        if self._kind == "trained":
            momentum = self.optimizer.state[self.weights]["momentum_buffer"]
            same = same and torch.equal(momentum, 2 * other.weights) and bool((self.frozen["w"] == -1.0 - self._place.rank).all())
        return not (same and (self._kind in ("dcp", "trained") or self.progress == other.progress))


# -- diary ---------------------------------------------------------------------------------------------------------------

class Diary:
    """One JSON line per event, in a file of its own beside the root. No seam and no buffer is between."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._write: Callable[[int, bytes], int] = os.write

    def note(self, what: str, **values: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), **values}) + "\n"
        self._write(self._fd, line.encode())

    def stopped(self, operation: Operation) -> None:
        self.note("stopped", op=operation.op, path=operation.path, other=operation.other, thread=operation.thread,
                  held=operation.held)

    def struck(self, operation: Operation) -> None:
        self.note("struck", op=operation.op, path=operation.path, other=operation.other)

    def error(self, error: BaseException, save: int | None = None) -> None:
        self.note("error", type=type(error).__name__, text=str(error), save=save,
                  outcome=getattr(error, "outcome", None) if isinstance(error, SaveError) else None,
                  ours=isinstance(error, DistckptError))


def diary_of(root: str, rank: int) -> str:
    return f"{root}.diary-{rank}"


def read_diary(root: str, rank: int) -> list[dict[str, Any]]:
    path = Path(diary_of(root, rank))
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# -- the ranks -----------------------------------------------------------------------------------------------------------

def _manager(program: Program, place: Place, root: str, files: FaultyFiles, timeouts: Timeouts) -> distckpt.CheckpointManager:
    torch.set_num_threads(1)
    if timeouts is HASTY or timeouts == HASTY:
        store.SILENCE = SILENCE
    if program.payload == "dcp":
        _count_dcp(files)
        place.gloo()
        seams = Seams(files=files)
    else:
        seams = Seams(files=files, bootstrap=place.bootstrap())
    return distckpt.CheckpointManager(root, keep_last=program.keep, seams=seams, timeouts=timeouts, **program.options)


def _count_dcp(files: FaultyFiles) -> None:
    """Let what DCP writes by itself be counted and struck as well: between its collectives."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta

    # else no two saves of one state have the same bytes: it writes down its own path and a random id
    FileSystemWriter.storage_meta = lambda self: StorageMeta()  # type: ignore[method-assign]
    create, rename = FileSystem.create_stream, FileSystem.rename

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        if "w" in mode:
            files._do("open", str(path), "", lambda: None, None)
        return create(self, path, mode)

    def renamed(self: Any, path: Any, new: Any) -> None:
        files._do("rename", str(path), str(new), lambda: rename(self, path, new), None)

    FileSystem.create_stream = create_stream  # type: ignore[method-assign]
    FileSystem.rename = renamed  # type: ignore[method-assign, assignment]


def play(place: Place, root: str, name: str, strike: Strike | None, timeouts: Timeouts, mutant: str = "",
         earlier: bool = False, outside: bool = False) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The job that is struck. Goes on after a save that failed on all. How many operations of each kind there were; and those
    that write, in their order: what, and the name of its file. ``outside``: the rank only stops there, and another strikes."""
    program, diary = PROGRAMS[name], Diary(diary_of(root, place.rank))
    files = FaultyFiles(REAL)
    if strike is not None and strike.rank == place.rank:
        files.faults.append(strike.stop_there(diary.stopped) if outside else strike.fault(diary.struck))
    mutants.apply(mutant)
    _watch_absence(diary)
    try:
        with _manager(program, place, root, files, timeouts) as manager:
            state = State(program, place, 0)
            manager.restore(state.payload, verify="digest")
            rolling = manager.series(ROLLING, keep_last=ROLLING_KEEP) if program.rolling else None
            for index, (step, value, rule) in enumerate(program.before if earlier else program.saves):
                state.become(value)
                _one(manager, rolling if rolling is not None and index in program.rolling else manager, diary, state, program,
                     index, step, value, rule)
            diary.note("closing")
    except Exception as error:  # into the diary, and on as in any program
        diary.error(error)
        raise
    finally:
        counts = dict(Counter(operation.op for operation in (*files.log, *files.reads)))
        diary.note("operations", counts=counts)
    diary.note("closed")
    return counts, [(operation.op, os.path.basename(operation.path)) for operation in files.log]


def _watch_absence(diary: Diary) -> None:
    """Note when this rank finds out that another one is missing."""
    real = Call.absence

    def absence(self: Call, watch: Any, phase: str) -> Any:
        diary.note("noticed", missing=watch.absent())
        return real(self, watch, phase)

    Call.absence = absence  # type: ignore[method-assign]


def _one(manager: distckpt.CheckpointManager, line: distckpt.CheckpointManager | SeriesView, diary: Diary, state: State,
         program: Program, index: int, step: int, value: int, rule: str) -> None:
    """``line``: the series that it goes into."""
    diary.note("begin", save=index, step=step, value=value)
    try:
        line.save(step, state.payload, meta={"value": value}, on_exists=rule, background=program.background,
                  staging=program.staging, metrics=program.metrics(index, step))
        if program.staging == "overlap":
            state.step()
        if program.background:
            state.become(value + 50)  # it was copied, so training goes on
            manager.poll(step + 1)
            manager.poll(step + 2)
            manager.wait()
            state.become(value)
    except SaveError as error:
        diary.error(error, index)
        if program.background:
            state.become(value)
        elif state.differs(program, value):
            diary.note("disturbed", save=index)
        if error.outcome == "unknown" and not error.failures:
            raise
    else:
        diary.note("told", save=index, outcome="committed")


def golden(place: Place, root: str, name: str) -> list[str]:
    """Every state that is ever saved, as a checkpoint of step ``value``, read back; the modules that were loaded for it."""
    before = set(sys.modules)
    program = replace(PROGRAMS[name], keep=0)
    values = {value: program.background for _, value, _ in program.before + program.saves}
    with _manager(program, place, root, FaultyFiles(REAL), PATIENT) as manager:
        state = State(program, place, 0)
        for value, background in {**values, NEXT: False, LAST: False}.items():
            state.become(value)
            manager.save(value, state.payload, background=background)
            manager.wait()
            state.become(0)
            manager.restore(state.payload, step=value)
            if state.differs(program, value):
                raise AssertionError(f"the checkpoint of value {value} does not hold it")
    return sorted(set(sys.modules) - before)


def again(place: Place, root: str, name: str, step: int, timeouts: Timeouts = PATIENT) -> tuple[int, int] | None:
    """The same program started anew: where it resumes (step, value), every byte compared, and one more save."""
    program, files = PROGRAMS[name], FaultyFiles(REAL)
    with _manager(program, place, root, files, timeouts) as manager:
        found = manager.resume(verify="digest")
        answer = None
        state = State(program, place, 0)
        if found.checkpoint is not None:
            value = int(found.checkpoint.meta["value"])
            assert manager.restore(state.payload) == found.checkpoint.step
            if state.differs(program, value):
                raise AssertionError(f"{found.checkpoint.name} does not hold the state of value {value}")
            answer = found.checkpoint.step, value
        if place.rank == 0:
            Path(f"{root}.resumed").write_bytes(pickle.dumps((tree_of(root), dict(found.skipped))))
        state.become(step)
        manager.save(step, state.payload, meta={"value": step})
    return answer
