"""The whole library, all ranks in one process, on a disk in memory, a store in memory and a clock that jumps.

``Simulation(world=2, seed=17, faults=["kill:1@83"]).run(program)`` runs ``program(manager, rank)`` on every rank, lets the
faults happen, restarts the job on what is left on the disk, resumes, saves once more, and has the checker judge it all. Equal
arguments give equal executions, operation by operation.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distckpt import background, owned
from distckpt.checkpoint import Checkpoint
from distckpt.coordination.bootstrap import Bootstrap
from distckpt.coordination.store import Client
from distckpt.durable import Files
from distckpt.errors import CoordinatorLost, DistckptError, SaveError
from distckpt.manager import CheckpointManager
from distckpt.options import Seams, Timeouts
from distckpt.payloads.base import Ranks
from distckpt.runtime import Identity
from distckpt.saving.files import RankFiles
from distckpt.saving.handle import SaveHandle
from distckpt.steps import Todo
from distckpt.testing import checker, faults
from distckpt.testing.checker import ABORTED, COMMITTED, SKIPPED, UNKNOWN, Found, Save, Story
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.scheduler import Policy, Priorities, Process, Scheduler, Walk
from distckpt.testing.simruntime import SimClient, SimRuntime, SimStore, WatchedGate

ROOT = "/disk/run"
QUICK = Timeouts(arrive=20.0, progress=20.0, visible=2.0, close=20.0)

Program = Callable[["Told", int], Any]


class State:
    """What a rank trains: some bytes, saved as ``data.bin``."""

    collective = False
    members: list[str] = []

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def check(self) -> None:
        return None

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        with files.writer("data.bin") as out:
            half = len(self.data) // 2
            out.write(self.data[:half])
            out.write(self.data[half:])

    def tree(self) -> Any:
        return {"data": self.data}

    def of(self, tree: Any) -> State:
        return State(tree["data"])

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        self.data = checkpoint.files.read(checkpoint.mine("data.bin"), 1 << 20)


@dataclass(frozen=True)
class Strike:
    """One fault: ``kind`` happens to ``rank`` at its ``at``-th operation on files or the store (power: at that of all ranks).

    kill; stop (SIGSTOP for ``value`` seconds, without: for ever); slow (every operation takes ``value`` seconds from there on);
    fail (the ``at``-th operation of that rank that writes fails with the errno named ``value``); lost (the same, but it was
    done: only the reply is lost); power (the machine is off).
    """

    kind: str
    rank: int
    at: int
    value: str = ""

    @classmethod
    def parse(cls, text: str) -> Strike:
        """``kill:1@83``, ``stop:0@40:30``, ``fail:1@12:ENOSPC``, ``power@200``."""
        head, _, rest = text.partition("@")
        kind, _, rank = head.partition(":")
        at, _, value = rest.partition(":")
        if kind not in ("kill", "stop", "slow", "fail", "lost", "power") or not at.isdigit() or (kind != "power") != rank.isdigit():
            raise ValueError(f"a fault is 'kind:rank@operation[:value]', not {text!r}")
        return cls(kind, int(rank or 0), int(at), value)

    def __str__(self) -> str:
        who = "" if self.kind == "power" else f":{self.rank}"
        return f"{self.kind}{who}@{self.at}" + (f":{self.value}" if self.value else "")


class Told(CheckpointManager):
    """A manager that remembers what it was asked to save, and what it said about it, as its caller heard it."""

    _calls: int
    _polls: int
    _heard: list[tuple[int, SaveHandle | str]]
    _book: Book
    faced: list[str]
    said: list[str]

    @classmethod
    def open(cls, book: Book, **options: Any) -> Told:
        manager = cls.__new__(cls)
        manager._calls, manager._polls, manager._heard, manager._book = 0, 0, [], book
        manager.faced, manager.said = [], []
        book.managers.append(manager)
        manager.__init__(**options)  # type: ignore[misc]
        return manager

    def save(self, step: int, payload: Any, **more: Any) -> SaveHandle:
        call = self._calls
        self._calls += 1
        before = payload.data
        self._book.begin(call, step, self._group.rank, self._group.world, before)
        try:
            with self._facing(f"save {call}"):
                handle = super().save(step, payload, **more)
        except DistckptError as error:
            if not getattr(error, "background", False):
                self._heard.append((call, verdict_of(error)))
            if payload.data != before:
                self._book.disturbed.append(f"the state of rank {self.rank} in the save of step {step}")
            raise
        self._heard.append((call, handle))
        return handle

    def poll(self, step: int) -> Todo:
        self._polls += 1
        with self._facing(f"poll {self._polls}"):
            return super().poll(step)

    def wait(self, timeout: float | None = None) -> bool:
        with self._facing(f"wait after save {self._calls}"):
            return super().wait(timeout)

    def close(self) -> None:
        with self._facing("close"):
            super().close()

    @contextmanager
    def _facing(self, where: str) -> Iterator[None]:
        try:
            yield
        except DistckptError as error:
            self.said.append(str(error))
            if getattr(error, "background", False) or where.startswith("poll"):
                self.faced.append(where)
            raise

    def verdicts(self) -> Iterator[tuple[int, str]]:
        """(number of the call, verdict) of every save whose end this rank has heard."""
        for call, heard in self._heard:
            if isinstance(heard, str):
                yield call, heard
            elif heard.exception() is not None:
                self.said.append(str(heard.exception()))
                yield call, verdict_of(heard.exception())
            elif heard.done():
                yield call, SKIPPED if heard.skipped else COMMITTED


def verdict_of(error: BaseException | None) -> str:
    return {"aborted": ABORTED}.get(str(getattr(error, "outcome", "")), UNKNOWN) if isinstance(error, SaveError) else UNKNOWN


class Book:
    """The saves of one job, in the order of their calls."""

    def __init__(self) -> None:
        self.saves: list[tuple[int, dict[str, bytes]]] = []
        self.managers: list[Told] = []
        self.disturbed: list[str] = []

    def begin(self, call: int, step: int, rank: int, world: int, data: bytes) -> None:
        if call == len(self.saves):
            self.saves.append((step, {}))
        self.saves[call][1][f"data.rank-{rank:05d}-of-{world:05d}.bin"] = bytes(data)

    def tell(self) -> list[Save]:
        saves = [Save(step, checker.content_of(files)) for step, files in self.saves]
        for manager in self.managers:
            for call, verdict in manager.verdicts():
                saves[call].told[manager._group.rank] = verdict
        return saves


@dataclass
class Run:
    """What came of a simulation. ``violations``: what the checker and the schedule's own rules found; empty is well.
    ``choices`` tells schedules apart; ``outcome`` what a reader and the ranks saw."""

    violations: list[str] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    resumed: dict[int, Any] = field(default_factory=dict)
    operations: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    total: int = 0
    steps: int = 0
    states: int = 0
    fired: bool = True
    hung: list[str] = field(default_factory=list)
    seconds: float = 0.0
    noticed: float = 0.0
    trace: list[str] = field(default_factory=list)
    stacks: str = ""
    outcome: str = ""
    managers: dict[int, Told] = field(default_factory=dict)


class Simulation:
    """``policy`` makes the schedule (None: one of several kinds, drawn with ``seed``). ``options`` go to every manager.
    ``cuts``: how many of the disks that a power cut may leave are restarted from. ``apart``: every rank has a host of its own,
    so that no kernel can tell another rank which process has ended."""

    def __init__(self, world: int = 2, seed: int = 0, faults: Sequence[str | Strike] = (), *, keep: int | None = 2,
                 policy: Callable[[int], Policy] | None = None, timeouts: Timeouts = QUICK, cuts: int = 2, horizon: float = 900.0, limit: int = 400_000,
                 traced: bool = False, apart: bool = False, disk: Callable[[], CrashFiles] = lambda: CrashFiles("/disk"), **options: Any) -> None:
        self.world, self.seed, self.keep, self.cuts, self.horizon, self.traced = world, seed, keep, cuts, horizon, traced
        self.limit, self.apart = limit, apart
        self.strikes = [Strike.parse(f) if isinstance(f, str) else f for f in faults]
        self.options = {"stop_signals": (), "keep_last": keep, "timeouts": timeouts, **options}
        self.files = disk()
        self._policy = policy or draw
        self._jobs = 0

    def run(self, program: Program, restart: bool = True) -> Run:
        """``program`` on every rank, the faults, and with ``restart`` what follows; judged."""
        with quiet(), watched_gates():
            job = Job(self, self.files, self.strikes)
            run = job.run(program)
            if restart:
                lost = any(strike.kind == "power" for strike in self.strikes) and run.fired
                disks = self.files.crash_states(self.cuts, self.seed) if lost else [self.files]
                for number, disk in enumerate(disks):
                    run.states += 1
                    if number:
                        self._restart(run, disk, list(run.saves))
                    else:
                        self._restart(run, disk, run.saves)
            return run

    def _restart(self, run: Run, disk: CrashFiles, saves: list[Save]) -> None:
        """A new job on what is left: resume, save once more, and be judged before and after."""
        job = Job(self, disk, [])
        seen: dict[int, Any] = {}
        trees: list[dict[str, bytes]] = []

        def program(manager: Told, rank: int) -> None:
            found = manager.resume(verify="digest")
            if rank == 0:
                trees.append(tree_of(disk))
            step = found.step
            seen[rank] = None if found.checkpoint is None else (found.checkpoint.step, content_at(disk, found.checkpoint.path))
            manager.save((step or 0) + 1000, State(b"after the restart, of rank %d" % rank))

        after = job.run(program)
        for rank, error in after.errors.items():
            seen.setdefault(rank, f"{type(error).__name__}: {error}")
        run.resumed, run.trace = seen, run.trace + after.trace
        run.hung += after.hung
        run.steps += after.steps
        story = Story(saves, keep=self.keep)
        errors = [text for manager in run.managers.values() for text in manager.said] + [str(e) for e in run.errors.values()]
        injected = [(os.strerror(getattr(errno, s.value)),) for s in self.strikes if s.kind == "fail"
                    and any(ABORTED in save.told.values() for save in saves)]
        found = Found(trees[0] if trees else tree_of(disk), seen, alive=[], errors=errors, injected=injected,
                      disturbed=[what for m in run.managers.values() for what in m._book.disturbed])
        run.violations += checker.check(story, found)
        run.violations += [f"{line} (after the restart)" for line in after.violations]
        went_on = len(after.saves) == 1 and set(after.saves[0].told.values()) == {COMMITTED}
        final = Story([*saves, *after.saves], keep=self.keep)
        wrong = checker.check(final, Found(tree_of(disk), {}, went_on=went_on))
        run.violations += [f"{line} (after one more save)" for line in wrong if went_on or not trees]
        if not went_on:
            run.violations.append(f"I8: the save after the restart did not work: {after.errors}")
        standing = sorted(checker.standing(found.root).values())
        run.outcome = f"{run.outcome}|{standing}|{[sorted(s.told.items()) for s in saves]}|{sorted(seen.items())}"


class Job:
    """The processes of one job, from start to end."""

    def __init__(self, simulation: Simulation, disk: CrashFiles, strikes: Sequence[Strike]) -> None:
        self.simulation, self.disk, self.strikes = simulation, disk, list(strikes)
        simulation._jobs += 1
        self.number = simulation._jobs
        self.scheduler = Scheduler(simulation._policy(simulation.seed * 7 + self.number), simulation.horizon, simulation.limit,
                                   simulation.traced)
        self.store = SimStore()
        self.living: set[Identity] = set()
        self.book = Book()
        self.faulty: list[faults.FaultyFiles] = []
        self.struck = 0

    def run(self, program: Program) -> Run:
        scheduler, world = self.scheduler, self.simulation.world
        disk = self.disk
        visit = scheduler.visit
        disk.before_op = lambda op, path: visit("file", op, path)
        processes = [Process(f"{self.number}.{rank}") for rank in range(world)]
        scheduler.processes = processes
        managers: dict[int, Told] = {}

        def start() -> None:
            for rank, process in enumerate(processes):
                scheduler.spawn(process, "main", self._main(program, rank, process, managers))
                for strike in self.strikes:
                    self._arm(strike, rank, process)
            processes[0].at_end.append(lambda: self.store.close(scheduler))

        try:
            hung = scheduler.run(start)
            stacks = scheduler.stacks() if hung else ""
        finally:
            owned._open.clear()
            scheduler.dispose()
            disk.before_op = None
        run = Run(hung=hung, stacks=stacks, managers=managers, saves=self.book.tell(), steps=scheduler.steps,
                  total=scheduler.total, seconds=scheduler.now - 1_000.0, trace=scheduler.trace or [])
        for rank, process in enumerate(processes):
            run.values[rank] = process.value
            run.operations[rank] = process.operations
            if process.error is not None:
                run.errors[rank] = process.error
        for rank, manager in managers.items():
            if isinstance(manager._seams.files, faults.FaultyFiles):
                run.writes[rank] = manager._seams.files.count
        run.fired = self.struck + sum(f.fired for files in self.faulty for f in files.faults) >= len(self.strikes)
        run.violations += [f"I6: {name} never ended" for name in hung]
        run.violations += [f"I6: {text}" for text in scheduler.died]
        run.violations += self._one_step(managers, processes)
        run.outcome = str([(rank, type(error).__name__) for rank, error in run.errors.items()])
        return run

    def _one_step(self, managers: dict[int, Told], processes: list[Process]) -> list[str]:
        """P5: what failed in the background is raised on every rank at the same boundary."""
        disturbed = any(s.kind in ("kill", "power", "stop") for s in self.strikes)
        lost = any(isinstance(p.error, CoordinatorLost) for p in processes)
        faced = {rank: manager.faced for rank, manager in managers.items()}
        if disturbed or lost or len({repr(where) for where in faced.values()}) <= 1:
            return []
        return [f"P5: a failed background save was raised at different places: {faced}"]

    def _main(self, program: Program, rank: int, process: Process, managers: dict[int, Told]) -> Callable[[], Any]:
        scheduler, simulation = self.scheduler, self.simulation
        host = f"host-{rank if simulation.apart else 0}"
        me = Identity(host, 100 * self.number + rank, f"boot of {host}", "pid:[1]", str(self.number))
        runtime = SimRuntime(scheduler, process, me, self.living, simulation.seed * 31 + self.number * 8 + rank)
        server = _Server(self.store, scheduler) if rank == 0 else None

        def main() -> Any:
            nonlocal server
            found = Bootstrap("simulated", rank, simulation.world, lambda: Client(SimClient(self.store, scheduler), ""), server)
            server = None
            seams = Seams(self._files(rank), runtime, found)
            with Told.open(self.book, root=ROOT, seams=seams, **simulation.options) as manager:
                managers[rank] = manager
                return program(manager, rank)

        return main

    def _files(self, rank: int) -> Files:
        mine = [s for s in self.strikes if s.rank == rank and s.kind in ("fail", "lost")]
        if not mine:
            return self.disk
        files = faults.FaultyFiles(self.disk, *[faults.fail(getattr(errno, s.value or "EIO"), s.at, after=s.kind == "lost")
                                                for s in mine])
        self.faulty.append(files)
        return files

    def _arm(self, strike: Strike, rank: int, process: Process) -> None:
        scheduler = self.scheduler

        def hit(what: Callable[[], None]) -> Callable[[], None]:
            def go() -> None:
                self.struck += 1
                what()
            return go

        if strike.kind == "power" and rank == 0:
            def power() -> None:
                for each in scheduler.processes:
                    scheduler.kill(each)
            scheduler.due.setdefault(strike.at, []).append(hit(power))
        if strike.rank != rank or strike.kind in ("power", "fail", "lost"):
            return
        seconds = float(strike.value) if strike.value else None
        act: Callable[[], None]
        if strike.kind == "kill":
            act = hit(lambda: scheduler.kill(process))
        elif strike.kind == "stop":
            act = hit(lambda: scheduler.stop(process, seconds))
        else:
            act = hit(lambda: setattr(process, "delay", seconds or 0.1))
        process.due.setdefault(strike.at, []).append(act)


class _Server:
    """Held by rank 0's bootstrap alone: when it lets go, the store is gone."""

    def __init__(self, store: SimStore, scheduler: Scheduler) -> None:
        self._store, self._scheduler = store, scheduler

    def __del__(self) -> None:
        self._store.close(self._scheduler)


def draw(seed: int) -> Policy:
    """The kind of schedule that belongs to ``seed``: random walks, from calm to restless, and priorities that change."""
    kind = seed % 5
    if kind < 3:
        return Walk(seed, (0.02, 0.2, 1.0)[kind])
    return Priorities(seed, (2, 5)[kind - 3], 4_000)


def tree_of(disk: CrashFiles) -> dict[str, bytes]:
    """Every file under the root, as the checker wants it."""
    start = f"{ROOT}/"
    return {path[len(start):]: data for path, data in disk.snapshot().items() if data is not None and path.startswith(start)}


def content_at(disk: CrashFiles, path: str) -> str:
    """What stands in the checkpoint at ``path`` now."""
    start = f"{path}/"
    return checker.content_of({p[len(start):]: data for p, data in disk.snapshot().items()
                               if data is not None and p.startswith(start) and not p.endswith("/commit.json")})


@contextmanager
def watched_gates() -> Iterator[None]:
    before = background.Gate
    background.Gate = WatchedGate  # type: ignore[misc]
    try:
        yield
    finally:
        background.Gate = before  # type: ignore[misc]


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines: they would take most of the time, and nobody reads a million of them."""
    before = logging.root.manager.disable
    if before >= logging.CRITICAL:
        yield
        return
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
