"""What a simulated job saves, and what its callers were told: the story that the checker judges by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distckpt.checkpoint import Checkpoint
from distckpt.errors import CoordinatorLost, DistckptError, RankTimeout, SaveError
from distckpt.manager import CheckpointManager
from distckpt.payloads.base import Ranks, as_payload
from distckpt.saving.files import RankFiles
from distckpt.saving.handle import SaveHandle
from distckpt.saving.piecewriter import PieceWriter
from distckpt.steps import Todo
from distckpt.testing import checker
from distckpt.testing.checker import ABORTED, COMMITTED, SKIPPED, UNKNOWN, Save
from distckpt.testing.crashfs import CrashFiles

_ALONE = "/alone"


class State:
    """What a rank trains: some bytes, saved as ``data.bin`` in ``folder``."""

    collective = False
    members: list[str] = []

    def __init__(self, data: bytes = b"", folder: str = "") -> None:
        self.data, self.folder = data, folder

    def path(self, rank: int, world: int) -> str:
        return (f"{self.folder}/" if self.folder else "") + f"data.rank-{rank:05d}-of-{world:05d}.bin"

    def check(self) -> None:
        return None

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        here = files.below(self.folder) if self.folder else files
        here.put("data.bin", self._pour)

    def _pour(self, out: PieceWriter) -> None:
        half = len(self.data) // 2
        out.write(self.data[:half])
        out.flush()  # two operations, so that something can happen between them, as in a file that is not so small
        out.write(self.data[half:])

    def tree(self) -> Any:
        return {"data": self.data}

    def of(self, tree: Any) -> State:
        return type(self)(tree["data"], self.folder)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        self.data = checkpoint._files.read(f"{checkpoint.path}/{self.path(ranks.rank, ranks.world)}", 1 << 20)


class Told(CheckpointManager):
    """A manager that remembers what it was asked to save, and what it said about it, as its caller heard it.

    ``places`` counts the calls at which something may be raised. ``faced``: (number, name) of those that raised a failed
    background save, or raised in ``poll``; ``lost``: the number of the one that said that rank 0 is gone or
    stands still. ``overdue``: ``close``
    gave up on a save that was still in flight, which is a deadline of this rank's own and no failed save.
    """

    _calls: int
    _polls: int
    _heard: list[tuple[int, SaveHandle | str]]
    _book: Book
    faced: list[tuple[int, str]]
    said: list[str]
    places: int
    lost: int | None
    overdue: bool
    _tell: Callable[[], None]

    @classmethod
    def open(cls, book: Book, told: Callable[[], None] = lambda: None, **options: Any) -> Told:
        """``told`` is called whenever it raises."""
        manager = cls.__new__(cls)
        manager._tell = told
        manager._calls, manager._polls, manager._heard, manager._book = 0, 0, [], book
        manager.faced, manager.said, manager.places, manager.lost, manager.overdue = [], [], 0, None, False
        book.managers.append(manager)
        manager.__init__(**options)  # type: ignore[misc]
        return manager

    def _save(self, series: str, step: int, payload: Any, *more: Any) -> SaveHandle:
        call = self._calls
        self._calls += 1
        before = self._book.files(payload, self.rank, self.world)
        self._book.begin(call, step, before, series)
        try:
            with self._facing(f"save {call}"):
                handle = super()._save(series, step, payload, *more)
        except DistckptError as error:
            if not getattr(error, "background", False):
                self._heard.append((call, verdict_of(error)))
            if self._book.files(payload, self.rank, self.world) != before:
                self._book.disturbed.append(f"the state of rank {self.rank} in the save of step {step}")
            raise
        self._heard.append((call, handle))
        return handle

    def pin(self, step: int) -> None:
        """Keep the checkpoint of ``step`` from rotation, as a person does. On one rank."""
        root = self._reader()
        root.lease(next(found for found in root.checkpoints() if found.step == step), "pinned", None)
        self._book.pinned.add(step)

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
        self.places += 1
        try:
            yield
        except DistckptError as error:
            self.said.append(str(error))
            self._tell()
            if isinstance(error, CoordinatorLost) or (isinstance(error, RankTimeout) and error.phase == "freeze"):
                self.lost = self.places if self.lost is None else self.lost
            elif where == "close" and isinstance(error, SaveError) and " has not ended within " in error.message:
                self.overdue = True
            elif getattr(error, "background", False) or where.startswith("poll"):
                self.faced.append((self.places, where))
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


Contents = Callable[[Any, int, int], dict[str, bytes]]
"""``(payload, rank, world)`` to what that rank writes of it: bytes by path within the checkpoint."""


def contents_of_state(payload: State, rank: int, world: int) -> dict[str, bytes]:
    return {payload.path(rank, world): bytes(payload.data)}


def contents_written(payload: Any, rank: int, world: int) -> dict[str, bytes]:
    """What ``payload`` itself writes where nobody is beside it and nothing goes wrong: of one that runs no collectives."""
    disk = CrashFiles(_ALONE)
    as_payload(payload).write(RankFiles(disk, _ALONE, rank, world, algorithm="xxh3-128", aborted=lambda: False),
                  Ranks(rank, world, lambda: None))
    return {path[len(_ALONE) + 1:]: data for path, data in disk.snapshot().items()
            if data is not None and path.startswith(f"{_ALONE}/")}


class Book:
    """The saves of one job, in the order of their calls. ``moment`` says when each was begun, among those of other jobs.
    ``pinned``: steps that rotation may not take any more."""

    def __init__(self, moment: Callable[[], int], contents: Contents = contents_written) -> None:
        self.moment, self._contents = moment, contents
        self.begun: list[int] = []
        self.saves: list[tuple[int, str, dict[str, bytes]]] = []
        self.pinned: set[int] = set()
        self.managers: list[Told] = []
        self.disturbed: list[str] = []

    def files(self, payload: Any, rank: int, world: int) -> dict[str, bytes]:
        return (contents_of_state if isinstance(payload, State) else self._contents)(payload, rank, world)

    def begin(self, call: int, step: int, files: dict[str, bytes], series: str) -> None:
        if call == len(self.saves):
            self.saves.append((step, series, {}))
            self.begun.append(self.moment())
        self.saves[call][2].update(files)

    def tell(self) -> list[Save]:
        saves = [Save(step, checker.content_of(files), series=series) for step, series, files in self.saves]
        for manager in self.managers:
            for call, verdict in manager.verdicts():
                saves[call].told[manager._group.rank] = verdict
        return saves
