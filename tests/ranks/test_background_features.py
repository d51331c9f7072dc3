"""Background saves on real ranks: hooks, an operator's request, a copy beside a step, a writer process that dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt.errors import DistckptError, SaveError
from tests.harness import run, start, values
from tests.inprocess import events


def _hooked(rank: int, world: int, root: str) -> Any:
    records: list[distckpt.CommitRecord] = []
    everywhere: list[int] = []

    def failing(record: distckpt.CommitRecord) -> None:
        everywhere.append(record.step)
        if rank == 1:
            raise OSError(101, "the network is unreachable")

    with distckpt.CheckpointManager(root, save_every=2) as manager:
        manager.on_commit(records.append)
        manager.on_commit(failing, ranks="all")
        for step in range(1, 7):
            if manager.poll(step).save:
                manager.save(step, {"w": torch.ones(1000 * (rank + 1))}, metrics={"loss": 1 / step}, background=True)
    return records, everywhere


def test_hooks_run_where_they_were_declared(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    found = values(run(3, _hooked, root))
    assert [[r.step for r in records] for records, _ in found] == [[2, 4, 6], [], []]
    assert [everywhere for _, everywhere in found] == [[2, 4, 6]] * 3
    for record in found[0][0]:
        assert record.files == 3 and record.metrics == {"loss": 1 / record.step} and record.background_seconds > 0
        assert record.bytes == sum(p.stat().st_size for p in Path(record.path).glob("state.*"))
    assert [(e["rank"], e["step"]) for e in events(root, "hook_failed")] == [(1, 2), (1, 4), (1, 6)]


def _waits_for_request(rank: int, world: int, root: str) -> Any:
    with distckpt.CheckpointManager(root) as manager:
        Path(root, f"ready-{rank}").touch()
        for step in range(1, 10_000):
            todo = manager.poll(step)
            if todo.save:
                manager.save(step, {"w": torch.ones(10)}, background=True)
                return step, tuple(todo)
            time.sleep(0.003 * (rank + 1))
    return None


def test_an_operators_request_reaches_all_ranks_at_one_step(tmp_path: Path) -> None:
    root = tmp_path / "root"
    running = start(2, _waits_for_request, str(root))
    until = time.monotonic() + 30
    while len(list(root.glob("ready-*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    said = subprocess.run([sys.executable, "-m", "distckpt", "request-save", str(root), "--reason", "maintenance at 5"],
                          capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0 and f"lives (pid {running.pid(0)} on" in said.stdout, said
    found = values(running.join(60))
    assert found[0] == found[1] and found[0][1] == (True, False, "requested by an operator: maintenance at 5")
    assert [c.step for c in distckpt.open(root).checkpoints()] == [found[0][0]]


def _overlap(rank: int, world: int, root: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from distckpt.saving.staging import Device, tensors_of

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()

    class Late(Device):
        """Copies that end long after the step would have."""

        def holds(self, tensor: torch.Tensor) -> bool:
            return True

        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            time.sleep(0.02)
            target.copy_(source)

    state = distckpt.TrainState(model=model, optimizer=optimizer)
    flat = lambda: torch.cat([t.detach().reshape(-1).double().clone() for t in tensors_of(state.tree())])  # noqa: E731
    train()
    with distckpt.CheckpointManager(root, check_staging=True) as manager:
        manager._behind.device = Late()
        before = []
        for step in (1, 2, 3):
            manager.poll(step)
            before.append(flat())
            manager.save(step, state, background=True, staging="overlap")
            unfinished = manager._behind._copying.unfinished
            train()
        manager.wait()
        after = []
        for step in (1, 2, 3):
            manager.restore(state, step=step)
            after.append(flat())
    return unfinished, [torch.equal(a, b) for a, b in zip(before, after, strict=True)], torch.equal(before[0], before[1])


def test_a_copy_beside_a_sharded_step_is_of_one_moment(tmp_path: Path) -> None:
    assert values(run(2, _overlap, str(tmp_path / "root"))) == [(True, [True] * 3, False)] * 2


def _writer_dies(rank: int, world: int, root: str, bad: int) -> Any:
    with distckpt.CheckpointManager(root, writer="process") as manager:
        state = {"w": torch.full((100_000,), float(rank))}
        manager.save(1, state, background=True).result(60)
        seen = None
        for step in range(2, 8000):
            try:
                manager.poll(step)
            except SaveError as error:
                seen = (step, {r: f.type for r, f in error.failures.items()}, str(error))
                break
            if step == 3:
                pid = manager._behind.writer.pid
                if rank == bad:
                    os.kill(pid, signal.SIGSTOP)
                manager.save(step, state, background=True)
                if rank == bad:  # later: one that is dead before the write begins is replaced, and nothing fails
                    threading.Timer(1.5, os.kill, (pid, signal.SIGKILL)).start()
            time.sleep(0.002 * (rank + 1))
        manager.save(9000, state, background=True)
        manager.wait()
        return seen, manager.all_steps()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_dead_writer_process_is_raised_on_every_rank_at_one_step(bad: int, tmp_path: Path) -> None:
    found = values(run(2, _writer_dies, str(tmp_path / "root"), bad, timeout=90))
    assert found[0][0][:2] == found[1][0][:2] and found[0][0][1] == {bad: "WriterDied"}
    assert "was ended by SIGKILL" in found[1 - bad][0][2]
    assert [steps for _, steps in found] == [[1, 9000]] * 2


def _first_background_save(rank: int, world: int, root: str) -> tuple[str, bool]:
    if rank == 1:  # by the groups that a process is in torch names those that are made with local synchronisation
        dist.new_group(ranks=[1], backend="gloo", use_local_synchronization=True)
    with distckpt.CheckpointManager(root) as manager:
        made: list[threading.Thread] = []
        new_gloo = manager._group._bootstrap.new_gloo
        assert new_gloo is not None

        def noted(seconds: float) -> Any:
            made.append(threading.current_thread())
            return new_gloo(seconds)

        manager._group._bootstrap.new_gloo = noted
        for step in (1, 2):
            manager.save(step, distckpt.DCP(torch.nn.Linear(2, 2)), background=True)
            dist.new_group(ranks=[0, 1], backend="gloo")  # the program's own, beside the save in flight
            manager.wait()
        manager.save(3, distckpt.DCP(state={"bad": (lambda: 0) if rank else 0}), background=True)
        with pytest.raises(SaveError):  # so the group may miss a peer, and is made anew
            manager.save(4, distckpt.DCP(torch.nn.Linear(2, 2)), background=True)
        manager.save(4, distckpt.DCP(torch.nn.Linear(2, 2)), background=True)
        manager.wait()
        assert manager.all_steps() == [1, 2, 4]
        return manager._group.collectives().group_name, made == [threading.main_thread()] * 2


def test_the_group_for_dcp_is_made_on_the_training_thread_by_a_name_that_all_ranks_agree_on(tmp_path: Path) -> None:
    """Two threads that make groups at once, in two orders on two ranks, can wait for each other on torch's store for ever."""
    found = values(run(2, _first_background_save, str(tmp_path / "root")))
    assert [alone for _, alone in found] == [True, True] and len({name for name, _ in found}) == 1


def _first_states(rank: int, world: int, root: str, kinds: tuple[str, str]) -> tuple[str, list[int]]:
    state: Any = {"dcp": distckpt.DCP(torch.nn.Linear(2, 2)), "shards": {"x": torch.ones(2)}, "none": object()}[kinds[rank]]
    manager = distckpt.CheckpointManager(root, timeouts=distckpt.Timeouts(arrive=20.0, progress=20.0))
    seen = ""
    for step in (1, 2):
        try:
            manager.save(step, state, background=True)
            manager.wait()
        except DistckptError as error:
            seen = seen or str(error)
            state = {"x": torch.ones(2)}
    with contextlib.suppress(DistckptError):
        manager.close()
    return seen, manager.all_steps()


@pytest.mark.parametrize("kinds, told", [(("dcp", "none"), "cannot save a object"), (("none", "dcp"), "cannot save a object"),
                                         (("dcp", "shards"), "different kinds|options"), (("shards", "dcp"), "rank")])
def test_a_first_save_whose_states_do_not_fit_is_told_on_every_rank(kinds: tuple[str, str], told: str, tmp_path: Path) -> None:
    found = values(run(2, _first_states, str(tmp_path / "root"), kinds, timeout=90))
    for seen, _ in found:
        assert re.search(told, seen), seen
