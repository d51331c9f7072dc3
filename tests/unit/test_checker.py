"""The checker turns red for every invariant, and for nothing else. It reads the format by itself; so these disks are real."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

import distckpt
from distckpt.testing.checker import ABORTED, COMMITTED, UNKNOWN, Found, Save, Story, check, content_of, standing, tree_of


def _save(manager: distckpt.CheckpointManager, step: int, text: str) -> None:
    with manager.saving(step, on_exists="replace") as files, files.writer("data.bin") as out:
        out.write(text.encode())


def _content(text: str) -> str:
    return content_of({"data.rank-00000-of-00001.bin": text.encode()})


@pytest.fixture
def run(tmp_path: Path) -> tuple[Story, Found]:
    """Three saves, two kept, and one more that failed."""
    with distckpt.CheckpointManager(tmp_path, keep_last=2) as manager:
        for step in (1, 2, 3):
            _save(manager, step, f"step {step}")
    saves = [Save(step, _content(f"step {step}"), {0: COMMITTED, 1: COMMITTED}) for step in (1, 2, 3)]
    saves.append(Save(4, _content("failed"), {0: ABORTED, 1: ABORTED}))
    newest = (3, _content("step 3"))
    return Story(saves, keep=2), Found(tree_of(str(tmp_path)), {0: newest, 1: newest}, went_on=True)


def test_a_good_run_has_nothing_to_say(run: tuple[Story, Found]) -> None:
    assert check(*run) == []
    assert sorted(standing(run[1].root)) == ["step-2", "step-3"]


@pytest.mark.parametrize("digest", ["xxh3-128", "sha256", None])
def test_files_are_held_against_the_digest_that_the_marker_names(digest: str | None, tmp_path: Path) -> None:
    with distckpt.CheckpointManager(tmp_path, digest=digest) as manager:
        _save(manager, 1, "step 1")
    tree = tree_of(str(tmp_path))
    assert standing(tree) == {"step-1": (1, _content("step 1"))}
    changed = {**tree, "step-1/data.rank-00000-of-00001.bin": b"step X"}
    assert list(standing(changed)) == ([] if digest else ["step-1"]), "without a digest only the size tells"


def _without(found: Found, prefix: str) -> None:
    found.root = {path: data for path, data in found.root.items() if not path.startswith(prefix)}


def _changed(found: Found, path: str, data: bytes) -> None:
    found.root = {**found.root, path: data}


FAULTS: dict[str, tuple[str, Callable[[Story, Found], object]]] = {
    "a byte was flipped": ("I5", lambda s, f: _changed(f, "step-3/data.rank-00000-of-00001.bin", b"step X")),
    "a shard is missing": ("I5", lambda s, f: _without(f, "step-3/data")),
    "the marker was cut": ("I5", lambda s, f: _changed(f, "step-3/commit.json", f.root["step-3/commit.json"][:-1])),
    "the newest is gone": ("I2", lambda s, f: _without(f, "step-3/")),
    "an older one that is to be kept is gone": ("I5", lambda s, f: _without(f, "step-2/")),
    "a pinned one is gone": ("I5", lambda s, f: setattr(s, "protected", frozenset({1}))),
    "other bytes than were written": ("I1", lambda s, f: setattr(s.saves[2], "content", "other")),
    "an aborted one stands": ("I4", lambda s, f: s.saves[2].told.update({0: ABORTED, 1: ABORTED})),
    "ranks resumed from different ones": ("I3", lambda s, f: f.resumed.update({1: (2, _content("step 2"))})),
    "a fresh start though there is one": ("I3", lambda s, f: f.resumed.update({1: None})),
    "resume raised": ("I8", lambda s, f: f.resumed.update({1: "ResumeError: cannot read"})),
    "the next save failed": ("I8", lambda s, f: setattr(f, "went_on", False)),
    "a rank hangs": ("I6", lambda s, f: f.alive.append(1)),
    "ranks heard different verdicts": ("I7", lambda s, f: s.saves[1].told.update({1: ABORTED})),
    "an error that nobody saw": ("I9", lambda s, f: f.injected.append(("EIO", "rank 1"))),
    "garbage": ("I10", lambda s, f: _changed(f, ".distckpt/trash/1/x/data", b"x" * 5000)),
    "the model changed": ("I11", lambda s, f: f.disturbed.append("the weights")),
    "one step under two names": ("I12", lambda s, f: setattr(f, "root", {**f.root, **_copy(f)})),
}


def _copy(found: Found) -> dict[str, bytes]:
    """Step 3's files once more, as ``step-03``, with a marker that says so."""
    sealed, _, _ = found.root["step-3/commit.json"].replace(b'"name":"step-3"', b'"name":"step-03"').rpartition(b',\n"seal":')
    marker = sealed + f',\n"seal":"sha256:{hashlib.sha256(sealed).hexdigest()}"}}\n'.encode()
    data = "data.rank-00000-of-00001.bin"
    return {f"step-03/{data}": found.root[f"step-3/{data}"], "step-03/commit.json": marker}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_invariant_turns_red(fault: str, run: tuple[Story, Found]) -> None:
    number, spoil = FAULTS[fault]
    spoil(*run)
    said = check(*run)
    assert any(line.startswith(f"{number}:") for line in said), said


def test_a_save_in_doubt_may_stand_or_not(run: tuple[Story, Found]) -> None:
    story, found = run
    story.saves[2].told = {0: UNKNOWN}
    assert check(story, found) == []
    _without(found, "step-3/")
    found.resumed = {0: (2, _content("step 2"))}
    assert [line for line in check(story, found) if not line.startswith("I5: step 1")] == []


def test_a_replace_in_doubt_is_the_old_or_the_new(run: tuple[Story, Found]) -> None:
    story, found = run
    story.saves.insert(3, Save(3, _content("again")))
    assert check(story, found) == []
    _changed(found, "step-3/data.rank-00000-of-00001.bin", b"neither")
    assert any(line.startswith("I5") for line in check(story, found))


def test_an_injected_error_must_be_told_with_all_its_words(run: tuple[Story, Found]) -> None:
    story, found = run
    found.injected = [("No space", "rank 1")]
    found.errors = ["rank 1 on host-a: No space left"]
    assert check(story, found) == []
