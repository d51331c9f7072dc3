"""One simulated job: its processes, what strikes them, and how they ended."""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from distckpt import background, owned
from distckpt.coordination.bootstrap import Bootstrap
from distckpt.coordination.store import Client
from distckpt.durable import Files
from distckpt.options import Seams
from distckpt.payloads import torchfile
from distckpt.reader import Root
from distckpt.runtime import Identity
from distckpt.saving.piecewriter import PieceWriter
from distckpt.testing import faults
from distckpt.testing.checker import Save
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.scheduler import Policy, Process, Scheduler
from distckpt.testing.simruntime import SimClient, SimRuntime, SimStore, WatchedGate
from distckpt.testing.told import Book, Contents, Told, contents_written

ROOT = "/disk/run"
KINDS = ("kill", "stop", "slow", "fail", "lost", "power", "node")

Program = Callable[[Told, int], Any]


@dataclass(frozen=True)
class Strike:
    """One fault: ``kind`` happens to ``rank`` at its ``at``-th operation on files or the store (power: at that of all ranks).

    kill; stop (SIGSTOP for ``value`` seconds, without: for ever); slow (every operation takes ``value`` seconds from there on);
    fail (the ``at``-th operation of that rank that writes fails with the errno named ``value``); lost (the same, but it was
    done: only the reply is lost); power (the machine is off); node (that of the rank is: every rank on its disk).
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
        if kind not in KINDS or not at.isdigit() or (kind != "power") != rank.isdigit():
            raise ValueError(f"a fault is 'kind:rank@operation[:value]', not {text!r}")
        return cls(kind, int(rank or 0), int(at), value)

    def __str__(self) -> str:
        who = "" if self.kind == "power" else f":{self.rank}"
        return f"{self.kind}{who}@{self.at}" + (f":{self.value}" if self.value else "")


@dataclass(frozen=True)
class Moment:
    """When something happened: on the job's clock, and after how many operations, of all ranks (``total``) and of each."""

    seconds: float
    total: int
    operations: Mapping[int, int]


@dataclass
class Ended:
    """How a job ended. By rank: ``values`` and ``errors`` of the programs, ``operations`` that others could see, ``managers``,
    ``told``: when it first raised after a fault, or ended. ``struck``: when each fault fired, by its place among them; ``fired``:
    whether every one did. ``said``: what ranks were told; ``injected``: words that must be among it. ``seconds`` passed on its
    own clock. ``keys``: what is left in the store. ``pinned``: steps."""

    violations: list[str] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    managers: dict[int, Told] = field(default_factory=dict)
    operations: dict[int, int] = field(default_factory=dict)
    total: int = 0
    steps: int = 0
    fired: bool = True
    struck: dict[int, Moment] = field(default_factory=dict)
    told: dict[int, float] = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)
    stacks: str = ""
    seconds: float = 0.0
    keys: int = 0
    pinned: set[int] = field(default_factory=set)
    trace: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    injected: list[tuple[str, ...]] = field(default_factory=list)
    disturbed: list[str] = field(default_factory=list)


class Job:
    """The processes of one job, from start to end."""

    def __init__(self, number: int, disk: CrashFiles, world: int, seed: int, policy: Policy, strikes: Sequence[Strike],
                 options: dict[str, Any], *, apart: bool, horizon: float, limit: int, traced: bool,
                 disks: Sequence[CrashFiles] = ()) -> None:
        """``disks``: that of each rank, where the nodes have disks of their own."""
        self.number, self.disk, self.world, self.seed, self.strikes, self.apart = number, disk, world, seed, list(strikes), apart
        self.disks = list(disks)
        self.file_faults: Mapping[int, Sequence[faults.Fault]] = options.pop("file_faults", {})
        self.view: Callable[[Files, int, SimRuntime], Files] | None = options.pop("files", None)
        self.contents: Contents = options.pop("contents", contents_written)
        self.options = options
        self.scheduler = Scheduler(policy, horizon, limit, traced)
        self.living: set[Identity] = set()
        self.books = [self.book()]
        self.managers: dict[int, Told] = {}
        self._struck: dict[int, Moment] = {}
        self._told: dict[int, float] = {}

    def run(self, program: Program, beside: Mapping[str, Callable[[Beside], Any]]) -> Ended:
        scheduler, world = self.scheduler, self.world
        names = [str(rank) for rank in range(world)] + list(beside)
        processes = scheduler.processes = [Process(f"{self.number}.{name}") for name in names]
        store = SimStore()
        visit = scheduler.visit
        for disk in {id(disk): disk for disk in [self.disk, *self.disks]}.values():
            disk.before_op = lambda op, path: visit("file", op, path)

        def start() -> None:
            server = _Server(store, scheduler)
            for rank, process in enumerate(processes):
                node = self.disks.index(self.disks[rank]) if self.disks and rank < world else 0
                host = f"host-{rank if self.apart or rank >= world else node}"
                me = Identity(host, 100 * self.number + rank, f"boot of {host}", "pid:[1]", str(self.number))
                runtime = SimRuntime(scheduler, process, me, self.living, self.seed * 8 + rank)
                if rank < world:
                    found = Bootstrap("simulated", rank, world, lambda: Client(SimClient(store, scheduler), ""),
                                      server if rank == 0 else None)
                    target = self._rank(program, rank, Seams(self._files(rank, runtime), runtime, found))
                else:
                    target = self._other(beside[names[rank]], Beside(self, rank, self._files(rank, runtime), runtime))
                scheduler.spawn(process, "main", target)
                for number, strike in enumerate(self.strikes):
                    self._arm(number, strike, rank, process)
            processes[0].at_end.append(lambda: store.close(scheduler))

        with quiet(), watched_gates():
            try:
                hung = scheduler.run(start)
                stacks = scheduler.stacks() if hung else ""
            finally:
                owned._open.clear()
                scheduler.dispose()
                for disk in [self.disk, *self.disks]:
                    disk.before_op = None
        ended = Ended(hung=hung, stacks=stacks, managers=self.managers, saves=self._story(),
                      steps=scheduler.steps, total=scheduler.total, seconds=scheduler.now - 1_000.0, keys=len(store.data),
                      trace=scheduler.trace or [])
        for rank, process in enumerate(processes):
            ended.values[rank], ended.operations[rank] = process.value, process.operations
            if process.error is not None:
                ended.errors[rank] = process.error
        ended.struck, ended.fired, ended.told = self._struck, len(self._struck) == len(self.strikes), self._told
        ended.said = [text for book in self.books for manager in book.managers for text in manager.said]
        ended.said += [str(error) for error in ended.errors.values()]
        ended.pinned = set[int]().union(*(book.pinned for book in self.books))
        ended.disturbed = [what for book in self.books for what in book.disturbed]
        ended.injected = [(os.strerror(getattr(errno, s.value or "EIO")),) for s in self.strikes
                          if s.kind == "fail" or (s.kind == "lost" and len(self.strikes) > 1)]
        ended.violations = [f"I6: {name} never ended" for name in hung] + [f"I6: {text}" for text in scheduler.died]
        return ended

    def _story(self) -> list[Save]:
        told = [(when, number, save) for book in self.books
                for number, (when, save) in enumerate(zip(book.begun, book.tell(), strict=True))]
        return [save for _, _, save in sorted(told, key=lambda entry: entry[:2])]

    def book(self) -> Book:
        return Book(lambda: self.scheduler.steps, self.contents)

    def _rank(self, program: Program, rank: int, seams: Seams) -> Callable[[], Any]:
        def main() -> Any:
            try:
                manager = self.managers[rank] = Told.open(self.books[0], root=ROOT, seams=seams, told=lambda: self._tell(rank),
                                                          **self.options)
                with manager:
                    return program(manager, rank)
            finally:
                self._tell(rank)

        return main

    def _tell(self, rank: int) -> None:
        """This rank was told something: the first time after a fault counts."""
        if self._struck:
            self._told.setdefault(rank, self.scheduler.now - 1_000.0)

    def _other(self, program: Callable[[Beside], Any], me: Beside) -> Callable[[], Any]:
        return lambda: program(me)

    def _files(self, rank: int, runtime: SimRuntime) -> Files:
        files: Files = self.disks[rank] if rank < len(self.disks) else self.disk
        found = list(self.file_faults.get(rank, ()))
        for number, strike in enumerate(self.strikes):
            if strike.rank == rank and strike.kind in ("fail", "lost"):
                fault = faults.fail(getattr(errno, strike.value or "EIO"), strike.at, after=strike.kind == "lost")
                fault.note = self._noting(number)
                found.append(fault)
        if found:
            files = faults.FaultyFiles(files, *found)
        return files if self.view is None else self.view(files, rank, runtime)

    def _noting(self, number: int) -> Callable[[object], None]:
        """What is called when a fault fires."""
        def note(ignored: object = None) -> None:
            scheduler = self.scheduler
            operations = {rank: process.operations for rank, process in enumerate(scheduler.processes)}
            self._struck[number] = Moment(scheduler.now - 1_000.0, scheduler.total, operations)

        return note

    def _arm(self, number: int, strike: Strike, rank: int, process: Process) -> None:
        scheduler = self.scheduler
        note = self._noting(number)

        def hit(what: Callable[[], None]) -> Callable[[], None]:
            def go() -> None:
                note(None)
                what()

            return go

        def power() -> None:
            for each in scheduler.processes:
                scheduler.kill(each)

        if strike.kind == "power" and rank == 0:
            scheduler.due.setdefault(strike.at, []).append(hit(power))
        if strike.rank != rank or strike.kind in ("power", "fail", "lost"):
            return
        def node() -> None:
            for other, each in enumerate(scheduler.processes[:self.world]):
                if not self.disks or self.disks[other] is self.disks[rank]:
                    scheduler.kill(each)

        seconds = float(strike.value) if strike.value else None
        act: dict[str, Callable[[], None]] = {
            "kill": lambda: scheduler.kill(process), "node": node, "stop": lambda: scheduler.stop(process, seconds),
            "slow": lambda: setattr(process, "delay", seconds or 0.1)}
        process.due.setdefault(strike.at, []).append(hit(act[strike.kind]))


class Beside:
    """A process of its own beside the ranks: a reader, or another job of one rank on the same root."""

    def __init__(self, job: Job, number: int, files: Files, runtime: SimRuntime) -> None:
        self._job, self._number = job, number
        self.files, self.runtime = files, runtime

    def root(self) -> Root:
        """As ``distckpt.open`` gives it."""
        return Root(ROOT, self.files, self.runtime)

    def manager(self, **options: Any) -> Told:
        """The manager of another job, of one rank. Its saves come after the ranks' in the story."""
        store, scheduler = SimStore(), self._job.scheduler
        book = self._job.book()
        self._job.books.append(book)
        found = Bootstrap("simulated", 0, 1, lambda: Client(SimClient(store, scheduler), ""))
        return Told.open(book, root=ROOT, seams=Seams(self.files, self.runtime, found), **{**self._job.options, **options})


class _Server:
    """Held by rank 0's bootstrap alone: when it lets go, the store is gone."""

    def __init__(self, store: SimStore, scheduler: Scheduler) -> None:
        self._store, self._scheduler = store, scheduler

    def __del__(self) -> None:
        self._store.close(self._scheduler)


@contextmanager
def watched_gates() -> Iterator[None]:
    before, write = background.Gate, torchfile.write  # type: ignore[attr-defined]
    background.Gate = WatchedGate  # type: ignore[attr-defined]
    torchfile.write = _at_once
    try:
        yield
    finally:
        background.Gate, torchfile.write = before, write  # type: ignore[attr-defined]


def _at_once(value: Any, out: PieceWriter) -> None:
    """``torchfile.write`` in two: torch's zip writer holds a lock while it writes, and no other rank may have its turn then."""
    data = io.BytesIO()
    with torchfile.without_crc(out.digest is not None):
        torch.save(value, data)
    out.write(data.getvalue())


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
