"""A power cut at every moment of a run, on a disk that keeps what was fsynced apart from what was not.

A run of the real manager (three saves, an abort, a replace, one more, always keeping two) is cut before every
operation that orders something and after every save that returned; what is left of the disk is enumerated, and a new
process recovers, resumes, saves and ends on each. Cuts between two ordering operations leave no disk that is not among
those of the next one. Every rule of order is then taken out in turn, and the same check must turn red: one that cannot
fail proves nothing.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from distckpt import owned, recovery
from distckpt.durable import Files, remove_tree, to_trash
from distckpt.errors import DistckptError, SaveError
from distckpt.layout import MARKER
from distckpt.manager import CheckpointManager
from distckpt.retention import KeepLast
from distckpt.rotation import Context
from distckpt.saving import commit, committer
from distckpt.testing.crashdisk import PowerCut
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.faults import WRITES, Fault, FaultyFiles, fail, lie
from tests.onerank import Blob, Machine, close, standing, tidy, unclean
from tests.support import ROOT, crash_disk

KEEP = 2
ORDERS = ("fsync", "fsync_file", "fsync_dir")


@dataclass
class Story:
    """What the program knows at a moment: ``done`` are (step, text) of saves that returned, in their order; ``trying``
    is the one under way; ``failed`` are texts of saves that were reported as aborted."""

    done: list[tuple[int, str]] = field(default_factory=list)
    trying: tuple[int, str] | None = None
    failed: set[str] = field(default_factory=set)

    def copy(self) -> Story:
        return Story(list(self.done), self.trying, set(self.failed))

    def expected(self, newest: tuple[int, str] | None) -> dict[str, str]:
        """The checkpoints that must stand when ``newest`` is the one resumed from: the last two steps of the line."""
        line = [pair for pair in self.done if newest is None or pair[0] != newest[0]] + ([newest] if newest else [])
        latest: dict[int, str] = {}
        for step, text in line:
            latest.pop(step, None)
            latest[step] = text
        return {f"step-{step}": text for step, text in list(latest.items())[-KEEP:]}


class Violation(AssertionError):
    pass


def check(disk: CrashFiles, story: Story, machine: Machine) -> None:
    """The invariants I1-I5 and I8 (RELIABILITY 3.1) of what a power cut left: a new process recovers, resumes and goes on."""
    allowed = [story.done[-1] if story.done else None, *([story.trying] if story.trying else [])]
    try:
        manager = machine.boot(disk)
        resumed = manager.resume(verify="digest")
        found = None if resumed.checkpoint is None else (resumed.checkpoint.step, str(resumed.checkpoint.meta["text"]))
        there = standing(disk, machine.layout)  # I1, I4: everything that is visible is whole
        if found not in allowed:  # I2, I3
            raise Violation(f"resumed from {found}, not from one of {allowed}")
        missing = story.expected(found).items() - there.items()
        if missing:  # I5
            raise Violation(f"{sorted(missing)} are gone; {there} stand")
        if story.failed & set(there.values()):
            raise Violation(f"{story.failed & set(there.values())} was reported as aborted and stands all the same")
        if resumed.skipped:
            raise Violation(f"passed over: {resumed.skipped}")
        tidy(manager)
        manager.save(77, Blob("afterwards"), meta={"text": "afterwards"})  # I8
        close(manager)
        there = standing(disk, machine.layout)
        if there.get("step-77") != "afterwards" or (story.done and len(there) < KEEP):
            raise Violation(f"after the next save only {there} stand")
        if unclean(disk, machine.layout):  # I10
            raise Violation(f"left behind: {unclean(disk, machine.layout)}")
    except (DistckptError, OSError, AssertionError) as error:
        raise Violation(f"{type(error).__name__}: {error}; {story}; left on the disk: {sorted(disk.snapshot())}") from error


class Cutter:
    """Cuts the power of ``disk`` again and again while a run goes on, and checks what is left; each disk once."""

    def __init__(self, disk: CrashFiles, limit: int, ordered: bool = False) -> None:
        self.disk, self.limit, self.ordered = disk, limit, ordered
        self.story = Story()
        self.cuts = self.states = 0
        self._seen: set[object] = set()
        self.examine: Callable[[CrashFiles, Story], None] = lambda state, story: check(state, story, Machine(pid=500))
        disk.before_op = self._before

    def _before(self, op: str, path: str) -> None:
        if op in ORDERS:
            self.cut()

    def cut(self) -> None:
        """What may be left if the power fails now."""
        self.cuts += 1
        before, self.disk.before_op = self.disk.before_op, None
        shared = dict(owned._open)
        for state in self.disk.crash_states(self.limit, seed=self.cuts, ordered=self.ordered):
            key = self._key(state)
            if key not in self._seen:
                self._seen.add(key)
                self.states += 1
                self.examine(state, self.story.copy())
        owned._open.clear()
        owned._open.update(shared)
        self.disk.before_op = before

    def _key(self, state: CrashFiles) -> object:
        """All that a restart reads, and what the program knew. The beat and most of the journal are for people."""
        def shown(path: str, data: bytes | None) -> object:
            if path.endswith(".jsonl"):
                return data is not None and b'"committed"' in data
            return None if path.endswith(".beat") else data
        view = tuple((path, shown(path, data)) for path, data in sorted(state.snapshot().items()))
        return view, tuple(self.story.done), self.story.trying


ACTIONS = ((1, "one", "error"), (2, "two", "error"), (3, "three", "error"), (4, "four fails", "error"),
           (3, "three again", "replace"), (4, "four", "error"))
PUBLISH_OF_4 = {"op": "rename", "path": f"{ROOT}/step-4"}


def run(disk: CrashFiles, cutter: Cutter | None, *faults: Fault, **options: object) -> FaultyFiles:
    """The run that is cut. Its fourth save cannot be published at first."""
    files = FaultyFiles(disk, fail(errno.EIO, **PUBLISH_OF_4), *faults)
    story = cutter.story if cutter else Story()
    manager = Machine().boot(files, **options)
    assert manager.resume().checkpoint is None
    for step, text, rule in ACTIONS:
        story.trying = step, text
        try:
            manager.save(step, Blob(text), meta={"text": text}, on_exists=rule)
            story.done.append((step, text))
        except SaveError as error:
            assert "fails" in text and error.outcome == "aborted", error
            story.failed.add(text)
        story.trying = None
        if cutter:
            cutter.cut()
        tidy(manager)
    close(manager)
    assert files.faults[0].fired == 1
    return files


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


@pytest.mark.parametrize("disk", ["posix", "journal", "nfs"])
def test_whatever_a_power_cut_leaves_the_next_process_goes_on_from_the_newest(disk: str) -> None:
    """``posix``: any subset of what was not synced. ``journal``: entries survive as a prefix. ``nfs``: no exchange, no links."""
    files = crash_disk()
    files.exchange_supported = files.links_supported = disk != "nfs"
    cutter = Cutter(files, limit=40, ordered=disk == "journal")
    run(files, cutter)
    assert cutter.cuts > 100 and cutter.states > 150
    assert standing(files, Machine().layout) == {"step-3": "three again", "step-4": "four"}
