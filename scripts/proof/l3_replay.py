"""Block writes replayed: what a disk with a cache may hold after a cut, built from the log of a real run, mounted and judged.

Whatever was written before a flush that was answered is there. Of what was written after it, any part may be: whole writes,
or some blocks of a long one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distckpt.testing import checker
from scripts.proof import disks
from scripts.proof.blocklog import BlockLog, Epoch, Write, read_log
from scripts.proof.l3_judge import Root, badly, shape
from scripts.proof.l3_program import KEEP, Life, Plan, Told, forget, live, read_ledgers, read_stock
from scripts.proof.layer import Result
from tests.crash.forks import Stuck, group

LIVES = 3
BLOCK = 4096
LATER = 1_000_000
"""The number of the save that a judged image must still take."""
FEW, MANY = 6, 60
"""Images built from one recording before another is made, in a short run and in a long one."""


@dataclass(frozen=True)
class State:
    """One disk after a cut: what reached it for certain, and what survived of the rest. ``at``: the latest time of a cut that
    leaves it, just before the next thing reached the disk."""

    epoch: int
    issued: int
    survivors: tuple[Write, ...]
    at: int

    def __str__(self) -> str:
        return f"flush {self.epoch}, {len(self.survivors)} pieces of {self.issued} writes after it"


@dataclass
class Recording:
    """One run: the disk it began on, what reached the disk, and what the ranks were told meanwhile."""

    image: str
    epochs: list[Epoch]
    told: list[Told]


def record(kind: str, folder: str, rng: random.Random, mutant: str) -> Recording:
    """Some lives on one mount, none of them cut."""
    image, served, mount = f"{folder}/base.img", f"{folder}/served.img", f"{folder}/mnt"
    disks.format_image(kind, image, disks.KINDS[kind])
    disks.copy_image(image, served)
    log, told = BlockLog(served, folder), []
    try:
        loop = disks.Loop(log.path)
        try:
            os.makedirs(mount, exist_ok=True)
            disks.mount(loop.path, mount, kind)
            try:
                for number in range(LIVES):
                    plan = Plan("end", size=rng.choice((900, 3000, 70_000)))
                    life = Life(f"{mount}/run", mount, f"{folder}/ledger-{number}", 1 + 10 * number, plan, mutant, log.log)
                    ends = group(2, live, life)
                    assert all(end.ok and "saves" in end.value for end in ends), "\n".join(map(str, ends))
                    told.append(read_ledgers(life.ledger))
                    forget(life.ledger)
            finally:
                disks.unmount(mount)
        finally:
            loop.close()
    finally:
        log.close()
    os.unlink(served)
    return Recording(image, read_log(log.log), told)


def _pieces(write: Write, rng: random.Random) -> Iterator[Write]:
    """All of a write, or some of its blocks."""
    if len(write.data) <= BLOCK or rng.random() < 0.7:
        yield write
        return
    for at in range(0, len(write.data), BLOCK):
        if rng.random() < 0.5:
            yield Write(write.offset + at, write.data[at:at + BLOCK], write.start)


def states(epochs: Sequence[Epoch], rng: random.Random, most: int) -> list[State]:
    """Disks to judge, in the order of their flushes: every flush has its turn before one has a second."""
    found: list[State] = []
    while len(found) < most:
        for number in rng.sample(range(len(epochs)), min(len(epochs), most - len(found))):
            epoch = epochs[number]
            issued = rng.randint(0, len(epoch.writes))
            share = rng.choice((0.0, 0.3, 0.7, 0.9))
            kept = [piece for write in epoch.writes[:issued] if rng.random() < share for piece in _pieces(write, rng)]
            at = epoch.writes[issued].start if issued < len(epoch.writes) else epoch.end
            found.append(State(number, issued, tuple(kept), at))
    return sorted(found, key=lambda state: (state.epoch, state.issued))


def _story(recording: Recording, at: int) -> checker.Story:
    """What had been begun, and told, when the log was ``at`` long."""
    story = checker.Story(keep=KEEP)
    for told in recording.told:
        for save, (begun, heard) in zip(told.saves, told.spans, strict=True):
            if begun <= at:
                verdicts = {rank: verdict for rank, verdict in save.told.items() if heard[rank] <= at}
                story.saves.append(checker.Save(save.step, save.content, verdicts))
    return story


def _apply(image: int, writes: Iterable[Write]) -> None:
    for write in writes:
        os.pwrite(image, write.data, write.offset)


class _Replay:
    """One recording, flush by flush."""

    def __init__(self, kind: str, recording: Recording, folder: str) -> None:
        self.kind, self.recording, self.folder = kind, recording, folder
        self._prefix, self._applied = f"{folder}/prefix.img", 0
        disks.copy_image(recording.image, self._prefix)

    def judge(self, state: State, result: Result, shapes: set[int]) -> list[str]:
        fd = os.open(self._prefix, os.O_RDWR)
        while self._applied < state.epoch:
            _apply(fd, self.recording.epochs[self._applied].writes)
            self._applied += 1
        os.close(fd)
        image, mount = f"{self.folder}/state.img", f"{self.folder}/mnt"
        disks.copy_image(self._prefix, image)
        fd = os.open(image, os.O_RDWR)
        _apply(fd, state.survivors)
        os.close(fd)
        loop = disks.Loop(image)
        try:
            try:
                disks.mount(loop.path, mount, self.kind)
            except OSError as error:
                return [f"the file system itself did not survive: {error}"]
            try:
                return self._judge(state, mount, result, shapes)
            finally:
                disks.unmount(mount)
        finally:
            loop.close()
            os.unlink(image)

    def _judge(self, state: State, mount: str, result: Result, shapes: set[int]) -> list[str]:
        root = Root(_story(self.recording, state.at), crashes=1)
        before = checker.tree_of(f"{mount}/run")
        shapes.add(shape(before, root.story.saves[-1].step if root.story.saves else 0))
        life = Life(f"{mount}/run", mount, f"{self.folder}/judge", LATER, Plan("check"))
        try:
            ends = group(2, live, life)
        except Stuck as hang:
            result.hangs += 1
            return [f"I6: {hang}"]
        told, tree = read_ledgers(life.ledger), read_stock(life.ledger)
        forget(life.ledger)
        wrong = root.before(before) + root.after(told, tree, complete=True)
        wrong += badly(ends)
        return wrong + [f"I8: rank {line['rank']} raised {line['type']}: {line['text']}" for line in told.events.get("error", [])]


def replays(seconds: float, seed: int, folder: str, most: int, mutant: str) -> Result:
    """Images until the time is up or ``most`` are judged; with a mutant, until it is caught. Call it in a zygote."""
    disks.isolate()
    rng, began, result, shapes = random.Random(seed), time.monotonic(), Result("l3-replay"), set[int]()
    counts, recordings, kinds = dict.fromkeys(disks.KINDS, 0), 0, list(disks.KINDS)
    each = min(max(FEW, int(seconds / 6)), MANY)
    while result.runs < most and time.monotonic() - began < seconds and not (mutant and result.violations):
        kind = kinds[(seed + recordings) % len(kinds)]
        recordings += 1
        place = f"{folder}/{recordings}"
        os.makedirs(place)
        recording = record(kind, place, rng, mutant)
        replay = _Replay(kind, recording, place)
        for state in states(recording.epochs, rng, min(each, most - result.runs)):
            if time.monotonic() - began > seconds or (mutant and result.violations):
                break
            wrong = replay.judge(state, result, shapes)
            result.runs += 1
            counts[kind] += 1
            result.violations += [f"{line} [{kind}, seed {seed}, recording {recordings}: {state}]" for line in wrong]
        for name in os.listdir(place):
            path = f"{place}/{name}"
            if os.path.isfile(path):
                os.unlink(path)
    result.states, result.distinct = result.runs, len(shapes)
    result.seconds = time.monotonic() - began
    images = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
    result.covers = f"seed {seed}: images {images}, from {recordings} recordings" + (f", mutant: {mutant}" if mutant else "")
    return result
