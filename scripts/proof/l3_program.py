"""What the ranks run on a disk that is cut: resume, one save that must work, then saves of every kind until the power goes.

Every rank writes what it was told, and what it resumed from, to a ledger outside that disk. What a save must hold is known
before it begins: ``golden`` makes the bytes from the save's number alone.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.serialization import set_crc32_options

import distckpt
from distckpt import recovery
from distckpt.durable import REAL, Files
from distckpt.errors import DistckptError, ResumeError, SaveError
from distckpt.layout import Layout, rank_name
from distckpt.options import Seams, Timeouts
from distckpt.payloads import pieces
from distckpt.retention import KeepLast
from distckpt.saving import writer
from distckpt.saving.committer import Committer
from distckpt.saving.handle import SaveHandle
from distckpt.series import SeriesView
from distckpt.testing import checker
from distckpt.testing.faults import Fault, FaultyFiles, Operation, call, lie
from scripts.proof import disks
from tests.crash.forks import Place
from tests.onerank import unclean

WORLD, KEEP = 2, 2
PATIENCE = 20.0
SAVES = ("shards behind", "files", "replace", "shards", "shards behind")
"""One life's saves after the one that shows that saving works. "behind": in the background."""
ROLLING, ROLLING_KEEP = "rolling", 1
"""The second series, and how many of it stay."""
OPTIONS_SAVES = ("options behind", "options rolling behind", "options behind", "options rolling behind", "options behind")
"""Those of a life with every option on: copied beside the training, of which one part is linked, in two series. The best one is
kept in the other layers: here a root is many lives', of which few have metrics."""

_DATA = ("fsync", "fsync_file")
MUTANTS: dict[str, dict[str, Any]] = {
    "data is not synced": {"op": (*_DATA, "start_writeback"), "path": ".rank-"},
    "rank 1 does not sync its data": {"op": (*_DATA, "start_writeback"), "path": ".rank-00001-"},
    "the marker is not synced": {"op": "fsync", "path": "commit.json"},
    "no directory is synced": {"op": "fsync_dir", "path": ""},
}
"""Calls of the library that are left out; of data the hints as well, or it is on the disk a moment later, as a rule. The layer
turns red with each but the last: on a file system with a journal the sync of a file brings the names before it along, and what
is committed in staging is rolled forward when its last name is lost. The
model of a disk that owes nothing (``distckpt.testing.crashfs``) is what shows that syncs of directories are needed; here
``NO_SECOND_LINE`` shows that their loss is seen."""
ROTATES_FIRST = "rotation before the commit"
NO_SECOND_LINE = "no directory is synced, nothing is rolled forward"
WRITER_FIRST = "the writer process does not sync its data"
ALL_MUTANTS = (*MUTANTS, ROTATES_FIRST, NO_SECOND_LINE, WRITER_FIRST)


@dataclass(frozen=True)
class Plan:
    """One life. The cut comes before operation ``n`` of rank ``victim``, counted from the start of the life (``where`` "start")
    or from the first save after the proof that saving works ("saves"); or when rank 0 has announced the ``n``-th of those saves
    and done nothing since ("told"); or ``after`` seconds after the first ("time"); or at the very end ("end"). "check": no saves
    but the one that proves that saving works. ``write_back``: before that operation the kernel happens to write what it holds.
    ``options``: with every option on; by a writer process where no operation has to be counted."""

    where: str = "end"
    victim: int = 0
    n: int = 0
    after: float = 0.0
    write_back: int = 0
    size: int = 3000
    options: bool = False

    @property
    def process(self) -> bool:
        return self.options and self.where in ("end", "time")

    def __str__(self) -> str:
        what = {"time": f"after {self.after:.4f} s", "end": "at the end", "told": f"once save {self.n} was announced"}.get(
            self.where, f"before operation {self.n} of its {self.where}")
        return f"cut {what}, rank {self.victim}" + (f", written back at {self.write_back}" if self.write_back else "") + (
            ", every option on" if self.options else "")


@dataclass
class Life:
    """What a life is given. ``first``: the number of its first save, which is its step as well. ``clock``: a file whose length
    says how far the disk has come."""

    root: str
    mount: str
    ledger: str
    first: int
    plan: Plan
    mutant: str = ""
    clock: str = ""


class Ledger:
    """Lines of JSON, one file per rank and life, each with the time by ``clock``."""

    def __init__(self, path: str, clock: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._clock = clock

    def write(self, event: str, **more: Any) -> None:
        now = os.stat(self._clock).st_size if self._clock else 0
        os.write(self._fd, json.dumps({"event": event, "at": now, **more}).encode() + b"\n")


@dataclass
class Told:
    """What the ledgers of one life say. ``spans``: per save, when it was begun and when each rank was told of it."""

    saves: list[checker.Save] = field(default_factory=list)
    spans: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    resumed: dict[int, tuple[int, str] | str | None] = field(default_factory=dict)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __contains__(self, event: str) -> bool:
        return event in self.events


def read_ledgers(path: str) -> Told:
    found, by_number = Told(), dict[int, int]()
    for rank in range(WORLD):
        name = f"{path}.{rank}"
        lines = open(name, encoding="utf-8").read().splitlines() if os.path.exists(name) else []  # noqa: SIM115
        for line in map(json.loads, lines):
            event, number = line["event"], line.get("number")
            found.events.setdefault(event, []).append({**line, "rank": rank})
            if event == "begin":
                if number not in by_number:
                    by_number[number] = len(found.saves)
                    found.saves.append(checker.Save(line["step"], line["content"], series=line["series"]))
                    found.spans.append((line["at"], {}))
                index = by_number[number]
                assert found.saves[index].content == line["content"], "the ranks disagree about what a save must hold"
                found.spans[index] = min(found.spans[index][0], line["at"]), found.spans[index][1]
            elif event == "told":
                found.saves[by_number[number]].told[rank] = line["verdict"]
                found.spans[by_number[number]][1][rank] = line["at"]
            elif event == "resumed":
                found.resumed[rank] = tuple(line["answer"]) if isinstance(line["answer"], list) else line["answer"]
    return found


# -- what is saved --------------------------------------------------------------------------------------------------------

def _raw(number: int, rank: int, name: str, size: int) -> bytes:
    return (f"{name} of save {number} by {rank};".encode() * (size // 8 + 1))[:size]


def _state(number: int, rank: int, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number * 10 + rank)
    return {"w": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator), "number": torch.tensor(number)}


def _saved(state: Mapping[str, torch.Tensor]) -> bytes:
    out = io.BytesIO()
    set_crc32_options(False)
    torch.save(state, out)
    return out.getvalue()


@functools.lru_cache(maxsize=64)
def golden(number: int, kind: str, size: int) -> str:
    """``checker.content_of`` a save, from its number alone."""
    tree: dict[str, bytes] = {}
    for rank in range(WORLD):
        if kind == "options":
            for part, value in (("frozen", _state(0, rank, size)), ("head", _state(number, rank, size))):
                for index, piece in enumerate(pieces.split(value)):
                    tree[rank_name(f"{part}/{pieces.name('shard.pt', index)}", rank, WORLD)] = _saved(piece)
        elif kind == "files":
            for name in ("a.bin", "sub/deep/b.bin"):
                tree[rank_name(name, rank, WORLD)] = _raw(number, rank, name, size)
        else:
            tree[rank_name("shard.pt", rank, WORLD)] = _saved(_state(number, rank, size))
    if kind == "files":
        tree["vocab.txt"] = _raw(number, 0, "vocab", size)
    return checker.content_of(tree)


# -- the program ----------------------------------------------------------------------------------------------------------

class RankProgram:
    def __init__(self, manager: distckpt.CheckpointManager, ledger: Ledger, size: int) -> None:
        self.manager, self.ledger, self.size = manager, ledger, size
        self._behind: tuple[int, SaveHandle] | None = None
        self._rolling = manager.series(ROLLING, keep_last=ROLLING_KEEP)

    def save(self, number: int, kind: str, step: int, rule: str = "error") -> None:
        """One save, and what this rank is told of it; of one in the background, ``settle`` tells."""
        self.settle()
        what = kind.split()[0] if kind.startswith(("files", "options")) else "shards"
        series = ROLLING if ROLLING in kind else checker.MAIN
        self.ledger.write("begin", number=number, step=step, content=golden(number, what, self.size), series=series)
        with self._telling(number):
            if kind == "files":
                self._files(number, step, rule)
            elif what == "options":
                self._behind = number, self._trained(number, step, self._rolling if series == ROLLING else self.manager)
                return
            else:
                behind = kind.endswith("behind")
                meta = {"number": number, "kind": "shards", "size": self.size}
                handle = self.manager.save(step, distckpt.Shards(_state(number, self.manager.rank, self.size)), meta=meta,
                                           on_exists=rule, background=behind)
                if behind:
                    self._behind = number, handle
                    self.manager.poll(step)
                    return
        self.ledger.write("told", number=number, verdict=checker.COMMITTED)

    def settle(self) -> None:
        if self._behind is not None:
            (number, handle), self._behind = self._behind, None
            with self._telling(number):
                try:
                    handle.result(PATIENCE)
                except OSError:  # it is committed; the cut came before this rank could look at it
                    if not handle.done() or handle.exception() is not None:
                        raise
            self.ledger.write("told", number=number, verdict=checker.COMMITTED)

    @contextmanager
    def _telling(self, number: int) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            self.ledger.write("told", number=number, verdict=error.outcome, why=str(error)[:300])
            raise

    def _trained(self, number: int, step: int, line: distckpt.CheckpointManager | SeriesView) -> SaveHandle:
        """A state that training changes as soon as it may."""
        rank = self.manager.rank
        frozen, head = _state(0, rank, self.size), _state(number, rank, self.size)
        handle = line.save(step, {"frozen": distckpt.Shards(frozen), "head": distckpt.Shards(head)}, background=True,
                           staging="overlap", meta={"number": number, "kind": "options", "size": self.size})
        self.manager.staged()
        for tensor in (*frozen.values(), *head.values()):
            tensor.zero_()
        return handle

    def _files(self, number: int, step: int, rule: str) -> None:
        """Somebody else's writers, and ours, in directories of their own."""
        rank = self.manager.rank
        meta = {"number": number, "kind": "files", "size": self.size}
        with self.manager.saving(step, meta=meta, on_exists=rule) as files:
            with open(files.mine("a.bin"), "wb") as out:
                out.write(_raw(number, rank, "a.bin", self.size))
            with files.writer("sub/deep/b.bin") as piece:
                data = _raw(number, rank, "sub/deep/b.bin", self.size)
                piece.write(data[:self.size // 2])
                piece.flush()
                piece.write(data[self.size // 2:])
            if files.writes("vocab.txt"):
                with open(files.shared("vocab.txt"), "wb") as out:
                    out.write(_raw(number, 0, "vocab", self.size))

    def resume(self) -> None:
        """Resume by digest and load what the payload can load; both are told to the ledger."""
        found = self.manager.resume(verify="digest")
        if found.skipped:
            self.ledger.write("skipped", why=found.skipped)
        point = found.checkpoint
        if point is None:
            self.ledger.write("resumed", answer=None)
            return
        number, kind, size = point.meta["number"], point.meta["kind"], point.meta["size"]
        if kind == "shards":
            holder = {name: torch.zeros_like(value) for name, value in _state(0, 0, size).items()}
            self.manager.restore(distckpt.Shards(holder))
            wanted = _state(number, self.manager.rank, size)
            assert all(torch.equal(holder[name], wanted[name]) for name in wanted), f"not the tensors of save {number}"
        elif kind == "options":
            parts = {"frozen": _state(0, self.manager.rank, size), "head": _state(number, self.manager.rank, size)}
            held = {part: {name: torch.zeros_like(value) for name, value in state.items()} for part, state in parts.items()}
            self.manager.restore({part: distckpt.Shards(state) for part, state in held.items()})
            assert all(torch.equal(held[part][name], value) for part, state in parts.items() for name, value in state.items()), \
                f"not the tensors of save {number}"
        else:
            try:
                with open(point.mine("a.bin"), "rb") as file:
                    data = file.read()
            except OSError as error:
                raise ResumeError(f"the test's own load: {error}", step=point.step) from error
            assert data == _raw(number, self.manager.rank, "a.bin", size), f"not the bytes of save {number}"
        self.ledger.write("resumed", answer=[point.step, golden(number, kind, size)])


def _hook(life: Life, ledger: Ledger) -> Callable[[Operation], None]:
    def strike(operation: Operation) -> None:
        disks.cut(life.mount)
        ledger.write("cut", operation=str(operation))
    return strike


def _without(mutant: str) -> list[Fault]:
    """The faults that make the library forget something."""
    if mutant == ROTATES_FIRST:
        _rotate_first()
        return []
    if mutant == WRITER_FIRST:  # it is a fresh interpreter, so it breaks itself
        begin = "from distckpt.saving.writer import serve\n"
        assert begin in writer._CHILD
        writer._CHILD = writer._CHILD.replace(
            begin, "import distckpt.durable\ndistckpt.durable._File.fsync = lambda self: None\n"
            f"distckpt.durable._File.start_writeback = lambda self, offset, length: None\n{begin}")
        return []
    if mutant == NO_SECOND_LINE:
        recovery._roll_forward = lambda *_: False
        mutant = "no directory is synced"
    return [lie(forever=True, **MUTANTS[mutant])] if mutant else []


def _rotate_first() -> None:
    real = Committer.commit

    def commit(self: Any, go: Any, *rest: Any, **more: Any) -> Any:
        """Makes room first, as many a home-grown trainer does."""
        with self.owned.lock:
            self.rotate(self.request.series, KeepLast(KEEP - 1))
        return real(self, go, *rest, **more)

    Committer.commit = commit  # type: ignore[method-assign]


def manager_of(place: Place, root: str, files: Files, **more: Any) -> distckpt.CheckpointManager:
    torch.set_num_threads(1)
    waits = Timeouts(arrive=PATIENCE, progress=PATIENCE, visible=5, close=PATIENCE)
    return distckpt.CheckpointManager(root, seams=Seams(files=files, bootstrap=place.bootstrap()), timeouts=waits,
                                      **{"keep_last": KEEP, **more})


def live(place: Place, life: Life) -> dict[str, Any]:
    """One life of a rank. Returns how many operations it made up to the saves, and in them. Errors that are not distckpt's
    own, or come before the cut, go to the caller."""
    logging.getLogger().setLevel(logging.WARNING)
    plan, ledger = life.plan, Ledger(f"{life.ledger}.{place.rank}", life.clock)
    files = FaultyFiles(REAL, *_without(life.mutant))
    options = {"dedup": "link", "digest": "sha256", "writer": "process" if plan.process else "thread"} if plan.options else {}
    strike = _hook(life, ledger)
    mine = place.rank == plan.victim
    if mine and plan.where == "start":
        files.faults.append(call(strike, at=plan.n))
    began = time.monotonic()
    try:
        with manager_of(place, life.root, REAL if plan.process else files, **options) as manager:
            rank = RankProgram(manager, ledger, plan.size)
            rank.resume()
            if place.rank == 0:
                _take_stock(manager, life)
            number = life.first
            if plan.where != "start":
                rank.save(number, "options behind" if plan.options else "shards", number)  # by then a writer process is there
                rank.settle()
                ledger.write("went_on")
                if manager._owned is not None:
                    manager._owned.afterwards.catch_up()
                    assert manager._owned.janitor.wait(PATIENCE)
                    ledger.write("garbage", left=garbage(life.root))
            begun = files.count
            if mine:
                _arm(files, plan, life, strike)
            armed = time.monotonic()
            step = number
            for kind in (OPTIONS_SAVES if plan.options else SAVES) if plan.where != "check" else ():
                number += 1
                step = step if kind == "replace" else number
                rank.save(number, kind, step, "replace" if kind == "replace" else "error")
            rank.settle()
            saved = time.monotonic()
    except DistckptError as error:
        ledger.write("error", type=type(error).__name__, text=str(error)[:500], seconds=time.monotonic() - began)
        return {"error": type(error).__name__}
    if plan.options:
        return {}  # an ordinary life has other operations
    return {"start": begun, "saves": files.count - begun, "seconds": saved - armed}


def _arm(files: FaultyFiles, plan: Plan, life: Life, strike: Callable[[Operation], None]) -> None:
    if plan.where == "saves":
        files.faults.append(call(strike, at=plan.n))
    elif plan.where == "told":
        files.faults.append(call(strike, at=plan.n, op="open", path="latest"))
    elif plan.where == "time":
        timer = threading.Timer(plan.after, strike, [Operation(0, "timer", "")])
        timer.daemon = True
        timer.start()
    if plan.write_back:
        files.faults.append(call(lambda _: disks.write_back(life.mount), at=plan.write_back))


def _take_stock(manager: distckpt.CheckpointManager, life: Life) -> None:
    """Everything that stands in the root after the recovery, for the judge."""
    assert manager._owned is not None and manager._owned.janitor.wait(PATIENCE)
    with open(f"{life.ledger}.tree", "wb") as out:
        pickle.dump(checker.tree_of(life.root), out)


def forget(ledger: str) -> None:
    for suffix in (*(f".{rank}" for rank in range(WORLD)), ".tree"):
        with suppress(FileNotFoundError):
            os.unlink(ledger + suffix)


def garbage(root: str) -> list[str]:
    """What stands in staging and trash, besides the temporary of a status file that is just being written."""
    return [name for name in unclean(REAL, Layout.at(root)) if not name.endswith(".tmp")]


def read_stock(ledger: str) -> Mapping[str, bytes] | None:
    try:
        with open(f"{ledger}.tree", "rb") as file:
            tree: dict[str, bytes] = pickle.load(file)
    except FileNotFoundError:
        return None
    return tree
