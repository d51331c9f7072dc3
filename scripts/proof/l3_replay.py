"""Block writes replayed: what a disk with a cache may hold after a cut, built from the log of a real run, mounted and judged."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

from distckpt.testing import checker
from scripts.proof import disks
from scripts.proof.blocklog import Epoch, Images, State, Unmountable, read_log, recorded, states
from scripts.proof.l3_judge import Root, badly, shape
from scripts.proof.l3_program import KEEP, Life, Plan, Told, forget, live, read_ledgers, read_stock
from scripts.proof.layer import Result
from tests.crash.forks import Stuck, group

LIVES = 3
LATER = 1_000_000
"""The number of the save that a judged image must still take."""
FEW, MANY = 6, 60
"""Images built from one recording before another is made, in a short run and in a long one."""


@dataclass
class Recording:
    """One run: the disk it began on, what reached the disk, and what the ranks were told meanwhile."""

    image: str
    epochs: list[Epoch]
    told: list[Told]


def record(kind: str, folder: str, rng: random.Random, mutant: str) -> Recording:
    """Some lives on one mount, none of them cut."""
    image, told = f"{folder}/base.img", list[Told]()
    disks.format_image(kind, image, disks.KINDS[kind])
    with recorded(kind, image, folder) as (log, mount):
        for number in range(LIVES):
            plan = Plan("end", size=rng.choice((900, 3000, 70_000)))
            life = Life(f"{mount}/run", mount, f"{folder}/ledger-{number}", 1 + 10 * number, plan, mutant, log.log)
            ends = group(2, live, life)
            assert all(end.ok and "saves" in end.value for end in ends), "\n".join(map(str, ends))
            told.append(read_ledgers(life.ledger))
            forget(life.ledger)
    return Recording(image, read_log(log.log), told)


def _story(recording: Recording, at: int) -> checker.Story:
    """What had been begun, and told, when the log was ``at`` long."""
    story = checker.Story(keep=KEEP)
    for told in recording.told:
        for save, (begun, heard) in zip(told.saves, told.spans, strict=True):
            if begun <= at:
                verdicts = {rank: verdict for rank, verdict in save.told.items() if heard[rank] <= at}
                story.saves.append(checker.Save(save.step, save.content, verdicts))
    return story


class _Replay:
    """One recording, flush by flush."""

    def __init__(self, kind: str, recording: Recording, folder: str) -> None:
        self.recording, self.folder = recording, folder
        self.images = Images(kind, recording.image, recording.epochs, folder)

    def judge(self, state: State, result: Result, shapes: set[int]) -> list[str]:
        try:
            with self.images.mounted(state) as mount:
                return self._judge(state, mount, result, shapes)
        except Unmountable as error:
            return [str(error)]

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
