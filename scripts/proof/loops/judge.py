"""One run: a struck job, the job after it, and whether every promise was kept."""

from __future__ import annotations

import errno
import importlib
import os
import pickle
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from distckpt.testing.checker import COMMITTED, Found, Save, Story, check, standing, tree_of
from distckpt.testing.forks import Ended, Forked, start
from scripts.proof.loops.program import (
    DEADLINE,
    HASTY,
    LAST,
    NEXT,
    PATIENT,
    PROGRAMS,
    ROLLING,
    ROLLING_KEEP,
    SILENCE,
    Program,
    again,
    diary_of,
    golden,
    play,
    read_diary,
)
from scripts.proof.loops.strikes import Strike

WORLD = 2
LIMIT = 25.0
"""Seconds after which a rank that still runs is a hang."""
NOTICED = 1.0
"""Seconds in which a death, or the passing of a deadline, is to be noticed."""

TRACED = ", once more by strace"

_ATTEMPT = re.compile(r"/\.distckpt/staging/\d+/[0-9a-f]{16}(/|$)")
_CHECKPOINT = re.compile(rf"step-\d+(-{ROLLING})?")


@dataclass(frozen=True)
class Item:
    """One run to be made."""

    program: str
    strike: Strike
    mutant: str = ""
    traced: bool = False

    def __str__(self) -> str:
        twice = TRACED if self.traced else ""
        return f"{self.program}: {self.strike}{twice}" + (f" [mutant: {self.mutant}]" if self.mutant else "")


@dataclass
class Judged:
    """``fired``: whether the fault went off; ``reached``: how many operations of its kind its rank came to in this very run.
    ``checked``: whether the checker has looked at all that there was to look at.
    ``noticed``: seconds until another rank raised, beyond the deadline if one had to pass. ``verdicts``: what tells runs of one
    kind apart: the newest told outcome of each save, and where it resumed. ``jobs``: that was struck, and after it."""

    fired: bool = False
    reached: int = 0
    checked: bool = False
    violations: list[str] = field(default_factory=list)
    hangs: int = 0
    noticed: float | None = None
    verdicts: tuple[Any, ...] = ()
    jobs: int = 0
    logs: str = ""

    def add(self, other: Judged) -> None:
        """A further look at the same item: what either found, and it was looked at only if both times it was."""
        self.fired |= other.fired
        self.reached = max(self.reached, other.reached)
        self.checked &= other.checked
        self.violations += other.violations
        self.hangs += other.hangs
        self.jobs += other.jobs
        self.logs += other.logs


@dataclass(frozen=True)
class Known:
    """What a program is known to do when nothing goes wrong. ``contents``: value to content; ``reach``: per rank, how often
    each operation happens; ``order``: per rank, the operations that write: what, and the name of the file."""

    contents: dict[int, str]
    reach: list[dict[str, int]]
    order: list[list[tuple[str, str]]]
    template: str | None

    def count(self, strike: Strike) -> int:
        return strike.among(self.reach[strike.rank])


def learn(name: str, folder: str) -> Known:
    """From runs without a fault. Raises AssertionError when they are not in order."""
    program, slug = PROGRAMS[name], name.replace(" ", "-")
    root = f"{folder}/{slug}-golden"
    for module in _values(_run(golden, root, name))[0]:
        with suppress(ImportError):
            importlib.import_module(module)  # once, here, and not again in every rank
    contents = dict(standing(tree_of(root)).values())
    shutil.rmtree(root)
    template = None
    if program.before:
        template = f"{folder}/{slug}-template"
        _values(_run(play, template, name, None, PATIENT, "", True))
        _forget(template)
    root = f"{folder}/{slug}-clean"
    if template:
        shutil.copytree(template, root)
    reach = _values(_run(play, root, name, None, PATIENT))
    _forget(root)
    shutil.rmtree(root)
    return Known(contents, [counts for counts, _ in reach], [order for _, order in reach], template)


class Outside(Protocol):
    """Who strikes a rank from outside, where the seam is not trusted: it only stops the rank right before the operation."""

    def attach(self, thread: int, op: str, path: str, held: bool) -> None: ...
    def struck(self) -> bool: ...


def judge(item: Item, known: Known, folder: str, outside: Outside | None = None) -> Judged:
    """Make the run and judge it. ``outside`` strikes in place of the seam."""
    program, strike = PROGRAMS[item.program], item.strike
    root = os.path.join(folder, "root")
    judged = Judged(jobs=1)
    if known.template:
        shutil.copytree(known.template, root)
    stops = strike.kind == "stop"
    ranks = start(WORLD, play, root, item.program, strike, HASTY if stops else PATIENT, item.mutant, False, outside is not None,
                  limit=LIMIT)
    try:
        stopped = _attached(outside, ranks[strike.rank], root, strike) if outside is not None else None
        told: list[str] = []
        ends = _wait(ranks, strike, root, told, item, judged) if stops else _ends(ranks)
        diaries = [read_diary(root, rank) for rank in range(WORLD)]
        if outside is not None and stopped is not None and outside.struck():
            diaries[strike.rank].append({**stopped, "what": "struck"})
        _look(program, item, known, root, ends, diaries, LAST if judged.jobs > 1 else NEXT, judged)
        judged.violations += told
    finally:
        for rank in ranks:
            rank.end(0.0)
        shutil.rmtree(root, ignore_errors=True)
        _forget(root)
    return judged


# -- running -------------------------------------------------------------------------------------------------------------

def _ends(ranks: list[Forked]) -> list[Ended]:
    deadline = time.monotonic() + LIMIT
    return [rank.end(deadline) for rank in ranks]


def _run(target: Callable[..., Any], *args: Any) -> list[Ended]:
    return _ends(start(WORLD, target, *args, limit=LIMIT))


def _values(ends: list[Ended]) -> list[Any]:
    if not all(end.ok for end in ends):
        raise AssertionError("a run without a fault failed:\n" + "\n".join(map(str, ends)))
    return [end.value for end in ends]


def _forget(root: str) -> None:
    """What stands beside a root."""
    for path in (*(diary_of(root, rank) for rank in range(WORLD)), f"{root}.resumed"):
        with suppress(FileNotFoundError):
            os.unlink(path)


def _stopped(rank: Forked, deadline: float) -> bool:
    """Whether it stands, and has not ended."""
    while not (rank.stopped or rank.ended_by(time.monotonic() + 0.02)) and time.monotonic() < deadline:
        pass
    return rank.stopped


def _attached(outside: Outside, rank: Forked, root: str, strike: Strike) -> dict[str, Any] | None:
    """What the rank was about to do when it stopped, as its diary says; it goes on with ``outside`` at that thread."""
    if not _stopped(rank, time.monotonic() + LIMIT):
        return None
    line = next(line for line in read_diary(root, strike.rank) if line["what"] == "stopped")
    outside.attach(line["thread"], line["op"], line["path"], line["held"])
    rank.signal(signal.SIGCONT)
    return line


def _wait(ranks: list[Forked], strike: Strike, root: str, told: list[str], item: Item, judged: Judged) -> list[Ended]:
    """The ranks of a run in which one stops. When the others have given up, the job is started anew, as a scheduler would;
    only then does the late one go on, and it must not change a byte of what stands (S5). A late rank 0 keeps the others
    out as long as it lives, which is as it should be."""
    victim = ranks[strike.rank]
    others = [rank for rank in ranks if rank is not victim]
    deadline = time.monotonic() + LIMIT
    ends: dict[int, Ended] = {id(rank): rank.end(deadline) for rank in others}
    if _stopped(victim, deadline):
        if strike.rank != 0:
            judged.jobs += 1
            again_ends = _run(again, root, item.program, NEXT)
            if not all(end.ok for end in again_ends):
                told.append("I8: the job after it could not start beside the stopped rank: " + str(again_ends[0])[:600])
            before = tree_of(root)
            victim.signal(signal.SIGCONT)
            ends[id(victim)] = victim.end(time.monotonic() + LIMIT)
            after = tree_of(root)
            changed = sorted(path for path in {**before, **after} if before.get(path) != after.get(path))
            if changed:
                told.append(f"I4: the late rank {strike.rank} wrote {', '.join(changed[:4])} after the next job had begun")
        else:
            victim.signal(signal.SIGCONT)
    ends[id(victim)] = victim.end(time.monotonic() + LIMIT)
    return [ends[id(rank)] for rank in ranks]


# -- judging -------------------------------------------------------------------------------------------------------------

def _look(program: Program, item: Item, known: Known, root: str, ends: list[Ended], diaries: list[list[dict[str, Any]]],
          step: int, judged: Judged) -> None:
    strike = item.strike
    struck = [line for line in diaries[strike.rank] if line["what"] == "struck"]
    judged.fired = bool(struck)
    judged.reached = sum(strike.among(line["counts"]) for line in diaries[strike.rank] if line["what"] == "operations")
    story = _story(program, known, diaries)
    if step == LAST:  # the job beside the stopped rank
        story.saves.append(Save(NEXT, known.contents[NEXT], {0: COMMITTED}))
    found = Found(root={}, crashes=2 if step == LAST else 1)
    found.alive = [rank for rank, end in enumerate(ends) if end.hung]
    judged.hangs = len(found.alive)
    judged.violations += _partial(root)
    judged.violations += _honest(program, strike, struck, diaries)
    judged.violations += _ended(strike, struck, ends, diaries)
    damaged = _damage(strike, struck, root, known, story)

    judged.jobs += 1
    after = _run(again, root, item.program, step)
    judged.hangs += sum(end.hung for end in after)
    found.alive += [rank for rank, end in enumerate(after) if end.hung]
    answers = {rank: _answer(end, known) for rank, end in enumerate(after)}
    found.disturbed = [f"the state in save {line['save']}" for diary in diaries for line in diary if line["what"] == "disturbed"]
    found.root, skipped = tree_of(root), {}
    with suppress(FileNotFoundError):
        found.root, skipped = pickle.loads(Path(f"{root}.resumed").read_bytes())
        found.resumed = dict(answers)
    if damaged and not standing(found.root) and all("NoUsableCheckpoint" in str(a) for a in answers.values()):
        # Nothing is left, and it was said so: of what was told nothing can stand, and the rest is asked as ever.
        judged.violations += check(replace(story, saves=[replace(save, told={}) for save in story.saves]), found)
        judged.checked = True
        return
    judged.violations += check(story, found)
    if skipped and not damaged:
        judged.violations.append(f"I8: passed over without a reason that this run gave: {skipped}")
    if not found.resumed:
        judged.violations += [f"I8: rank {rank} could not resume: {answer}" for rank, answer in answers.items()]
    went_on = all(end.ok for end in after)
    story.saves.append(Save(step, known.contents[step], {0: COMMITTED} if went_on else {}))
    last = Found(root=tree_of(root), went_on=went_on, crashes=found.crashes)
    judged.violations += check(story, last)
    judged.checked = True
    if not item.traced:
        judged.noticed = _noticed(program, strike, struck, diaries)
    outcomes = tuple(tuple(sorted(set(save.told.values()))) for save in story.saves[len(program.before):])
    judged.verdicts = (outcomes, answers.get(0), judged.fired)
    if judged.violations:
        judged.logs = "\n".join(f"--- rank {rank}\n{end}" for rank, end in [*enumerate(ends), *enumerate(after)])


def _story(program: Program, known: Known, diaries: list[list[dict[str, Any]]]) -> Story:
    saves = [Save(step, known.contents[value], {0: COMMITTED, 1: COMMITTED}) for step, value, _ in program.before]
    for index, (step, value, _) in enumerate(program.saves):
        save = Save(step, known.contents[value], series=program.series(index))
        begun = False
        for rank, diary in enumerate(diaries):
            for line in diary:
                begun = begun or (line["what"] == "begin" and line["save"] == index)
                if line.get("save") == index and line.get("outcome"):
                    save.told[rank] = line["outcome"]
        if begun:
            saves.append(save)
    return Story(saves, program.keep, program.protected, {ROLLING: ROLLING_KEEP})


def _partial(root: str) -> list[str]:
    """P1: nothing under a checkpoint's name that is not one, at no instant. A reader may look at any."""
    if not os.path.isdir(root):
        return []
    whole = standing(tree_of(root))
    return [f"I4: {name} stands in the root and is not whole" for name in sorted(os.listdir(root))
            if _CHECKPOINT.fullmatch(name) and name not in whole]


def _must_surface(line: dict[str, Any], program: Program) -> bool:
    """Whether a save cannot be committed over the failure of this operation: it is about the attempt's own bytes or names.
    What tidies up, or only informs, may fail and be said in a log."""
    if line["op"] in ("unlink", "rmdir") or "/trash/" in line["path"] or "/trash/" in line["other"]:
        return False
    if not _ATTEMPT.search(line["path"]):
        return False
    tidied = line["op"] == "fsync_dir" and re.search(r"/staging/\d+/[0-9a-f]{16}$", line["path"])
    return not (tidied and any(rule == "replace" for _, _, rule in program.saves))


def _honest(program: Program, strike: Strike, struck: list[dict[str, Any]], diaries: list[list[dict[str, Any]]]) -> list[str]:
    """I9: a save that an error reached is not called committed, and each rank's error names rank, path and errno."""
    if strike.kind not in ("error", "late error"):
        return []
    wrong = []
    text = os.strerror(getattr(errno, strike.number))
    for index in range(len(program.saves)):
        within = _within(diaries[strike.rank], index, struck)
        if not within:
            continue
        must = strike.kind == "error" and any(_must_surface(line, program) for line in within)
        for rank, diary in enumerate(diaries):
            for line in diary:
                if line.get("save") != index or line["what"] not in ("told", "error"):
                    continue
                if line["what"] == "told" and must:
                    wrong.append(f"I9: rank {rank} was told that save {index} is committed though {within[0]['op']} "
                                 f"{within[0]['path']} failed on rank {strike.rank}")
                if line["what"] == "error" and not any(
                        f"rank {strike.rank}" in line["text"] and text in line["text"] and hit["path"] in line["text"]
                        for hit in within):
                    wrong.append(f"I9: rank {rank} heard of save {index} without rank, path ({within[0]['path']}) and errno: "
                                 f"{line['text'][:400]}")
    return wrong


def _within(diary: list[dict[str, Any]], index: int, struck: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was struck between the begin of a save and the word on it, on that rank."""
    begin = next((line["at"] for line in diary if line["what"] == "begin" and line["save"] == index), None)
    end = next((line["at"] for line in diary if line["what"] in ("told", "error") and line.get("save") == index), None)
    if begin is None or end is None:
        return []
    return [line for line in struck if begin <= line["at"] <= end]


def _ended(strike: Strike, struck: list[dict[str, Any]], ends: list[Ended], diaries: list[list[dict[str, Any]]]) -> list[str]:
    """A death must be the death that was asked for; whoever is left says who is gone; and what is raised is ours."""
    wrong = []
    for rank, end in enumerate(ends):
        wanted = signal.SIGKILL if rank == strike.rank and strike.kind in ("kill", "kill after") and struck else 0
        if end.killed != wanted and not end.hung:
            wrong.append(f"I6: rank {rank} was ended by signal {end.killed}, not {wanted}")
        if end.error.startswith("exit"):
            wrong.append(f"I6: rank {rank} ended with {end.error}")
        for line in diaries[rank]:
            if line["what"] == "error" and not line["ours"]:
                wrong.append(f"I9: rank {rank} raised {line['type']}: {line['text'][:300]}")
            left = rank != strike.rank and strike.kind in ("kill", "kill after", "stop")
            if line["what"] == "error" and left and f"rank {strike.rank}" not in line["text"]:
                wrong.append(f"I6: rank {rank} was not told that it is rank {strike.rank}: {line['text'][:300]}")
    return wrong


def _damage(strike: Strike, struck: list[dict[str, Any]], root: str, known: Known, story: Story) -> bool:
    """What a lie about a file's fsync comes to when the power goes: its bytes are zeros. Whoever resumes must notice."""
    if strike.kind != "lie" or not struck:
        return False
    damaged = False
    for line in struck:
        if line["op"] not in ("fsync", "fsync_file") or not _ATTEMPT.search(line["path"]):
            continue
        inside = re.sub(r"^.*/staging/\d+/[0-9a-f]{16}/", "", line["path"])
        path = os.path.join(root, inside)
        if not os.path.isfile(path):
            continue
        before = standing(tree_of(root))
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            file.write(bytes(size))
        for name in before.keys() - standing(tree_of(root)).keys():  # several, where one file has names in several
            damaged = True
            for save in story.saves:
                if save.step == before[name][0] and name.endswith(ROLLING) == (save.series == ROLLING):
                    save.told = {}
    if damaged:
        story.keep, story.keeps, story.protected = 1, {ROLLING: 1}, frozenset()
    return damaged


def _answer(end: Ended, known: Known) -> tuple[int, str] | str | None:
    if not end.ok:
        return f"{'hung' if end.hung else end.error or f'signal {end.killed}'}: {end.text[:600]}"
    if end.value is None:
        return None
    step, value = end.value
    return step, known.contents[value]


def _noticed(program: Program, strike: Strike, struck: list[dict[str, Any]],
             diaries: list[list[dict[str, Any]]]) -> float | None:
    """From the fault until another rank knew, less the deadline that had to pass first. Rank 0 knows before it raises: it
    still asks the missing for their stacks, and leaves the others time to read."""
    if not struck or strike.kind not in ("kill", "kill after", "stop"):
        return None
    others = [line["at"] for rank, diary in enumerate(diaries) if rank != strike.rank
              for line in diary if line["what"] in ("noticed", "error") and line["at"] >= struck[0]["at"]]
    if not others:
        return None
    waits = 0.0
    if strike.kind == "stop":
        after = SILENCE if strike.rank == 0 else DEADLINE if program.payload == "dcp" else 0.0  # the collective's, then ours
        waits = DEADLINE + after
    return float(max(min(others) - struck[0]["at"] - waits, 0.0))
