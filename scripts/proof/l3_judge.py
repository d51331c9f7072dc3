"""Whether a disk that lost its power still holds what was promised: the story of one root, cut after cut."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distckpt.testing import checker
from scripts.proof.l3_program import KEEP, ROLLING, ROLLING_KEEP, WORLD, Told
from tests.crash.forks import Ended

_ID = re.compile(r"[0-9a-f]{8,}")
_KEPT = (".distckpt/owner/", ".distckpt/journal/")
_NUMBER = re.compile(r"[0-9]+")
_STEP = re.compile(rf"step-[0-9]+(-{ROLLING})?")


@dataclass
class Root:
    """What is known of one root. ``lives`` are told to it in their order; a life that resumed judges all before it."""

    story: checker.Story = field(default_factory=lambda: checker.Story(keep=KEEP, keeps={ROLLING: ROLLING_KEEP}))
    crashes: int = 0
    lives: int = 0

    def before(self, tree: Mapping[str, bytes]) -> list[str]:
        """What a reader could take wrongly before any recovery: whatever has a checkpoint's name is one, to the last byte."""
        whole = checker.standing(tree)
        named = {path.split("/")[0] for path in tree}
        return [f"I4: {name} stands in the root and is not whole" for name in sorted(named)
                if _STEP.fullmatch(name) and name not in whole]

    def after(self, told: Told, tree: Mapping[str, bytes] | None, complete: bool) -> list[str]:
        """Judge what the life found and add what it was told. ``complete``: it proved that saving works before its own cut."""
        wrong = []
        if tree is not None:
            went_on = ("went_on" in told) if complete else None
            garbage = [name for line in told.events.get("garbage", []) for name in line["left"]]
            found = checker.Found(tree, told.resumed, went_on, crashes=self.crashes)
            wrong = self.before(tree) + checker.check(self.story, found)
            wrong += [f"I10: {name} is left behind" for name in garbage]
            wrong += [f"I3: {line['why']} was passed over" for line in told.events.get("skipped", [])]
            if complete and len(told.resumed) == WORLD:
                self._settle(tree)
        elif complete:
            wrong = ["I8: the program could not be started again"]
        self.story.saves += told.saves
        self.crashes += 1
        self.lives += 1
        return wrong

    def _settle(self, tree: Mapping[str, bytes]) -> None:
        """What was open is decided now: every rank resumed, so it is there for good or never will be."""
        there = set(checker.standing(tree).values())
        for save in self.story.saves:
            if save.open:
                save.told[-1] = checker.COMMITTED if (save.step, save.content) in there else checker.ABORTED


def badly(ends: Sequence[Ended]) -> list[str]:
    """The ranks that ended with what no caller of the library expects, in one line each."""
    found = []
    for rank, end in enumerate(ends):
        if not end.ok:
            lines = [line.strip() for line in end.log.splitlines() if line.startswith("  File ")]
            found.append(f"I9: rank {rank} ended with {end.error or end.killed}: {end.text[:400]!r}, at {lines[-1:]}")
    return found


def shape(tree: Mapping[str, bytes], first: int) -> int:
    """What tells two disks apart to a reader: which files there are, and which of them are empty, whatever their steps and ids.
    ``first``: the number that steps are counted from."""
    def relative(path: str) -> str:
        path = _ID.sub("x", path)
        return _NUMBER.sub(lambda found: str(int(found.group()) - first) if path[:found.start()].endswith("step-") else "n", path)
    return hash(frozenset((relative(path), bool(data)) for path, data in tree.items() if not path.startswith(_KEPT)))
