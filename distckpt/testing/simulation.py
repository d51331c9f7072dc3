"""The whole library, all ranks in one process, on a disk in memory, a store in memory and a clock that jumps.

``Simulation(world=2, seed=17, faults=["kill:1@83"]).run(program)`` runs ``program(manager, rank)`` on every rank, lets the
faults happen, restarts the job on what is left on the disk, resumes, saves once more, and has the checker judge it all. Equal
arguments give equal executions, operation by operation. ``job`` and ``restart`` are its two halves, for longer stories.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from distckpt.digest import XXH3
from distckpt.errors import DistckptError
from distckpt.options import Timeouts
from distckpt.testing import checker
from distckpt.testing.checker import ABORTED, COMMITTED, Found, Save, Story
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.scheduler import Policy, Priorities, Walk
from distckpt.testing.simjob import ROOT, Beside, Ended, Job, Program, Strike
from distckpt.testing.told import Contents, State, Told, contents_written

__all__ = ["QUICK", "ROOT", "Beside", "Program", "Run", "Simulation", "State", "Strike", "Told", "content_at", "tree_of"]

QUICK = Timeouts(arrive=20.0, progress=20.0, visible=2.0, close=20.0)

_STATES = 24


@dataclass
class Run(Ended):
    """What came of a simulation. ``violations``: what the checker and the rules of a job found; empty is well. ``resumed``: what
    every rank of the restart went on from; ``states``: how many disks it was restarted from; ``outcome``: what a reader and
    the ranks saw, as text."""

    resumed: dict[int, Any] = field(default_factory=dict)
    states: int = 0
    outcome: str = ""


class Simulation:
    """``policy`` makes the schedule of a job (None: one of several kinds, drawn with ``seed``). ``options`` go to the managers.
    ``keeps``: ``keep_last`` of further series. ``contents``: what a rank writes of a payload; without, what
    the payload writes when it is alone.
    ``cuts``: how many of the disks that a power cut may leave are restarted from. ``apart``: every rank has a host of its own,
    so that no kernel can tell another rank which process has ended. ``horizon`` (seconds of its clock) and ``limit``
    (operations): whoever still runs then hangs."""

    def __init__(self, world: int = 2, seed: int = 0, faults: Sequence[str | Strike] = (), *, keep: int | None = 2,
                 policy: Callable[[int], Policy] | None = None, timeouts: Timeouts = QUICK, cuts: int = 2,
                 keeps: Mapping[str, int | None] | None = None, contents: Contents = contents_written,
                 horizon: float = 900.0, limit: int = 400_000, traced: bool = False, apart: bool = False,
                 disk: Callable[[], CrashFiles] = lambda: CrashFiles("/disk"), **options: Any) -> None:
        self.world, self.seed, self.keep, self.cuts, self.apart = world, seed, keep, cuts, apart
        self.horizon, self.limit, self.traced = horizon, limit, traced
        self.strikes = [Strike.parse(f) if isinstance(f, str) else f for f in faults]
        self.options = {"stop_signals": (), "keep_last": keep, "timeouts": timeouts, **options}
        self.keeps, self.contents, self.pinned = keeps or {}, contents, set[int]()
        self.files = disk()
        self.saves: list[Save] = []
        self._policy = policy or draw
        self._jobs = 0

    def run(self, program: Program) -> Run:
        """``program`` on every rank, the faults, and the restart; judged."""
        run = self.job(program, self.strikes)
        off = run.fired and any(strike.kind == "power" for strike in self.strikes)
        saves = list(self.saves)
        for disk in self._cut() if off else [self.files]:
            self.files, self.saves, run.states = disk, list(saves), run.states + 1
            self.restart(run)
        return run

    def _cut(self) -> list[CrashFiles]:
        """Some of the disks that the power cut may leave: not the first ones, which have all their bytes."""
        disks = list(self.files.crash_states(_STATES, self.seed))
        return random.Random(repr((self.seed, self.strikes))).sample(disks, min(self.cuts, len(disks)))

    def _disks(self, world: int) -> list[CrashFiles]:
        """The disk of each rank; empty: all have ``files``."""
        return []

    def tree(self) -> checker.Tree:
        """Every file under the root, as the checker wants it."""
        return tree_of(self.files)

    def _content(self, path: str) -> str:
        return content_at(self.files, path)

    def job(self, program: Program, strikes: Sequence[str | Strike] = (), *, world: int | None = None,
            beside: Mapping[str, Callable[[Beside], Any]] | None = None, **more: Any) -> Run:
        """One job on the disk as it is. ``beside``: further processes, each on a host of its own, numbered in the results
        after the ranks. ``more``: ``file_faults`` ({rank: faults}), ``files`` (rank to its view of the disk), options."""
        self._jobs += 1
        number = self._jobs
        job = Job(number, self.files, self.world if world is None else world, self.seed * 31 + number,
                  self._policy(self.seed * 7 + number), [Strike.parse(s) if isinstance(s, str) else s for s in strikes],
                  {"contents": self.contents, **self.options, **more},
                  apart=self.apart, horizon=self.horizon, limit=self.limit, traced=self.traced,
                  disks=self._disks(self.world if world is None else world))
        ended = job.run(program, beside or {})
        run = Run(**vars(ended))
        run.violations += _one_step(run, job.strikes)
        run.outcome = str([(rank, type(error).__name__) for rank, error in run.errors.items()])
        self.saves += run.saves
        self.pinned |= run.pinned
        return run

    def _story(self, saves: Sequence[Save]) -> Story:
        return Story(list(saves), keep=self.keep, protected=frozenset(self.pinned), keeps=self.keeps)

    def _settled(self) -> list[str]:
        """What is wrong besides, when a restart has saved once more."""
        return []

    def restart(self, before: Run | None = None, *, world: int | None = None, went_on: bool = True, **more: Any) -> Run:
        """A job on what is left: resume, save once more; judged before and after that save. What it finds is added to ``before``,
        the job that ended."""
        run = before if before is not None else Run()
        seen: dict[int, Any] = {}
        trees: list[checker.Tree] = []
        saves = self.saves
        verify = "size" if self.options.get("digest", XXH3) is None else "digest"

        def program(manager: Told, rank: int) -> None:
            found = manager.resume(verify=verify)
            if rank == 0:
                trees.append(self.tree())
            seen[rank] = None if found.checkpoint is None else (found.checkpoint.step, self._content(found.checkpoint.path))
            manager.save((found.step or 0) + 1000, State(b"after the restart, of rank %d" % rank))

        stood = checker.standing(self.tree())
        self.saves = []
        after = self.job(program, world=world, **more)
        for rank, error in after.errors.items():
            seen.setdefault(rank, f"{type(error).__name__}: {error}")
        run.resumed, run.trace, run.steps = seen, run.trace + after.trace, run.steps + after.steps
        run.hung, run.stacks = run.hung + after.hung, run.stacks + after.stacks
        tree = trees[0] if trees else self.tree()
        run.violations += checker.check(self._story(saves), Found(
            tree, seen, errors=run.said, disturbed=run.disturbed, injected=_to_be_told(run, saves)))
        run.violations += [f"{line} (after the restart)" for line in after.violations]
        if trees:
            run.violations += _taken_back(saves, stood, checker.standing(tree))
        worked = len(after.saves) == 1 and set(after.saves[0].told.values()) == {COMMITTED}
        if not worked:
            run.violations.append(f"I8: the save after the restart did not work: {after.errors}")
        elif trees:
            wrong = checker.check(self._story([*saves, *after.saves]), Found(self.tree(), {}, went_on=True))
            run.violations += [f"{line} (after one more save)" for line in [*wrong, *self._settled()]]
        standing = sorted(checker.standing(tree).values())
        run.outcome += f"|{standing}|{[sorted(s.told.items()) for s in saves]}|{sorted(seen.items())}"
        self.saves = [*saves, *after.saves]
        return run


def _to_be_told(run: Run, saves: Sequence[Save]) -> list[tuple[str, ...]]:
    """I9, of saves that failed. Of several faults one must be told: the next may strike a rank that is leaving already (the close
    of a file that is thrown away), and is not what went wrong."""
    if not any(ABORTED in save.told.values() for save in saves):
        return []
    if len(run.injected) > 1 and any(word in error for words in run.injected for word in words for error in run.said):
        return []
    return run.injected


def _taken_back(saves: Sequence[Save], before: Mapping[str, tuple[int, str]], after: Mapping[str, tuple[int, str]]) -> list[str]:
    """I2, as a reader sees it: what stood whole before a restart stands after it, or something newer under its name (S2)."""
    turn = {save.content: number for number, save in enumerate(saves)}
    return [f"I2: {name} stood with the content of save {turn.get(content)} and does not any more"
            for name, (_, content) in before.items()
            if name not in after or turn.get(after[name][1], -1) < turn.get(content, -1)]


def _one_step(run: Run, strikes: Sequence[Strike]) -> list[str]:
    """P5: what failed in the background is raised on every rank at the same boundary.

    Asked of the ranks that lived on. Who lost rank 0 (S18) can be asked only for what came before that place, and the others,
    who may have raised there what it never heard of, only for the same; and nobody may lose it when all that went wrong is an
    operation on the disk. A ``close`` that gave up on a save still in flight raised no failed save; but then no rank may leave
    as if all were well.
    """
    struck = {strike.rank for strike in strikes if strike.kind in ("kill", "stop")}
    if any(strike.kind in ("power", "node") for strike in strikes):
        return []
    asked = {rank: manager for rank, manager in run.managers.items()
             if rank not in struck and isinstance(run.errors.get(rank), (DistckptError, NoneType))}
    end = min((manager.lost for manager in asked.values() if manager.lost is not None), default=sys.maxsize)
    faced = {rank: [where for number, where in manager.faced if number < end] for rank, manager in asked.items()}
    wrong = []
    if len({repr(where) for where in faced.values()}) > 1:
        wrong.append(f"P5: a failed background save was raised at different places: {faced}")
    if end < sys.maxsize and strikes and all(strike.kind in ("fail", "lost") for strike in strikes):
        wrong.append(f"P4: every process lived, and a rank heard only that rank 0 is gone: {run.errors}")
    if any(manager.overdue for manager in asked.values()):
        wrong += [f"P4: rank {rank} left as if all were well, and the close of another had not ended"
                  for rank in asked if rank not in run.errors]
    return wrong


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
