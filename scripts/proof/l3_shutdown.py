"""Power cuts on mounted ext4 and XFS: life after life on one root, each cut somewhere else, each judged by the next one."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from dataclasses import dataclass, field
from typing import Any

from distckpt.testing import checker
from scripts.proof import disks
from scripts.proof.l3_judge import Root, badly, shape
from scripts.proof.l3_program import SAVES, Life, Plan, forget, live, read_ledgers, read_stock
from scripts.proof.layer import Result
from tests.crash.forks import Stuck, group

LIVES_PER_ROOT = 60
ALLOWED = ("SaveError", "CoordinatorLost", "RankLost", "ConfigError", "ResumeError")
"""What a rank may raise on a disk that is gone: a failed save, a peer's end, a root that cannot be used or read."""
SIZES = (900, 3000, 70_000, 1_300_000)
PHASES = (("start", 0), ("saves", 0), ("saves", 1))
OPTIONS = 4
SHARES = 8
"""The operations of a life are dealt out over this many seeds: as many runs, one after the other, cut before every one."""
NUMBERS = 10
"""Saves of one life have numbers of their own."""


@dataclass
class Target:
    """One mounted disk and the root on it that is being cut. ``points``: operations before which a cut was planned."""

    disk: disks.Disk
    folder: str
    root: Root = field(default_factory=Root)
    roots: int = 0
    number: int = 1
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    seconds: float = 0.2
    points: set[tuple[str, int, int]] = field(default_factory=set)
    shapes: set[int] = field(default_factory=set)

    @property
    def where(self) -> str:
        return f"{self.disk.place}/{self.roots}/run"

    def anew(self) -> None:
        """A root that does not exist yet, on the same disk."""
        shutil.rmtree(f"{self.disk.place}/{self.roots}", ignore_errors=True)
        self.roots += 1
        self.root = Root()
        os.mkdir(f"{self.disk.place}/{self.roots}")
        disks.write_back(self.disk.place)

    def left(self, where: str, victim: int, seed: int) -> list[int]:
        """Operations of the seed's share before which no cut fell yet."""
        count = self.counts.get((where, victim), 60)
        return [n for n in range(1 + seed % SHARES, count + 1, SHARES) if (where, victim, n) not in self.points]


def _plan(target: Target, rng: random.Random, seed: int) -> Plan:
    """Mostly an operation that was not cut yet; the rest at random times and at the end. One life in ``OPTIONS`` has every option
    on; the second of a root has, and is cut at its end, when a writer process has written all that it was given."""
    if target.root.lives % OPTIONS == 1:
        size = rng.choice(SIZES)
        where = "end" if target.root.lives == 1 else rng.choice(("time", "saves", "saves", "saves"))
        victim = rng.randrange(2) if where == "saves" else 0
        return Plan(where, victim, rng.randint(1, target.counts.get((where, victim), 60)), rng.random() * target.seconds * 2,
                    size=size, options=True)
    kind = rng.random()
    size = SIZES[0] if rng.random() < 0.5 else rng.choice(SIZES)
    if kind < 0.05:
        return Plan("end", size=size)
    if kind < 0.12:
        return Plan("told", n=rng.randint(1, len(SAVES)), size=size)
    if kind < 0.25:
        return Plan("time", after=rng.random() * target.seconds * 1.1, size=size)
    where, victim = ("start", 0) if kind < 0.36 else ("saves", 0) if kind < 0.77 else ("saves", 1)
    n = rng.choice(target.left(where, victim, seed) or range(1, target.counts.get((where, victim), 60) + 1))
    target.points.add((where, victim, n))
    back = rng.randint(1, n) if where == "saves" and rng.random() < 0.3 else 0
    return Plan(where, victim, n, write_back=back, size=size)


def _one(target: Target, plan: Plan, mutant: str, result: Result) -> list[str]:
    """One life, its cut, the reboot: what was wrong with the life, and with the disk that it found and that it left."""
    first = target.number
    target.number += NUMBERS
    life = Life(target.where, target.disk.place, f"{target.folder}/ledger-{first}", first, plan, mutant)
    try:
        ends = group(2, live, life)
    except Stuck as hang:
        result.hangs += 1
        _make_sure_it_fell(target.disk.place)
        target.disk.reboot()
        return [f"I6: {hang}"]
    fell = _make_sure_it_fell(target.disk.place)
    target.disk.reboot()
    told = read_ledgers(life.ledger)
    wrong = target.root.after(told, read_stock(life.ledger), complete=plan.where != "start")
    wrong += badly(ends)
    for line in told.events.get("error", []):
        result.slowest = max(result.slowest, line["seconds"])
        if not expected(line) or not fell:
            wrong.append(f"I9: rank {line['rank']} raised {line['type']}: {line['text']}")
    after = checker.tree_of(target.where) if os.path.isdir(target.where) else {}
    wrong += target.root.before(after)
    target.shapes.add(shape(after, first))
    for rank, end in enumerate(ends):
        if end.ok and "start" in end.value and plan.where != "start":
            target.counts["start", rank], target.counts["saves", rank] = end.value["start"], end.value["saves"]
            target.seconds = end.value["seconds"]
    forget(life.ledger)
    return wrong


def expected(line: dict[str, Any]) -> bool:
    """Whether a rank may raise this on a disk that is gone. The cut may come while a checkpoint is loaded, as the janitor works
    meanwhile: a file then cannot be read, and that is all that may be said of it."""
    unread = line["type"] == "IntegrityError" and f"cannot be read: {os.strerror(errno.EIO)}" in line["text"]
    return line["type"] in ALLOWED or unread


def _make_sure_it_fell(place: str) -> bool:
    """By a rank, or else now that all have ended. Whether it was by a rank."""
    by_rank = _is_down(place)
    if not by_rank:
        disks.cut(place)
        assert _is_down(place), "the cut did not fall"
    return by_rank


def _is_down(place: str) -> bool:
    try:
        os.utime(place)
    except OSError:
        return True
    return False


def cuts(seconds: float, seed: int, folder: str, most: int, mutant: str) -> Result:
    """Cuts until the time is up or ``most`` have fallen; with a mutant, until it is caught. Call it in a zygote."""
    disks.isolate()
    rng, began, result, targets = random.Random(seed), time.monotonic(), Result("l3-shutdown"), list[Target]()
    try:
        for kind in ("ext4", "xfs"):
            os.makedirs(f"{folder}/{kind}")
            targets.append(Target(disks.Disk(kind, f"{folder}/{kind}"), f"{folder}/{kind}"))
            targets[-1].anew()
        while result.runs < most and time.monotonic() - began < seconds and not (mutant and result.violations):
            target = targets[result.runs % len(targets)]
            if target.root.lives >= LIVES_PER_ROOT:
                target.anew()
            plan = _plan(target, rng, seed)
            wrong = _one(target, plan, mutant, result)
            result.runs += 1
            result.violations += [f"{line} [{target.disk.kind}, seed {seed}, life {result.runs}: {plan}]" for line in wrong]
            if wrong:
                target.anew()
    finally:
        for target in targets:
            target.disk.close()
    result.states, result.distinct = result.runs, sum(len(target.shapes) for target in targets)
    result.seconds = time.monotonic() - began
    left = {t.disk.kind: sum(len(t.left(*which, seed)) for which in PHASES) for t in targets}
    points = ", ".join(f"{len(t.points)} operations on {t.disk.kind} ({left[t.disk.kind]} of the share left)" for t in targets)
    result.covers = f"seed {seed}: {result.runs} cuts, before {points}" + (f", mutant: {mutant}" if mutant else "")
    return result
