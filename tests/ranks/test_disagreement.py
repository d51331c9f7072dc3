"""Ranks that make different calls, or one call with different arguments: RankDisagreement on each, with the values by rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt.errors import RankDisagreement
from distckpt.retention import KeepLast
from tests.harness import run, values
from tests.inprocess import Job, same_error, staged, tree, write

STATE = {"w": torch.ones(2)}


@pytest.mark.parametrize(("option", "one", "other"), [
    ("keep_last", 2, 3), ("retention", KeepLast(2), None), ("on_exists", "skip", "error"), ("digest", None, "xxh3-128"),
    ("naming", "a-{step}", "b-{step}"), ("fingerprint", "f1", "f2"), ("run_id", "r1", "r2"), ("root", "one", "other"),
])
def test_managers_made_with_different_options(option: str, one: Any, other: Any, tmp_path: Path) -> None:
    """Found out in the first round: nothing is made on disk, and a manager made again with equal ones works."""
    if option == "root":
        one, other = str(tmp_path / one), str(tmp_path / other)
    job = Job(tmp_path / "root", 3)
    begun = time.monotonic()
    outcomes = job.threads.run(lambda rank: job.open(rank, **{option: other if rank == 1 else one}))
    for error in same_error(outcomes, RankDisagreement):
        assert list(error.values) == [0, 1, 2] and error.values[0] == error.values[2] != error.values[1]
        assert ("the root" if option == "root" else "the manager's options") in str(error) and "rank 1" in str(error)
    assert time.monotonic() - begun < 5 and list(tmp_path.iterdir()) == []
    values(Job(tmp_path / "root", 3).run(lambda m: write(m, 1)))


def _series(manager: distckpt.CheckpointManager, name: str, **limits: Any) -> Any:
    return manager.series(name, **limits)


class Collective(distckpt.Shards):
    collective = True


CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Any, Any, str]] = {
    "steps": (lambda m: m.save(5, STATE), lambda m: m.save(6, STATE), 5, 6, "the step"),
    "on_exists": (lambda m: m.save(5, STATE), lambda m: m.save(5, STATE, on_exists="skip"), "error", "skip", "on_exists"),
    "series": (lambda m: _series(m, "a").save(5, STATE), lambda m: _series(m, "b").save(5, STATE), "a", "b", "the series"),
    "limits of a series": (lambda m: _series(m, "c", keep_last=1).save(5, STATE),
                           lambda m: _series(m, "c", keep_last=2).save(5, STATE), "last=1", "last=2", "the manager's options"),
    "collective or not": (lambda m: m.save(5, distckpt.Shards(STATE)), lambda m: m.save(5, Collective(STATE)), False, True,
                          "whether the payload runs collectives"),
    "members": (lambda m: m.save(5, distckpt.TrainState(a={})), lambda m: m.save(5, distckpt.TrainState(b={})), ["a"], ["b"],
                "which members are saved"),
    "a block and a payload": (lambda m: write(m, 5), lambda m: m.save(5, STATE), None, [], "which members are saved"),
    "save and resume": (lambda m: m.save(5, STATE), lambda m: m.resume(), "save", "resume", "different calls"),
    "save and close": (lambda m: m.save(5, STATE), lambda m: m.close(), "save", "close", "different calls"),
    "resume and restore": (lambda m: m.resume(), lambda m: m.restore(dict(STATE)), "resume", "restore", "different calls"),
    "which step to resume": (lambda m: m.resume(), lambda m: m.resume(step=1), ["main", None, "size", False, ""],
                             ["main", 1, "size", False, ""], "what to resume from"),
    "how to verify": (lambda m: m.resume(), lambda m: m.resume(verify="digest"), ["main", None, "size", False, ""],
                      ["main", None, "digest", False, ""], "what to resume from"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ(name: str, tmp_path: Path) -> None:
    """At once, before any I/O; what is committed does not change, and the next call works."""
    one, other, first, second, label = CALLS[name]
    root = tmp_path / "root"
    job = Job(root, 3)
    job.start()
    job.each(lambda m: write(m, 1))
    before = tree(root)
    begun = time.monotonic()
    for error in same_error(job.each(lambda m: other(m) if m.rank == 2 else one(m)), RankDisagreement):
        assert error.values == {0: first, 1: first, 2: second} and label in str(error)
    assert time.monotonic() - begun < 5
    assert tree(root) == before and staged(root) == []
    if name != "save and close":
        values(job.each(lambda m: write(m, 7)))
        job.finish()


def _differ(rank: int, world: int, root: str) -> list[Any]:
    found = []
    with distckpt.CheckpointManager(root) as manager:
        with pytest.raises(RankDisagreement) as caught:
            manager.save(10 + rank, STATE)
        found.append(caught.value.values)
        with pytest.raises(RankDisagreement) as caught:
            if rank == 0:
                manager.save(1, STATE)
            else:
                manager.resume()
        found.append(caught.value.values)
        manager.save(1, STATE)
    with pytest.raises(RankDisagreement) as caught:
        distckpt.CheckpointManager(f"{root}-{rank}")
    found.append(caught.value.values)
    return found


def test_real_ranks_disagree_alike(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    for steps, calls, roots in values(run(2, _differ, root)):
        assert steps == {0: 10, 1: 11} and calls == {0: "save", 1: "resume"}
        assert roots == {0: f"{root}-0", 1: f"{root}-1"}
