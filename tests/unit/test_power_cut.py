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
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from distckpt import janitor, owned, recovery
from distckpt.durable import Files
from distckpt.errors import DistckptError, SaveError
from distckpt.layout import MARKER
from distckpt.marker import Marker
from distckpt.ordered import fsync_tree_dirs, walk, write_new
from distckpt.owned import OwnedRoot
from distckpt.retention import KeepLast
from distckpt.rotation import Context
from distckpt.saving import commit, committer
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import Fault, FaultyFiles, Killed, die, fail, lie
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


def check(disk: CrashFiles, story: Story, machine: Machine, go_on: bool = True) -> None:
    """The invariants I1-I5, I8 and I10 (RELIABILITY 3.1) of what a power cut left: a new process recovers and resumes; with
    ``go_on`` it saves once more and ends."""
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
        if not go_on:
            return
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
        self.examine = self._check
        disk.before_op = self._before

    def _check(self, state: CrashFiles, story: Story) -> None:
        check(state, story, Machine(pid=500), go_on=self.states % 3 == 0)

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
           (3, "three fails", "replace"), (3, "three again", "replace"), (4, "four", "error"))


def run(disk: CrashFiles, cutter: Cutter | None, *faults: Fault, actions: Sequence[tuple[int, str, str]] = ACTIONS,
        ) -> FaultyFiles:
    """The run that is cut. A text that ends in "fails" is of a save whose publishing rename or exchange is refused; the
    first of them cannot be removed at once either."""
    stuck = fail(errno.EIO, op="rename", path=lambda p: re.search("/trash/1/[0-9a-f]{16}$", p) is not None)
    files = FaultyFiles(disk, stuck, *faults)
    story = cutter.story if cutter else Story()
    manager = Machine().boot(files)
    assert manager.resume().checkpoint is None
    for step, text, rule in actions:
        story.trying = step, text
        refusal = fail(errno.EIO, op=("rename", "exchange"), path=lambda p, final=f"{ROOT}/step-{step}": p == final,
                       at=3 if rule == "replace" and not disk.exchange_supported else 1)
        if "fails" in text:
            files.faults.append(refusal)
        try:
            manager.save(step, Blob(text), meta={"text": text}, on_exists=rule)
            story.done.append((step, text))
        except DistckptError as error:
            if isinstance(error.__cause__, Violation):
                raise error.__cause__ from None  # found by a cut inside the save, which takes it for an error of its own
            assert isinstance(error, SaveError) and refusal.fired and error.outcome == "aborted", error
            story.failed.add(text)
        assert bool(refusal.fired) == ("fails" in text)
        story.trying = None
        if cutter:
            cutter.cut()
        tidy(manager)
    close(manager)
    assert files.fired
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
    cutter = Cutter(files, limit=16, ordered=disk == "journal")
    run(files, cutter)
    assert cutter.cuts > 100 and cutter.states > 400
    assert standing(files, Machine().layout) == {"step-3": "three again", "step-4": "four"}
    assert not os.path.exists(ROOT), "something went to the real file system, past the seam"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_power_cut_during_the_recovery_from_a_power_cut(exchange: bool) -> None:
    """S8: a recovery that is cut in its turn loses nothing either, at any of its operations."""
    files = crash_disk()
    files.exchange_supported = exchange
    outer = Cutter(files, limit=16)
    recoveries: set[int] = set()
    cuts = states = 0
    seen: set[object] = set()

    def recover_with_cuts(state: CrashFiles, story: Story) -> None:
        nonlocal cuts, states
        staged = any(path.endswith(f"/{MARKER}") and "/staging/" in path for path in state.snapshot())
        if not staged or outer.cuts in recoveries:
            return  # there is nothing to roll forward or to put back, or one of the kind was tried at this cut
        recoveries.add(outer.cuts)
        cutter = Cutter(state, limit=8)
        cutter.story, cutter._seen = story, seen
        resumed = Machine(pid=300).boot(state).resume()
        if story.trying and resumed.checkpoint is not None and resumed.checkpoint.meta["text"] == story.trying[1]:
            story.done.append(story.trying)  # recovery has chosen, and no later cut may undo that
        cutter.cut()
        state.before_op = None
        check(state, story, Machine(pid=700))
        cuts, states = cuts + cutter.cuts, states + cutter.states

    outer.examine = recover_with_cuts
    run(files, outer)
    assert len(recoveries) > 10 and cuts > 300 and states > 200, (recoveries, cuts, states)


# -- mutants: a rule of order taken out, and the same check turns red ---------------------------------------------------

def _later(path: str) -> bool:
    """Not of the first save: there a mere refusal to start fresh would turn the check red already."""
    return "/step-1" not in path


def _payload(path: str) -> bool:
    return path.endswith(".bin") and _later(path)


def _staged_tree(path: str) -> bool:
    """The directories of an attempt's tree, not the one around it."""
    return "/staging/" in path and "/step-" in path and _later(path)


LIES = {
    "data is not synced": lie(op="fsync", path=_payload, forever=True),
    "directories of the tree are not synced": lie(op="fsync_dir", path=_staged_tree, forever=True),
    "sub-directories are not synced": lie(op="fsync_dir", path=lambda p: _staged_tree(p) and p.endswith("/sub"), forever=True),
    "the marker is not synced": lie(op="fsync", path=lambda p: p.endswith(MARKER) and _later(p), forever=True),
    "the root is not synced before rotation": lie(4, op="fsync_dir", path=lambda p: p == ROOT, forever=True),
    "trash is not synced before the first unlink": lie(op="fsync_dir", path=lambda p: p == f"{ROOT}/.distckpt/trash/1",
                                                       forever=True),
}


def _red(*faults: Fault) -> str:
    """What the check says of the run; a test failure when it finds nothing to say."""
    cutter = Cutter(crash_disk(), limit=16)
    with pytest.raises(Violation) as caught:
        run(cutter.disk, cutter, *faults)
    return str(caught.value)


@pytest.mark.parametrize("mutant", LIES)
def test_mutant_a_sync_that_is_left_out_turns_the_check_red(mutant: str) -> None:
    found = _red(replace(LIES[mutant], seen=0, fired=0))
    assert "is not whole" in found or "are gone" in found or "resumed from" in found or MARKER in found, found


def test_mutant_a_marker_before_the_directories_turns_the_check_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """S9: the marker would be durable while the entries that it speaks for are not."""
    def late(files: Files, path: str, data: bytes) -> None:
        write_new(files, path, data)
        files.fsync_dir(os.path.dirname(path))
        fsync_tree_dirs(getattr(files, "inner", files), os.path.dirname(path))

    monkeypatch.setattr(commit, "fsync_tree_dirs", lambda files, top: None)
    monkeypatch.setattr(commit, "write_new", late)
    early = lie(op="fsync_dir", path=lambda p: p.endswith("/sub"), forever=True)  # what the ranks themselves sync
    assert "a marker in .distckpt/trash" in _red(early) and early.fired


def test_mutant_rotation_before_publishing_turns_the_check_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: old checkpoints go only after a newer one is committed and its name is durable."""
    def early(one: OwnedRoot, found: Marker, **how: Any) -> commit.Outcome:
        one.rotate("main", KeepLast(1), Context({}, {}))
        return commit.commit(one, found, **how)

    monkeypatch.setattr(committer, "commit", early)
    assert "are gone" in _red()


def test_mutant_an_abort_that_leaves_its_marker_turns_the_check_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: what was announced as aborted would be published by the next start."""
    monkeypatch.setattr(commit, "withdraw", lambda owned, staged, error: commit.Outcome("aborted", error))
    assert "resumed from (4, 'four fails')" in _red()


def test_mutant_recovery_that_does_not_roll_forward_turns_the_check_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replace without exchange takes the old one away before the new one has its name."""
    disk = crash_disk()
    disk.exchange_supported = False
    monkeypatch.setattr(recovery, "_roll_forward", lambda *args: False)
    with pytest.raises(Violation):
        run(disk, Cutter(disk, limit=16))


def _half_deleted(disk: CrashFiles) -> CrashFiles:
    """The power fails after the first unlink of a victim in trash; everything was synced by then."""
    files = FaultyFiles(disk, die(op="unlink", path=lambda p: "/trash/" in p and p.endswith(".bin"), after=True))
    with pytest.raises(Killed):
        run(disk, None, *files.faults)
    return disk.after_kill()


@pytest.mark.parametrize("marker_first", [True, False])
def test_S3_a_removal_that_was_cut_half_way_never_comes_back(monkeypatch: pytest.MonkeyPatch, marker_first: bool) -> None:
    """A reader that died between writing its lease and looking again has left a lease on what is half deleted. Without
    the marker going first, durably, the next start would take it for whole and move it back."""
    if not marker_first:
        monkeypatch.setattr(janitor, "discard", lambda files, root, path, *_: remove_tree_backwards(files, path))
    disk = _half_deleted(crash_disk())
    machine = Machine(pid=500)
    victim = next(path for path in disk.snapshot() if "/trash/1/step-1." in path)
    attempt = victim.split("/step-1.")[1].split("/")[0]
    write_payload(disk, machine.layout.leases(attempt, "0" * 16 + ".json"), b'{"reason": "r", "host": "h", "ttl": null}')
    manager = machine.boot(disk)
    close(manager)
    there = {item.name for item in disk.scan(ROOT)}
    assert ("step-1" in there) == (not marker_first)


def remove_tree_backwards(files: Files, path: str) -> None:
    """As file systems do it that list in another order."""
    for relative, item in sorted(walk(files, path), reverse=True):
        (files.rmdir if item.kind == "dir" else files.unlink)(os.path.join(path, relative))
    files.rmdir(path)
