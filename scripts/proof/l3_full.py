"""Disks that run full: at every point of a save, before a start, and disks too small from the beginning.

Whatever did not fit is ``DiskFull`` on every rank, with the path, what is needed and what is free; the checkpoints before it are
untouched, what the attempt took comes back, and once there is room the next save works without a restart and after one.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distckpt.durable import REAL
from distckpt.errors import ConfigError, DiskFull, ResumeError, SaveError
from scripts.proof import disks
from scripts.proof.disks import MIB
from scripts.proof.l3_judge import Root, badly, shape
from scripts.proof.l3_program import (
    PATIENCE,
    Ledger,
    Life,
    Plan,
    RankProgram,
    garbage,
    live,
    manager_of,
    read_ledgers,
    read_stock,
)
from scripts.proof.layer import Result
from tests.crash.forks import Ended, Place, Stuck, group

KIB = 1 << 10
SIZE = 24 * MIB
SMALL, BIG = 20 * KIB, MIB
KINDS = ("shards", "files", "shards behind")
SLACK = 256 * KIB
"""What directories, the journal and the file system itself may take besides."""


@dataclass(frozen=True)
class Case:
    """``leave``: bytes that are free when the save begins, or the start ("start"), or None on a disk that is tiny by itself
    ("tiny"), where saves grow until one does not fit."""

    what: str
    leave: int
    kind: str = "shards"

    def __str__(self) -> str:
        if self.what == "tiny":
            return f"a disk of {self.leave // KIB} KiB, {self.kind}"
        return f"{self.leave // KIB} KiB free before the {self.what}, {self.kind}"


def _ballast(path: str, leave: int) -> None:
    """Take all but ``leave`` bytes away; a few more are left where ext4 needs them to note what it gave."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        take = REAL.free(os.path.dirname(path)) - leave
        while take > 0:
            try:
                os.posix_fallocate(fd, 0, take)
                return
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                take -= 16 * KIB
    finally:
        os.close(fd)


# -- the ranks' programs --------------------------------------------------------------------------------------------------

def _fill(place: Place, life: Life, case: Case, ballast: str) -> dict[str, Any]:
    """A save that fits, one that does not, room, and one that fits. What the full disk was reported as."""
    with manager_of(place, life.root, REAL) as manager:
        rank = RankProgram(manager, Ledger(f"{life.ledger}.{place.rank}", ""), SMALL)
        rank.resume()
        number, told = life.first, None
        if case.what == "tiny":  # more than half of it is kept back: the room for one more that is as large as the last
            if place.rank == 0:
                _ballast(ballast, REAL.free(life.mount) * 2 // 5)
            sizes = [SMALL * 2 ** power for power in range(12)]
        else:
            rank.save(number, "shards", number)
            sizes = [BIG]
        for rank.size in sizes:
            number += 1
            if place.rank == 0 and case.what != "tiny":
                _ballast(ballast, case.leave)  # no rank writes before rank 0 begins
            told = _told(rank, number, case.kind)
            if told is not None:
                break
        if place.rank == 0 and manager._owned is not None:
            manager._owned.afterwards.catch_up()
            assert manager._owned.janitor.wait(PATIENCE)
            left = garbage(life.root)
            assert told is None or not left, f"I10: {left} still take room"
            with suppress(FileNotFoundError):
                os.unlink(ballast)
        _together(place)
        rank.size = SMALL // 2
        rank.save(number + 1, case.kind, number + 1)
        rank.settle()
    return {"full": told}


def _together(place: Place) -> None:
    """Every rank says what is free when it begins a save, so none begins before there is room again."""
    store = place.store(serve=False)
    store.set(f"room/{place.rank}", "")
    store.wait([f"room/{rank}" for rank in range(place.world)])


def _told(rank: RankProgram, number: int, kind: str) -> dict[str, Any] | None:
    try:
        rank.save(number, kind, number)
        rank.settle()
    except DiskFull as error:
        with suppress(SaveError):
            rank.manager.wait()  # of a save in the background, every rank is told once more at the same call
        return {"path": error.path, "needed": error.needed, "free": error.free, "outcome": error.outcome, "text": str(error)}
    return None


def _start(place: Place, life: Life) -> str:
    """Start and save on a disk that is full from the beginning; the type of the error, if there was one."""
    try:
        with manager_of(place, life.root, REAL) as manager:
            rank = RankProgram(manager, Ledger(f"{life.ledger}.{place.rank}", ""), BIG)
            rank.resume()
            rank.save(life.first, "shards", life.first)
    except (ConfigError, ResumeError, SaveError) as error:
        return type(error).__name__
    return ""


# -- the sweep, in the zygote ---------------------------------------------------------------------------------------------

class _Room:
    """One file system of a known size. ``reached``: what save and start found too full, and what they did not."""

    def __init__(self, kind: str, folder: str, size: int) -> None:
        os.makedirs(folder)
        self.kind, self.folder = kind, folder
        self._disk = None
        self.place = f"{folder}/{kind}"
        if kind == "tmpfs":
            os.makedirs(self.place)
            disks.mount("tmpfs", self.place, kind, f"size={size}")
        else:
            self._disk = disks.Disk(kind, folder, size)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
        else:
            disks.unmount(self.place)
        shutil.rmtree(self.folder)


def _judge(room: _Room, case: Case, result: Result, shapes: set[int]) -> list[str]:
    root, story, ballast = f"{room.place}/run", Root(), f"{room.place}/ballast"
    wrong: list[str] = []

    def life(first: int) -> Life:
        return Life(root, room.place, f"{room.folder}/ledger-{first}", first, Plan("check", size=SMALL // 2))

    def check(first: int) -> None:
        """The same program in new processes: it resumes from the newest, by digest, and saves."""
        ends = group(2, live, life(first))
        told, tree = read_ledgers(life(first).ledger), read_stock(life(first).ledger)
        wrong.extend(story.after(told, tree, complete=True))
        wrong.extend(badly(ends))
        wrong.extend(f"I8: {line['text']}" for line in told.events.get("error", []))
        if tree is not None:
            shapes.add(shape(tree, first))

    try:
        if case.what == "start":
            check(1)
            _ballast(ballast, case.leave)
            ends = group(2, _start, life(11))
            os.unlink(ballast)
            if len({str(end.value) for end in ends}) != 1:
                wrong.append(f"I7: the ranks ended with {[end.value for end in ends]}")
        else:
            ends = group(2, _fill, life(11), case, ballast)
            wrong += _reported(case, ends, root)
        wrong += badly(ends)
        story.after(read_ledgers(life(11).ledger), None, complete=False)
        with suppress(FileNotFoundError):
            os.unlink(ballast)
        check(41)
    except Stuck as hang:
        result.hangs += 1
        wrong.append(f"I6: {hang}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(ballast)
        for name in os.listdir(room.folder):
            if name.startswith("ledger-"):
                os.unlink(f"{room.folder}/{name}")
    return wrong


def _reported(case: Case, ends: list[Ended], root: str) -> list[str]:
    """What is wrong with the reports of a full disk, and with there being one, or none."""
    if not all(end.ok for end in ends):
        return []
    told = [end.value["full"] for end in ends]
    if told[0] != told[1]:
        return [f"I7: rank 0 was told {told[0]}, rank 1 {told[1]}"]
    report = told[0]
    if case.what == "save":
        if report is None and case.leave < 2 * BIG:
            return ["I9: more was saved than there is room for"]
        if report is not None and case.leave > 3 * 2 * BIG + SLACK:
            return [f"I9: there is room enough, and yet: {report['text']}"]
    if case.what == "tiny" and report is None:
        return ["I9: the disk never ran full"]
    if report is None:
        return []
    good = (report["outcome"] == "aborted" and str(report["path"]).startswith(root) and report["needed"]
            and report["free"] is not None and (case.what == "tiny" or report["free"] <= case.leave + SLACK))
    return [] if good else [f"I9: {report}"]


def _cases(rng: random.Random) -> Iterator[tuple[str, int, Case]]:
    """(file system, size, case), for ever: a coarse sweep first, then ever finer."""
    need = 3 * 2 * BIG + SLACK
    step = 256 * KIB
    while True:
        leaves = [leave + rng.randrange(0, step, 4 * KIB) for leave in range(0, need, step)]
        edges = [leave + rng.randrange(0, 8 * KIB, KIB) for leave in range(0, 128 * KIB, 8 * KIB)]
        for kind in ("tmpfs", "ext4"):
            mixed = [Case("save", leave, rng.choice(KINDS)) for leave in leaves]
            mixed += [Case(rng.choice(("start", "save")), leave) for leave in edges]
            rng.shuffle(mixed)
            for case in mixed[:len(mixed) // 2]:
                yield kind, SIZE, case
            for size in range(MIB if kind == "tmpfs" else 2 * MIB, 10 * MIB, MIB):
                if rng.random() < 0.5:
                    yield kind, size, Case("tiny", size, rng.choice(KINDS))


def fills(seconds: float, seed: int, folder: str, most: int, mutant: str) -> Result:
    """Full disks until the time is up or ``most`` are judged. Call it in a zygote."""
    assert not mutant, "no mutant forgets a sync on a full disk"
    disks.isolate()
    rng, began, result, shapes = random.Random(seed), time.monotonic(), Result("l3-full"), set[int]()
    counts: dict[str, int] = {}
    room, held = None, ("", 0)
    for kind, size, case in _cases(rng):
        if result.runs >= most or time.monotonic() - began > seconds:
            break
        if (kind, size) != held:
            if room is not None:
                room.close()
            room, held = _Room(kind, f"{folder}/{result.runs}", size), (kind, size)
        assert room is not None
        wrong = _judge(room, case, result, shapes)
        result.runs += 1
        counts[f"{case.what} on {kind}"] = counts.get(f"{case.what} on {kind}", 0) + 1
        result.violations += [f"{line} [{kind}, seed {seed}, case {result.runs}: {case}]" for line in wrong]
    if room is not None:
        room.close()
    result.states, result.distinct = result.runs, len(shapes)
    result.seconds = time.monotonic() - began
    result.covers = f"seed {seed}: " + ", ".join(f"{count} x {what}" for what, count in sorted(counts.items()))
    return result
