"""What the next start makes of a disk: the real library recovers, resumes, saves and ends on it; the checker judges."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import distckpt
from distckpt import owned
from distckpt.manager import CheckpointManager
from distckpt.options import Seams
from distckpt.runtime import Identity
from distckpt.testing.checker import COMMITTED, Found, Save, Story, check, content_of, standing
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from distckpt.testing.crashfs import CrashFiles
from scripts.proof.l1_scenarios import Scenario
from tests.inprocess import Job
from tests.onerank import Blob, close, tidy

NEXT = 1_000_000


class _Restart(VirtualRuntime):
    """A process on the machine that the others died on."""

    def alive(self, other: Identity) -> bool | None:
        return other == self.me


def tree_below(disk: CrashFiles, root: str) -> dict[str, bytes]:
    start = root + "/"
    return {path[len(start):]: data for path, data in disk.snapshot().items() if data is not None and path.startswith(start)}


def _answer(checkpoint: Any, tree: Mapping[str, bytes]) -> tuple[int, str] | None:
    if checkpoint is None:
        return None
    start = f"{checkpoint.name}/"
    return checkpoint.step, content_of({path[len(start):]: data for path, data in tree.items()
                                        if path.startswith(start) and path != start + "commit.json"})


def judge(disk: CrashFiles, one: Scenario, story: Story, go_on: bool) -> list[str]:
    """What is violated when one process starts on ``disk``; with ``go_on`` it saves once more, rotates and ends."""
    owned._open.clear()  # the registry of this process, in which many processes are played
    root, crashes = one.root, len(one.phases)
    try:
        manager = CheckpointManager(root, seams=Seams(disk, _Restart(VirtualClock(), pid=4_000_000)), **one.options)
        resumed = manager.resume(verify=one.verify)
        tree = tree_below(disk, root)
        found = Found(tree, {0: _answer(resumed.checkpoint, tree)}, crashes=crashes)
        wrong = check(story, found)
        if resumed.skipped:
            wrong.append(f"I4: passed over {resumed.skipped}")
        if wrong or not go_on:
            return wrong
        tidy(manager)
        manager.save(NEXT, Blob("afterwards"))
        close(manager)
    except (distckpt.DistckptError, OSError, AssertionError) as error:
        return [f"I8: the next start fails: {type(error).__name__}: {error}; {_place(error)}"]
    return after_next(story, tree_below(disk, root), tree, Blob.content("afterwards"), crashes)


def after_next(story: Story, tree: dict[str, bytes], before: dict[str, bytes], written: Mapping[str, bytes],
               crashes: int) -> list[str]:
    """The second look: what an open save turned out to be is now known, and one more is committed."""
    there = set(standing(before).values())
    settled = [replace(s, told={0: COMMITTED}) if s.open and (s.step, s.content) in there else s for s in story.saves]
    saves = [*settled, Save(NEXT, content_of(written), {0: COMMITTED})]
    return check(replace(story, saves=saves), Found(tree, went_on=True, crashes=crashes))


def judge_job(disk: CrashFiles, one: Scenario, story: Story) -> list[str]:
    """The same with all ranks of a job, as threads: they must agree on what they resume from, and on the next save."""
    root, world, crashes = one.root, one.world, len(one.phases)
    job = Job(root, world, files=dict.fromkeys(range(world), disk), **one.options)

    def go(manager: CheckpointManager) -> tuple[Any, dict[str, bytes]]:
        resumed = manager.resume(verify=one.verify)
        tree = tree_below(disk, root)
        manager.save(NEXT, Blob("afterwards"))
        return resumed.checkpoint, tree

    ended = job.run(go)
    for end in ended:
        if end.error is not None:
            job.crash()
            return [f"I8: rank {end.rank} of the next job: {end.error!r}"]
    tree = ended[0].value[1]
    answers = {end.rank: _answer(end.value[0], tree) for end in ended}
    written = {name: data for rank in range(world) for name, data in Blob.content("afterwards", rank, world).items()}
    return check(story, Found(tree, dict(answers), crashes=crashes)) or \
        after_next(story, tree_below(disk, root), tree, written, crashes)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
