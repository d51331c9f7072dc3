"""The story that every adapter must be able to tell, on 2 ranks: train, save, die in the middle of a save, resume, go on;
the final weights are those of a run that nothing happened to, bit for bit.

An adapter is one function, ``train(rank, world, job)``, run on every rank with a gloo process group made: it builds its
framework's objects from fixed seeds, resumes from ``job.root`` (no checkpoints at all when that is empty), trains to
``job.steps`` and saves after every ``job.every`` optimizer steps by a manager with ``seams=job.seams`` and
``keep_last=job.keep_last``. It is a module-level function: ranks get it by name.

    story = Story(stage, train, tmp_path)                 # stage: tests.frameworks.stage.Stage("deepspeed")
    plain = story.plain()                                 # once for each adapter
    story.whole(plain, background=False)                  # with saves to the same end, then killed at each point of KILLS
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distckpt
from distckpt.durable import REAL
from distckpt.options import Seams
from distckpt.testing.faults import Fault, FaultyFiles, Operation, call
from tests.frameworks.stage import Stage
from tests.inprocess import events

WORLD, STEPS, EVERY, FATAL = 2, 6, 2, 4

# Where, and who dies: a rank or everybody. The named points: a rank has begun to write its files; all ranks acked and the
# marker is not there yet; published and rotation not begun. By whether the save is a background one.
KILLS: dict[bool, list[tuple[str, int | str]]] = {
    False: [("writing", 1), ("acked", "all"), ("published", 1)],
    True: [("writing", "all"), ("acked", 0), ("published", "all")],
}
RESUMES_AT = {"writing": FATAL - EVERY, "acked": FATAL - EVERY, "published": FATAL}


@dataclass(frozen=True)
class Job:
    """What one run is asked to do. ``extra``: what an adapter's tests tell their own function."""

    root: str = ""
    steps: int = STEPS
    every: int = EVERY
    background: bool = False
    keep_last: int | None = 2
    seams: Seams = field(default_factory=Seams)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """How one rank's run went: the step it went on from (0: fresh), and a digest of what it ended with."""

    started: int
    final: str


Train = Callable[[int, int, Job], Told]


def digest(state: Any) -> str:
    """Of every tensor and number in nested dicts and lists, to the last bit."""
    found = hashlib.sha256()

    def feed(name: str, value: Any) -> None:
        found.update(f"{name}:".encode())
        if isinstance(value, torch.Tensor):
            local = value.detach().cpu().contiguous()
            found.update(f"{local.dtype}{tuple(local.shape)}".encode() + local.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                feed(f"{name}.{key}", value[key])
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                feed(f"{name}.{index}", item)
        else:  # of other objects only what they are: some show their address
            plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
            found.update((repr(value) if plain else type(value).__name__).encode())

    feed("", state)
    return found.hexdigest()


def loop(job: Job, state: Any, step: Callable[[], None]) -> int:
    """What an adapter that is a payload trains and saves by: ``step`` until ``job.steps``. The step it went on from."""
    if not job.root:
        for _ in range(job.steps):
            step()
        return 0
    with distckpt.CheckpointManager(job.root, save_every=job.every, keep_last=job.keep_last, seams=job.seams) as manager:
        started = done = manager.restore(state) or 0
        while done < job.steps:
            if manager.poll(done).save:
                manager.save(done, state, background=job.background)
            step()
            done += 1
        manager.save(done, state, on_exists="skip")
    return started


class Story:
    def __init__(self, stage: Stage, train: Train, folder: Path, naming: str = "step-{step}", limit: float = 60.0,
                 extra: dict[str, Any] | None = None, tools: tuple[str, ...] = ()) -> None:
        """``tools``: scripts that the framework drops beside its checkpoints, and that the root is to have once."""
        self._stage, self._train, self._folder, self._naming, self._limit = stage, train, folder, naming, limit
        self._extra, self._tools = extra or {}, tools

    def plain(self) -> list[str]:
        """What every rank ends with when nothing is ever saved."""
        told = self._stage.values(WORLD, self._train, Job(extra=self._extra), limit=self._limit)
        assert [t.started for t in told] == [0, 0]
        return [t.final for t in told]

    def saved(self, plain: list[str], background: bool) -> Path:
        """With saves, and no accident; the root, with the last two of three checkpoints and nothing of the first, whatever its
        framework put beside it."""
        root = self._root("saved", background)
        told = self._stage.values(WORLD, self._train, self._job(root, background), limit=self._limit)
        assert [t.final for t in told] == plain, "saving changed what was trained"
        left = sorted(p.name for p in root.iterdir())
        assert left == sorted([".distckpt", "latest", *self._tools, self._name(FATAL), self._name(STEPS)]), left
        return root

    def whole(self, plain: list[str], background: bool) -> Path:
        """``saved``, whose root it returns, and ``killed`` at each of the three points."""
        root = self.saved(plain, background)
        for point, who in KILLS[background]:
            self.killed(plain, point, who, background)
        return root

    def killed(self, plain: list[str], point: str, who: int | str, background: bool) -> Path:
        """Killed in the save of step 4, started again: it goes on from the newest committed checkpoint, to the same end."""
        return self._goes_on(self._root(f"{point}-{who}", background), plain, [(point, who)], background)

    def killed_thrice(self, plain: list[str], background: bool) -> Path:
        """``killed`` at each of the three points, each time in the run that goes on from the one before: for frameworks whose
        start takes longer than the test. What it goes on from the first two times is one checkpoint, whose bits the end shows."""
        return self._goes_on(self._root("thrice", background), plain, KILLS[background], background)

    def _goes_on(self, root: Path, plain: list[str], kills: list[tuple[str, int | str]], background: bool) -> Path:
        pids = root.parent / f"{root.name}.pids"
        pids.mkdir(parents=True)
        for point, who in kills:
            ends = self._stage.run(WORLD, _victim, self._train, self._job(root, background), point, who, self._name(FATAL),
                                   str(pids), limit=self._limit)
            struck = [rank for rank, end in enumerate(ends) if end.killed == signal.SIGKILL]
            wanted = list(range(WORLD)) if who == "all" else [who]
            assert struck == wanted, f"{point}: {wanted} should have been killed, {struck} were\n" + "\n".join(map(str, ends))
            for rank, end in enumerate(ends):
                assert rank in struck or end.error, f"rank {rank} went on as if nothing had happened: {end}"
        told = self._stage.values(WORLD, self._train, self._job(root, background), limit=self._limit)
        steps = [RESUMES_AT[point] for point, _ in kills]
        assert [t.started for t in told] == steps[-1:] * WORLD, kills
        resumed = events(root, "resumed")
        assert [r["step"] for r in resumed] == steps, kills
        assert len({r["attempt"] for r in resumed}) == len(set(steps)), f"{kills}: not from the one checkpoint of its step"
        assert [t.final for t in told] == plain, f"{kills}: not what an uninterrupted run ends with"
        return root

    def _job(self, root: Path, background: bool) -> Job:
        return Job(str(root), background=background, extra=self._extra)

    def _root(self, what: str, background: bool) -> Path:
        return self._folder / f"{what}-{'background' if background else 'sync'}" / "root"

    def _name(self, step: int) -> str:
        return self._naming.format(step=step)


def _victim(rank: int, world: int, train: Train, job: Job, point: str, who: int | str, name: str, pids: str) -> Told:
    (Path(pids) / str(rank)).write_text(str(os.getpid()))
    dist.barrier()

    def strike(operation: Operation) -> None:
        mine = False
        for other in range(world) if who == "all" else [int(who)]:
            if other == rank:
                mine = True
            else:
                os.kill(int((Path(pids) / str(other)).read_text()), signal.SIGKILL)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal is on its way

    return train(rank, world, Job(job.root, job.steps, job.every, job.background, job.keep_last,
                                  Seams(files=FaultyFiles(REAL, *_faults(rank, point, who, name, strike))), job.extra))


def _faults(rank: int, point: str, who: int | str, name: str, strike: Callable[[Operation], None]) -> list[Fault]:
    inside = f"/{name}/"
    if point == "writing":
        here = rank == (1 if who == "all" else who)
        return [call(strike, op=("write", "fsync_file"), path=inside, after=True)] if here else []
    if rank != 0:
        return []
    if point == "acked":
        return [call(strike, op="open", path=f"{inside}commit.json")]
    assert point == "published", point
    seen: list[Operation] = []

    def moved(operation: Operation) -> None:
        if seen:
            strike(operation)

    return [call(seen.append, op="rename", path=lambda path: path.endswith(f"/root/{name}"), after=True),
            call(moved, op="rename", path=lambda path: path.endswith("/root/latest"), forever=True)]
