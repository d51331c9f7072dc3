"""A rank that never comes, dies, or stands still: the others are told who, where and in which phase, and in time."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt.coordination import store as store_module
from distckpt.errors import CoordinatorLost, RankTimeout
from distckpt.options import Timeouts
from distckpt.saving.transaction import Transaction
from tests.harness import run, values
from tests.inprocess import await_, events
from tests.ranks.test_failures import await_signal
from tests.ranks.test_failures import signal as tell

STATE = {"w": torch.ones(10)}


def hanging_here() -> None:
    """Where the missing rank is, as its stacks must say."""
    await_signal("go-on")


def _never_arrives(rank: int, world: int, root: str, missing: int) -> dict[str, Any]:
    with distckpt.CheckpointManager(root, timeouts=Timeouts(arrive=2)) as manager:
        manager.save(1, STATE)
        dist.barrier()
        begun = time.monotonic()
        if rank == missing:
            hanging_here()
        with pytest.raises(RankTimeout) as caught:
            manager.save(2, STATE)
        waited = time.monotonic() - begun
        if rank != missing:
            tell(f"timed-out-{rank}")
        if rank == (missing + 1) % world:
            for other in range(world):
                if other != missing:
                    await_signal(f"timed-out-{other}")
            tell("go-on")
        manager.save(3, STATE)
        steps = manager.all_steps()
    error = caught.value
    return {"waited": waited, "missing": error.missing, "text": str(error), "steps": steps, "kind": type(error).__name__}


@pytest.mark.parametrize("missing", [1, 0])
def test_a_rank_that_never_arrives_is_named_at_the_deadline_and_the_next_call_works(missing: int, tmp_path: Path) -> None:
    """At ``Timeouts(arrive=2)``, not at gloo's; the missing rank comes late and is told the same."""
    root = str(tmp_path / "root")
    found = values(run(3, _never_arrives, root, missing))
    for rank, record in enumerate(found):
        assert record["kind"] == "RankTimeout" and record["steps"] == [1, 3]
        if rank != missing:
            assert 1.5 <= record["waited"] < 6.0  # another rank's deadline may have begun a little earlier
        (who, beat), = record["missing"].items()
        assert who == missing and beat["host"] and beat["phase"] == "outside, after save"
        assert f"rank {missing} on {beat['host']}" in record["text"] and "outside, after save at step 1" in record["text"]
    if missing:
        stacks = [e for e in events(root, "stacks") if e["rank"] == missing]
        assert len(stacks) == 1 and "hanging_here" in stacks[0]["stacks"]


def _ends(rank: int, world: int, root: str, who: int, number: int, payload: str) -> dict[str, Any]:
    """Rank ``who`` sends itself ``number`` in the write phase."""
    store = dist.distributed_c10d._get_default_store()
    manager = distckpt.CheckpointManager(root, timeouts=Timeouts(progress=2))
    manager.save(1, STATE)
    store.set(f"pid/{rank}", str(os.getpid()))
    dist.barrier()

    moment = Path(root + ".moment")

    def end() -> None:
        if rank == who:
            moment.with_suffix(".tmp").write_text(str(time.monotonic()))
            os.replace(moment.with_suffix(".tmp"), moment)
            os.kill(os.getpid(), number)
        else:
            await_(moment.exists)

    record: dict[str, Any] = {}
    try:
        if payload == "block":
            with manager.saving(2) as files:
                Path(files.mine("a.bin")).write_bytes(b"x")
                end()
        else:
            original = torch.distributed.checkpoint.FileSystemWriter.write_data

            def write_data(self: Any, *args: Any) -> Any:
                if rank == who:
                    end()
                return original(self, *args)

            torch.distributed.checkpoint.FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
            try:
                manager.save(2, distckpt.DCP(torch.nn.Linear(4, 4)))
            finally:
                torch.distributed.checkpoint.FileSystemWriter.write_data = original  # type: ignore[method-assign]
    except distckpt.DistckptError as error:
        record.update(kind=type(error).__name__, text=str(error), at=time.monotonic(), missing=getattr(error, "missing", None),
                      failures={r: f.type for r, f in (getattr(error, "failures", None) or {}).items()})
    Path(f"{root}.told-{rank}").touch()
    for other in {0, 1, 2} - {who}:
        await_(Path(f"{root}.told-{other}").exists)  # nobody is freed by another's exit
    if number == signal.SIGSTOP:
        if rank == 0:
            os.kill(int(store.get(f"pid/{who}")), signal.SIGCONT)
        manager.save(3, distckpt.DCP(torch.nn.Linear(4, 4)) if payload == "dcp" else STATE)
        record["steps"] = manager.all_steps()
        manager.close()
    record["late"] = record["at"] - float(moment.read_text())
    return record


def test_a_killed_rank_is_lost_at_once_and_the_restart_goes_on(tmp_path: Path) -> None:
    """SIGKILL in the write phase: RankLost on the others in under 2 s; the restart needs no hand work."""
    root = str(tmp_path / "root")
    outcomes = run(3, _ends, root, 1, signal.SIGKILL, "block")
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, f"{outcome.error!r} {outcome.text[-5000:]}"
        record = outcome.value
        assert record["kind"] == "RankLost" and list(record["missing"]) == [1], record
        assert record["late"] < 2.0 and "has ended" in record["text"], record
        assert "write (no word since it began) at step 2" in record["text"], record
    assert values(run(2, _restart, root)) == [1, 1]
    assert sorted(p.name for p in Path(root, ".distckpt/staging").glob("*/*")) == []


def _restart(rank: int, world: int, root: str) -> int | None:
    with distckpt.CheckpointManager(root) as manager:
        return manager.resume().step


def test_a_rank_killed_inside_dcp_is_named_and_not_those_who_waited_for_it(tmp_path: Path) -> None:
    """gloo says "connection closed" on the others at once; the error says which process has ended."""
    outcomes = run(3, _ends, str(tmp_path / "root"), 1, signal.SIGKILL, "dcp")
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, f"{outcome.error!r} {outcome.text[-5000:]}"
        record = outcome.value
        assert record["kind"] == "RankLost" and list(record["missing"]) == [1], record
        assert record["late"] < 3.0 and "the process has ended" in record["text"], record


@pytest.mark.parametrize(("payload", "bound"), [("block", 6.0), ("dcp", 9.0)])
def test_a_stopped_rank_times_out_at_progress_and_comes_back(payload: str, bound: float, tmp_path: Path) -> None:
    """SIGSTOP in the write phase: RankTimeout at ``Timeouts(progress=2)``, on the stopped rank as well once it goes on. Inside
    DCP's collectives the others wait so long as well, and not torch's half hour; and the next save has a group that works."""
    for rank, record in enumerate(values(run(3, _ends, str(tmp_path / "root"), 1, signal.SIGSTOP, payload))):
        assert record["kind"] == "RankTimeout" and list(record["missing"]) == [1], record
        assert record["steps"] == [1, 3] and "write (no word since it began) at step 2" in record["text"]
        if rank != 1:
            assert 1.5 <= record["late"] < bound, record


def _leader_killed(rank: int, world: int, root: str, where: str) -> float | None:
    store = dist.distributed_c10d._get_default_store()
    manager = distckpt.CheckpointManager(root)
    manager.save(1, STATE)
    dist.barrier()
    if rank == 0:
        # the test's own store lives in rank 0 as well: tell the moment while it still answers
        if where == "elsewhere":
            store.set("moment", json.dumps(time.monotonic()))
            store.wait(["there-1", "there-2"])
            os.kill(os.getpid(), signal.SIGKILL)
        with manager.saving(2):
            store.set("moment", json.dumps(time.monotonic()))
            store.wait(["there-1", "there-2"])
            os.kill(os.getpid(), signal.SIGKILL)
    moment = json.loads(store.get("moment")) if where == "elsewhere" else 0.0
    with pytest.raises(CoordinatorLost) as caught:
        if where == "elsewhere":
            store.set(f"there-{rank}", "")
            manager.save(2, STATE)
        else:
            with manager.saving(2) as files:
                Path(files.mine("a.bin")).write_bytes(b"x")
                moment = json.loads(store.get("moment"))
                store.set(f"there-{rank}", "")
    assert "rank 0" in str(caught.value)
    return time.monotonic() - moment


@pytest.mark.parametrize("where", ["write", "elsewhere"])
def test_rank_0_killed_is_the_coordinator_lost_at_once(where: str, tmp_path: Path) -> None:
    outcomes = run(3, _leader_killed, str(tmp_path / "root"), where)
    assert outcomes[0].exitcode == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert outcome.ok and outcome.value < 5.0, outcome.error or outcome.text[-3000:]


def _leader_stopped(rank: int, world: int, root: str) -> float | None:
    """Rank 0 stops in the write phase, and with it the server of the store; rank 1 asks it then, rank 2 waits on it."""
    store_module.SILENCE = 1.0
    stopped, waiting = Path(f"{root}.stopped"), Path(f"{root}.waiting")
    manager = distckpt.CheckpointManager(root, timeouts=Timeouts(progress=2, arrive=2))
    begun = 0.0
    wait = Transaction._await_outcome

    def acked(self: Transaction, *args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        waiting.touch()
        begun = time.monotonic()
        return wait(self, *args, **kwargs)

    Transaction._await_outcome = acked  # type: ignore[method-assign]
    with pytest.raises(CoordinatorLost, match="rank 0"), manager.saving(1) as files:
        Path(files.mine("a.bin")).write_bytes(b"x")
        if rank == 0:
            await_(waiting.exists)
            stopped.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1:
            await_(stopped.exists)
            begun = time.monotonic()
    waited = time.monotonic() - begun
    manager._group.listener.join(5)
    assert not manager._group.listener._thread.is_alive(), "a thread inside the store would abort the process at its end"
    Path(f"{root}.told-{rank}").touch()
    if rank == 1:
        await_(Path(f"{root}.told-2").exists, 30)
        os.kill(int(stopped.read_text()), signal.SIGKILL)
    return waited


def test_a_stopped_rank_0_is_the_coordinator_lost_and_holds_nobody_for_ever(tmp_path: Path) -> None:
    """Its store answers no more, as when its host went dark; TCPStore's client would wait for it without end."""
    outcomes = run(3, _leader_stopped, str(tmp_path / "root"))
    for outcome in outcomes[1:]:
        assert outcome.ok and outcome.value < 15.0, outcome.error or outcome.text[-3000:]
