"""``on_commit``: hooks run after publication, once, where they were declared, and touch nobody."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _python_dispatch

import distckpt
from distckpt.errors import ConfigError
from distckpt.saving.alone import alone
from tests.inprocess import Job, await_, events, values

STATE = {"w": torch.arange(1000, dtype=torch.float32)}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "root", world=2, keep_last=5)


@pytest.mark.parametrize("background", [False, True])
def test_a_hook_runs_where_it_was_declared_and_after_publication(job: Job, background: bool) -> None:
    seen: dict[str, list[tuple[int, Any, str, bool]]] = {"rank0": [], "all": []}

    def loop(manager: distckpt.CheckpointManager) -> None:
        mine = threading.current_thread().name

        def note(ranks: str) -> Any:
            def hook(record: distckpt.CommitRecord) -> None:
                there = os.path.exists(os.path.join(record.path, "commit.json")) and manager.latest_step() == record.step
                thread = "caller" if threading.current_thread().name == mine else threading.current_thread().name
                seen[ranks].append((manager.rank, record, thread, there))
            return hook

        manager.on_commit(note("rank0"))
        manager.on_commit(note("all"), ranks="all")
        handle = manager.save(7, STATE, metrics={"loss": 0.5}, background=background)
        manager.wait()
        assert handle.result().attempt == seen["all"][0][1].attempt
        manager.save(7, STATE, on_exists="skip", background=background)
        manager.wait()

    values(job.run(loop))
    assert [rank for rank, *_ in seen["rank0"]] == [0]
    assert sorted(rank for rank, *_ in seen["all"]) == [0, 1]
    for _, record, thread, there in seen["rank0"] + seen["all"]:
        assert there and thread == ("distckpt-finaliser" if background else "caller")
        assert (record.step, record.series, record.seq, record.files, record.metrics) == (7, "main", 1, 2, {"loss": 0.5})
        assert record.bytes == sum(os.path.getsize(p) for p in Path(record.path).glob("state.*"))
        assert record.slowest_rank in (0, 1) and 0 < record.slowest_seconds < 5 and record.blocked_seconds > 0
        assert (record.background_seconds > 0) == background
    committed = events(job.root, "committed")[0]
    assert committed["slowest_rank"] == seen["all"][0][1].slowest_rank and (committed["background"] > 0) == background


def test_the_slowest_rank_is_named(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    records = []

    def loop(manager: distckpt.CheckpointManager) -> None:
        manager.on_commit(records.append, ranks="all")
        with manager.saving(1) as files, files.writer("x.bin") as out:
            out.write(b"x")
            if manager.rank == 1:
                threading.Event().wait(0.3)

    with caplog.at_level(logging.INFO, "distckpt"):
        values(job.run(loop))
    assert [(r.slowest_rank, r.slowest_seconds >= 0.3) for r in records] == [(1, True)] * 2
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("committed")]
    assert len(said) == 1
    numbers = re.search(r"training was blocked for ([\d.]+) s, 0.00 s went in the background, rank 1 was the slowest with "
                        r"([\d.]+) s", said[0])
    assert numbers is not None and float(numbers[1]) >= float(numbers[2]) >= 0.3


@pytest.mark.parametrize("background", [False, True])
def test_what_a_hook_raises_reaches_nobody(job: Job, background: bool, caplog: pytest.LogCaptureFixture) -> None:
    after: list[tuple[int, int]] = []

    def loop(manager: distckpt.CheckpointManager) -> None:
        def spoil(record: distckpt.CommitRecord) -> None:
            record.metrics["loss"] = -1.0  # its own copy
            if manager.rank == 1:
                raise SystemExit("an uploader that gave up")
            raise ZeroDivisionError("on rank 0")

        manager.on_commit(spoil, ranks="all")
        manager.on_commit(lambda record: after.append((manager.rank, record.metrics["loss"])), ranks="all")
        for step in (1, 2):
            manager.poll(step)
            manager.save(step, STATE, metrics={"loss": 9}, background=background)
        manager.wait()
        manager.poll(3)

    values(job.run(loop))
    assert sorted(after) == [(0, 9), (0, 9), (1, 9), (1, 9)]
    told = events(job.root, "hook_failed")
    assert sorted((e["rank"], e["step"]) for e in told) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert all("spoil" in e["hook"] and "spoil" in e["traceback"] for e in told)
    assert any(r.exc_info and "on_commit hook" in r.getMessage() for r in caplog.records)
    assert [c.step for c in distckpt.open(job.root).checkpoints()] == [2, 1]


@pytest.mark.parametrize("background", [False, True])
def test_a_hook_cannot_call_what_the_others_are_not_in(job: Job, background: bool) -> None:
    refused = []

    def loop(manager: distckpt.CheckpointManager) -> None:
        def hook(record: distckpt.CommitRecord) -> None:
            for call in (lambda: manager.save(9, STATE), lambda: manager.save(9, STATE, background=True), manager.wait,
                         manager.close, lambda: manager.restore(STATE)):
                with pytest.raises(ConfigError, match="an on_commit hook must not"):
                    call()
                refused.append(record.step)

        manager.on_commit(hook)
        manager.save(1, STATE, background=background)
        manager.wait()

    values(job.run(loop, timeout=20))
    assert refused == [1] * 5


def test_a_slow_hook_does_not_keep_the_outcome_back(job: Job) -> None:
    go = threading.Event()

    def loop(manager: distckpt.CheckpointManager) -> None:
        manager.on_commit(lambda record: go.wait(10))
        handle = manager.save(1, STATE, background=True)
        await_(handle.done)
        assert handle.result().step == 1
        if manager.rank == 0:
            assert not manager.wait(0.05)
            go.set()

    values(job.run(loop))


def test_registering_is_checked_and_gives_the_hook_back(tmp_path: Path) -> None:
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        @manager.on_commit
        def hook(record: distckpt.CommitRecord) -> None:
            with pytest.raises(dataclasses.FrozenInstanceError):
                record.step = 2  # type: ignore[misc]

        assert callable(hook)
        with pytest.raises(ConfigError, match="ranks must be one of 'rank0', 'all'"):
            manager.on_commit(print, ranks="rank1")
        with pytest.raises(ConfigError, match="a function of one CommitRecord"):
            manager.on_commit(3)  # type: ignore[arg-type]
        manager.save(1, STATE)
    assert events(tmp_path / "root", "hook_failed") == []


def test_a_hook_alone_leaves_no_trace_in_what_other_threads_go_by() -> None:
    """torch notes for all threads that one of them is in a mode, and compiles nothing then."""
    class Theirs(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    inside, go, values = threading.Event(), threading.Event(), list[float]()

    def hook() -> None:
        with alone("the hook runs on rank 0 alone", "let it be"):
            inside.set()
            assert go.wait(20)
            one = torch.ones(1)
            dist.all_reduce(one)  # nobody else is in the group
            values.append(float(one))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        thread = threading.Thread(target=hook)
        with Theirs():  # type: ignore[no-untyped-call]
            thread.start()
            assert inside.wait(20)
        go.set()
        thread.join(20)
    finally:
        dist.destroy_process_group()
    assert values == [1.0]
    assert not _python_dispatch.is_in_torch_dispatch_mode()
