"""Whether a run kept its promises: the invariants I1 to I12, from what its ranks were told and what is left on the disk.

It knows nothing of the code under test. A checkpoint is what the format says (three lines, a seal over the first two, a
digest for every file); what must be in it is what the test wrote (``content``). A run that reached no verdict on a save may
have it or not; one that was told "committed" on any rank has it, through every crash that follows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

MAIN = "main"
COMMITTED, ABORTED, UNKNOWN, SKIPPED = "committed", "aborted", "unknown", "skipped"

Tree = Mapping[str, bytes]

_DIGESTS: dict[str, Callable[[bytes], str]] = {"xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
                                               "sha256": lambda data: hashlib.sha256(data).hexdigest()}


@dataclass
class Save:
    """One save that was begun. ``content``: what ``content_of`` gives for its files. ``told``: rank to verdict, as far as
    ranks heard one. ``series``: its line of checkpoints, which has limits of its own."""

    step: int
    content: str
    told: dict[int, str] = field(default_factory=dict)
    series: str = MAIN

    @property
    def committed(self) -> bool:
        return COMMITTED in self.told.values()

    @property
    def open(self) -> bool:
        """Nobody knows that it failed or that it succeeded."""
        return not self.committed and ABORTED not in self.told.values() and SKIPPED not in self.told.values()


@dataclass
class Story:
    """Saves in the order in which they were begun, up to the moment of the crash. ``keep``: None for no rotation;
    ``protected``: steps that rotation may not take (pinned, leased, best); both of the main series. ``keeps``: of others."""

    saves: list[Save] = field(default_factory=list)
    keep: int | None = None
    protected: frozenset[int] = frozenset()
    keeps: Mapping[str, int | None] = field(default_factory=dict)


@dataclass
class Found:
    """What came of it. ``root``: every file under the root, ``resumed``: per rank (step, content), None for a fresh start, or
    the error as text. ``went_on``: whether the next save worked. ``alive``: ranks that never ended. ``crashes``: how many so far.
    ``errors``: what ranks raised; ``injected``: for each fault that must surface, words of which an error must have every one.
    ``disturbed``: what of the training state a failed save changed."""

    root: Tree
    resumed: dict[int, tuple[int, str] | str | None] = field(default_factory=dict)
    went_on: bool | None = None
    alive: list[int] = field(default_factory=list)
    crashes: int = 1
    errors: list[str] = field(default_factory=list)
    injected: list[tuple[str, ...]] = field(default_factory=list)
    disturbed: list[str] = field(default_factory=list)


def check(story: Story, found: Found) -> list[str]:
    """What was violated, one line each; empty when all is well."""
    there = standing(found.root)
    wrong: list[str] = []
    series_of = {name: _series(found.root, name) for name in there}
    for series in dict.fromkeys([MAIN, *(save.series for save in story.saves), *series_of.values()]):
        keep, protected = (story.keep, story.protected) if series == MAIN else (story.keeps.get(series), frozenset[int]())
        saves = [save for save in story.saves if save.series == series]
        wrong += _stand(saves, {name: there[name] for name in there if series_of[name] == series}, keep, protected)

    line = _line([save for save in story.saves if save.series == MAIN],
                 {name: there[name] for name in there if series_of[name] == MAIN})
    newest = (line[-1].step, line[-1].content) if line else None
    for rank, answer in found.resumed.items():
        if isinstance(answer, str):
            wrong.append(f"I8: rank {rank} could not resume: {answer}")
        elif answer != newest:
            wrong.append(f"I3: rank {rank} resumed from {answer}, the newest is {newest}")
    for save in story.saves:
        if save.committed and ABORTED in save.told.values():
            wrong.append(f"I7: the save of step {save.step} was {save.told}")

    if found.went_on is False:
        wrong.append("I8: the next save did not work")
    wrong += [f"I6: rank {rank} never ended" for rank in found.alive]
    wrong += [f"I9: no error says {words}" for words in found.injected
              if not any(all(word in error for word in words) for error in found.errors)]
    room = max((_size(found.root, name) for name in there), default=0)
    stray = sum(len(data) for path, data in found.root.items() if _is_payload_waste(path))
    if found.went_on and stray > 2 * max(room, 1) * found.crashes:
        wrong.append(f"I10: {stray} bytes are left in staging and trash, more than two checkpoints a crash")
    wrong += [f"I11: a failed save changed {what}" for what in found.disturbed]
    return wrong


def _stand(saves: Sequence[Save], there: Mapping[str, tuple[int, str]], keep: int | None, protected: frozenset[int]) -> list[str]:
    """What is wrong with what stands of one series."""
    line = _line(saves, there)
    wrong: list[str] = []
    for name, (step, content) in there.items():
        if content not in {save.content for save in saves if save.step == step}:
            wrong.append(f"I1: {name} stands and holds what no save of step {step} wrote")
        elif all(ABORTED in save.told.values() for save in saves if (save.step, save.content) == (step, content)):
            wrong.append(f"I4: {name} stands though every save of it was reported as aborted")

    steps = [step for step, _ in there.values()]
    for save in line[-1:]:
        if save.committed and save.step not in steps:
            wrong.append(f"I2: step {save.step}, the newest that was told to be committed, is gone")
    for step in sorted({step for step in steps if steps.count(step) > 1}):
        wrong.append(f"I12: step {step} stands under two names")
    for save in line:
        kept = keep is None or save in line[-keep:] or save.step in protected
        if kept and there.get(_name_of(there, save.step), (None, None))[1] != save.content:
            wrong.append(f"I5: step {save.step} must stand, with the content of its last committed save")
    return wrong


def _line(saves: Sequence[Save], there: Mapping[str, tuple[int, str]]) -> list[Save]:
    """The checkpoints there are, oldest first: the last committed save of each step, or an open one that came after it and
    turned out to have been published."""
    line: dict[int, Save] = {}
    for save in saves:
        stands = (save.step, save.content) in there.values()
        if save.committed or (save.open and stands):
            line.pop(save.step, None)
            line[save.step] = save
    return list(line.values())


def _name_of(there: Mapping[str, tuple[int, str]], step: int) -> str:
    return next((name for name, (found, _) in there.items() if found == step), "")


def _is_payload_waste(path: str) -> bool:
    return path.startswith((".distckpt/staging/", ".distckpt/trash/"))


def _size(root: Tree, name: str) -> int:
    return sum(len(data) for path, data in root.items() if path.startswith(f"{name}/"))


# -- reading, independently of the library -------------------------------------------------------------------------------

def standing(root: Tree) -> dict[str, tuple[int, str]]:
    """Name to (step, content) of every directory that is a whole checkpoint."""
    found = {}
    for path in root:
        name, _, rest = path.rpartition("/")
        if rest != "commit.json" or not name or "/" in name or name.startswith("."):
            continue
        step = _whole(root, name)
        if step is not None:
            found[name] = (step, content_of({p[len(name) + 1:]: data for p, data in root.items()
                                             if p.startswith(f"{name}/") and p != path}))
    return found


def _whole(root: Tree, name: str) -> int | None:
    """The step of a directory with a sealed marker of its own and every file as the marker says; None of any other."""
    raw = root[f"{name}/commit.json"]
    sealed, _, seal = raw.rpartition(b',\n"seal":')
    if seal != f'"sha256:{hashlib.sha256(sealed).hexdigest()}"}}\n'.encode():
        return None
    marker = json.loads(raw)
    if marker["head"]["name"] != name:
        return None
    for path, size, digest, _ in marker["body"]["files"]:
        data = root.get(f"{name}/{path}")
        if data is None or len(data) != size:
            return None
        if digest is not None:
            algorithm, _, text = digest.partition(":")
            if _DIGESTS[algorithm](data) != text:
                return None
    return int(marker["head"]["step"])


def _series(root: Tree, name: str) -> str:
    return str(json.loads(root[f"{name}/commit.json"])["head"].get("series", MAIN))


def content_of(files: Tree) -> str:
    """What tells the contents of two checkpoints apart: their files, by path, bytes and all."""
    running = hashlib.sha256()
    for path in sorted(files):
        running.update(f"{path}\0{len(files[path])}\0".encode() + files[path])
    return running.hexdigest()[:16]


def tree_of(root: str) -> dict[str, bytes]:
    """Every file under a real directory, by its relative path."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, root)] = file.read()
    return found
