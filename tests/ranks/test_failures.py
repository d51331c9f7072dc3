"""One rank fails in a save of 2, 3 and 4 real ranks: every rank raises the same SaveError in time, and nothing is lost."""

from __future__ import annotations

import errno
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt.durable import PIECE, REAL
from distckpt.errors import ConfigError, SaveError, StepAlreadyExists
from distckpt.options import Seams, Timeouts
from distckpt.saving.transaction import Transaction
from distckpt.testing.faults import FaultyFiles, fail
from tests.harness import run, values
from tests.inprocess import staged, tree

BOUND = 2.0
"""Seconds in which every rank knows, counted from the failure or from the end of its own write where that is later."""


def signal(name: str) -> None:
    dist.distributed_c10d._get_default_store().set(f"test/{name}", "1")


def await_signal(name: str) -> None:
    dist.distributed_c10d._get_default_store().wait([f"test/{name}"])


class Moments:
    """When this rank failed, and when it had written what it wanted to."""

    def __init__(self) -> None:
        self.failed: float | None = None
        self.wrote: float | None = None

    def fail(self, error: Exception) -> None:
        self.failed = time.monotonic()
        raise error


class Scenario:
    """Runs one failing save on this rank, then looks around, then saves again."""

    def __init__(self, manager: distckpt.CheckpointManager, files: FaultyFiles, bad: int) -> None:
        self.manager, self.files, self.bad = manager, files, bad
        self.rank, self.moments = manager.rank, Moments()

    @property
    def is_bad(self) -> bool:
        return self.rank == self.bad

    # -- a ``saving`` block

    def before(self) -> None:
        with self.manager.saving(2) as files:
            if self.is_bad:
                self.moments.fail(ValueError("before"))
            self.write(files, "a.bin", "b.bin")

    def middle(self) -> None:
        with self.manager.saving(2) as files:
            self.write(files, "a.bin")
            if self.is_bad:
                self.moments.fail(ValueError("middle"))
            self.write(files, "b.bin")

    def after(self) -> None:
        with self.manager.saving(2) as files:
            self.write(files, "a.bin", "b.bin")
            if self.is_bad:
                self.moments.fail(ValueError("after"))

    def write(self, files: Any, *names: str) -> None:
        for name in names:
            Path(files.mine(name)).write_bytes(b"x" * 1000)
        self.moments.wrote = time.monotonic()

    # -- Shards

    def state_dict_raises(self) -> None:
        moments, is_bad = self.moments, self.is_bad

        class State:
            def state_dict(self) -> Any:
                if is_bad:
                    moments.fail(RuntimeError("state_dict"))
                return {"w": torch.ones(10)}

            def load_state_dict(self, state: Any) -> None:
                raise AssertionError

        self.manager.save(2, State())

    def disk_error(self) -> None:
        """The third piece of a large file cannot be written; the others are between pieces of theirs."""
        with self.fault("write", errno.EIO, at=3):
            self.manager.save(2, {"w": torch.ones(3 << 20)})

    def fsync_error(self) -> None:
        with self.fault("fsync", errno.EIO):
            self.manager.save(2, {"w": torch.ones(100)})

    def disk_full(self) -> None:
        with self.fault("write", errno.ENOSPC, at=2):
            self.manager.save(2, {"w": torch.ones(3 << 20)})

    @contextmanager
    def fault(self, op: str, number: int, at: int = 1) -> Any:
        fault = fail(number, at, op=op, path="/staging/")
        if self.is_bad:
            self.files.faults.append(fault)
        try:
            yield
        finally:
            self.files.faults.clear()
            assert not self.is_bad or fault.fired

    # -- DCP

    def planner(self) -> None:
        self.dcp("create_local_plan", "torch.distributed.checkpoint.default_planner.DefaultSavePlanner")

    def dcp_writer(self) -> None:
        self.dcp("write_data", "torch.distributed.checkpoint.FileSystemWriter")

    def dcp_stateful(self) -> None:
        """A state that fails before DCP's first collective: the others must not be left waiting in it."""
        moments, is_bad = self.moments, self.is_bad

        class State:
            def state_dict(self) -> Any:
                if is_bad:
                    moments.fail(ValueError("stateful"))
                return {"n": torch.ones(2)}

            def load_state_dict(self, state: Any) -> None:
                raise AssertionError

        self.manager.save(2, distckpt.DCP(torch.nn.Linear(4, 4), state={"extra": State()}))

    def dcp_staging_unseen(self) -> None:
        """One rank cannot read the staging directory, and so cannot enter DCP's collectives."""
        self.files.faults += [fail(errno.EACCES, 1, op="scan", path="/staging/")] if self.is_bad else []
        try:
            self.manager.save(2, distckpt.DCP(torch.nn.Linear(4, 4)))
        finally:
            self.files.faults.clear()

    def dcp(self, method: str, where: str) -> None:
        module, _, name = where.rpartition(".")
        owner = getattr(__import__(module, fromlist=[name]), name)
        original = getattr(owner, method)

        def broken(*args: Any, **kwargs: Any) -> Any:
            return self.moments.fail(ValueError(method))

        if self.is_bad:
            setattr(owner, method, broken)
        try:
            self.manager.save(2, {"model": distckpt.DCP(torch.nn.Linear(4, 4)), "own": distckpt.Shards({"r": torch.ones(3)})})
        finally:
            setattr(owner, method, original)

    def after_dcp(self) -> None:
        """The per-rank part fails after the model went through DCP."""
        with self.fault("write", errno.EIO):
            self.manager.save(2, {"model": distckpt.DCP(torch.nn.Linear(4, 4)), "own": distckpt.Shards({"r": torch.ones(3)})})


EXPECTED = {
    "before": "ValueError", "middle": "ValueError", "after": "ValueError", "state_dict_raises": "RuntimeError",
    "disk_error": "OSError", "fsync_error": "OSError", "disk_full": "OSError", "planner": "ValueError",
    "dcp_writer": "ValueError", "dcp_stateful": "ValueError", "dcp_staging_unseen": "PermissionError", "after_dcp": "OSError",
}


def _all_scenarios(rank: int, world: int, root: str) -> list[dict[str, Any]]:
    files = FaultyFiles(REAL)
    found = []
    with distckpt.CheckpointManager(root, seams=Seams(files=files), keep_last=3) as manager:
        manager.save(1, {"w": torch.full((100,), float(rank))})
        manager.wait()  # rank 0 moves ``latest`` after all were told
        dist.barrier()
        before = tree(root)
        for name in EXPECTED:
            for bad in {0, world - 1}:
                scenario = Scenario(manager, files, bad)
                record: dict[str, Any] = {"name": name, "bad": bad}
                try:
                    getattr(scenario, name)()
                except SaveError as error:
                    record.update(raised=time.monotonic(), kind=type(error).__name__, outcome=error.outcome, step=error.step,
                                  failures={r: (f.type, f.host, f.pid, f.phase) for r, f in error.failures.items()},
                                  message=str(error), cause=type(error.__cause__).__name__)
                record.update(failed=scenario.moments.failed, wrote=scenario.moments.wrote, pid=os.getpid())
                dist.barrier()
                record.update(staged=staged(root), same=tree(root) == before)
                dist.barrier()
                found.append(record)
        manager.save(2, {"w": torch.zeros(10)})
        steps = manager.all_steps()
    found.append({"name": "next", "steps": steps})
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_one_rank_fails_and_every_rank_raises_it_in_time(world: int, tmp_path: Path) -> None:
    """P4, before, in the middle of and after the files, in each payload: type, message and host of the rank that failed, on
    every rank, in time; staging is empty then, the checkpoint before it has not changed, the next save works."""
    ranks = values(run(world, _all_scenarios, str(tmp_path / "root"), timeout=100))
    for records in zip(*ranks, strict=True):
        name = records[0]["name"]
        if name == "next":
            assert all(r["steps"] == [1, 2] for r in records)
            continue
        bad = records[0]["bad"]
        where = f"{name}, rank {bad} of {world}"
        raised = [r for r in records if "raised" in r]
        assert len(raised) == world, f"{where}: {records}"
        for rank, record in enumerate(records):
            assert list(record["failures"]) == [bad], f"{where}: {record}"
            kind, host, pid, _ = record["failures"][bad]
            assert (kind, pid) == (EXPECTED[name], records[bad]["pid"]) and host, f"{where}: {record}"
            assert record["outcome"] == "aborted" and record["step"] == 2 and f"rank {bad}" in record["message"], where
            assert record["kind"] == ("DiskFull" if name == "disk_full" else "SaveError"), where
            assert (record["cause"] == EXPECTED[name]) == (rank == bad), f"{where}: {record}"
            assert record["staged"] == [] and record["same"], f"{where}: {record}"
            failed = records[bad]["failed"]
            if failed is not None:
                late = record["raised"] - max(failed, record["wrote"] or 0)
                assert late < BOUND, f"{where}: rank {rank} raised {late:.2f} s after"


def _two_at_once(rank: int, world: int, root: str) -> dict[str, Any]:
    with distckpt.CheckpointManager(root) as manager:
        with pytest.raises(SaveError) as caught, manager.saving(1) as files:
            Path(files.mine("a.bin")).write_bytes(b"x")
            if rank >= world - 2:
                signal(f"in-{rank}")
                await_signal(f"in-{2 * world - 3 - rank}")
                raise ValueError(f"from {rank}")
        manager.save(1, {"w": torch.ones(1)})
    return {r: (f.type, f.message) for r, f in caught.value.failures.items()}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_two_ranks_fail_at_once_and_every_rank_gets_both_causes(world: int, tmp_path: Path) -> None:
    expected = {rank: ("ValueError", f"from {rank}") for rank in (world - 2, world - 1)}
    assert values(run(world, _two_at_once, str(tmp_path / "root"))) == [expected] * world


def _rank_0_writes_on(rank: int, world: int, root: str) -> dict[str, float]:
    """Rank 1 fails when rank 2 has acked; rank 0 writes on until both have raised."""
    wait = Transaction._await_outcome

    def acked(self: Transaction, *args: Any, **kwargs: Any) -> Any:
        if rank == 2:
            signal("acked")
        return wait(self, *args, **kwargs)

    Transaction._await_outcome = acked  # type: ignore[method-assign]
    moments: dict[str, float] = {}
    with distckpt.CheckpointManager(root) as manager:
        with pytest.raises(SaveError) as caught, manager.saving(1) as files:
            Path(files.mine("a.bin")).write_bytes(b"x")
            if rank == 1:
                await_signal("acked")
                moments["failed"] = time.monotonic()
                raise ValueError("while rank 0 writes")
            if rank == 0:
                await_signal("raised-1")
                await_signal("raised-2")
                moments["wrote"] = time.monotonic()
        moments["raised"] = time.monotonic()
        signal(f"raised-{rank}")
        assert {r: f.type for r, f in caught.value.failures.items()} == {1: "ValueError"}
        manager.save(1, {"w": torch.ones(1)})
    return moments


def test_S4_ranks_learn_of_a_failure_while_rank_0_still_writes_and_rank_0_when_it_has_written(tmp_path: Path) -> None:
    zero, one, two = values(run(3, _rank_0_writes_on, str(tmp_path / "root")))
    assert one["raised"] - one["failed"] < BOUND, "the rank that failed"
    assert two["raised"] - one["failed"] < BOUND, "the rank that had acked"
    assert zero["raised"] - zero["wrote"] < BOUND, "rank 0"
    assert zero["wrote"] > max(one["raised"], two["raised"])


def _stops_writing(rank: int, world: int, root: str) -> int:
    """Rank 1 fails while rank 0 is between two pieces of a file: how many bytes rank 0 still wrote."""
    state = {"w": torch.zeros(16 << 20)}
    written = late = 0

    class Slow(FaultyFiles):
        def _do(self, op: str, path: str, *args: Any, **more: Any) -> Any:
            nonlocal written, late
            if op == "write" and rank == 0 and "/staging/" in path and "state" in path:
                written += 1
                if written == 4:
                    signal("under-way")
                    await_signal("failed")
                late += args[2] if written > 4 else 0
            return super()._do(op, path, *args, **more)

    class Bad:
        def state_dict(self) -> Any:
            return state

        def load_state_dict(self, state: Any) -> None: ...

    finish = Transaction.finish

    def failed(self: Transaction, files: Any, error: Any) -> Any:
        claim = self._client.claim

        def claimed(key: str, value: Any) -> Any:
            standing = claim(key, value)
            if "aborted" in value:
                signal("failed")
            return standing

        self._client.claim = claimed  # type: ignore[method-assign]
        try:
            return finish(self, files, error)
        finally:
            self._client.claim = claim  # type: ignore[method-assign]

    Transaction.finish = failed  # type: ignore[method-assign]
    files = Slow(REAL, *([fail(errno.EIO, 1, op="write", path="state")] if rank == 1 else []))
    with distckpt.CheckpointManager(root, seams=Seams(files=files)) as manager:
        if rank == 1:
            original = files.open

            def held(path: str) -> Any:
                if "state" in path:
                    await_signal("under-way")
                return original(path)

            files.open = held  # type: ignore[method-assign]
        with pytest.raises(SaveError):
            manager.save(1, Bad())
    return late


def test_shards_stop_between_pieces_when_another_rank_has_failed(tmp_path: Path) -> None:
    """Rank 0 hears of the failure at its fourth piece of 64 MB; it asks after every 8 MB, and writes no more then."""
    assert 0 < values(run(2, _stops_writing, str(tmp_path / "root")))[0] <= (8 << 20) + PIECE


STATE = {"w": torch.ones(1)}
MISTAKES: list[tuple[Any, Any, Any]] = [
    (True, STATE, {}), (1, None, {}), (1, {"f": print}, {}), (1, STATE, {"on_exists": "maybe"}),
    (1, STATE, {"metrics": {"loss": "low"}}), (1, STATE, {"meta": {"x": object()}})]
TEXTS = ["step must be", "cannot save a NoneType", "refuses at resume", "on_exists must be", "metrics must", "meta must"]


def _bad_arguments(rank: int, world: int, root: str) -> list[str]:
    """A mistake of one rank alone, in each argument: every rank is told at once, and nothing is written."""
    found = []
    state = STATE
    with distckpt.CheckpointManager(root, timeouts=Timeouts(arrive=20)) as manager:
        for bad in range(world):
            for step, payload, options in MISTAKES:
                with pytest.raises(ConfigError) as caught:
                    if rank == bad:
                        manager.save(step, payload, **options)
                    else:
                        manager.save(1, state)
                found.append(str(caught.value))
        assert staged(root) == [] and manager.all_steps() == []
        manager.save(1, state)
        with pytest.raises(StepAlreadyExists):
            manager.save(1, state)
    return found


def test_a_mistake_of_one_rank_is_every_ranks_config_error_at_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    first, second = values(run(2, _bad_arguments, str(tmp_path / "root")))
    assert time.monotonic() - begun < 15
    assert first == second and len(first) == 12
    assert "rank 0 cannot take part: step must be an int" in first[0] and "rank 1 cannot take part: step must be" in first[6]
    for text, part in zip(first, TEXTS * 2, strict=True):
        assert part in text
