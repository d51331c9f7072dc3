"""Further series, readers that hold checkpoints from other processes, and who owns a root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import distckpt
from distckpt import owned
from distckpt.durable import REAL
from distckpt.errors import ConfigError, RootInUse, SaveError, StepAlreadyExists
from distckpt.testing.faults import FaultyFiles, call
from tests.harness import run, start, values
from tests.inprocess import Job, await_, events, holds, same_error, staged, write
from tests.ranks.test_bootstraps import bare


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir() and p.name != ".distckpt")


# -- series ----------------------------------------------------------------------------------------------------------


def test_series_have_limits_of_their_own_and_never_touch_each_other(root: Path) -> None:
    """S24, FIELD_CASES B70: full matches keep them apart; something of a like name is nobody's."""
    (root / "step-1-rolling-tmp").mkdir(parents=True)
    (root / "step-1-rolling-tmp" / "x").write_text("not ours")

    def train(manager: distckpt.CheckpointManager) -> Any:
        rolling = manager.series("rolling", keep_last=1)
        for step in range(1, 7):
            rolling.save(step, {"s": step})
            if step % 2 == 0:
                with manager.saving(step) as files, files.writer("a.bin") as out:
                    out.write(b"x" * step)
        with rolling.saving(7) as files, files.writer("a.bin") as out:
            out.write(b"y")
        found = rolling.resume()
        assert manager.resume().step == 6 and found.checkpoint is not None
        return found.step, found.checkpoint.series, [c.step for c in rolling.checkpoints()], manager.all_steps()

    for step, series, rolling, main in values(Job(root, keep_last=2).run(train)):
        assert (step, series, rolling, main) == (7, "rolling", [7], [4, 6])
    assert names(root) == ["step-1-rolling-tmp", "step-4", "step-6", "step-7-rolling"]
    assert (root / "latest").read_text() == "step-6\n", "the pointer is of the main series"


def test_a_series_is_resumed_and_restored_by_its_view(root: Path) -> None:
    def train(manager: distckpt.CheckpointManager) -> Any:
        rolling = manager.series("rolling")
        manager.save(9, {"s": 9})
        rolling.save(3, {"s": 3})
        state = {"s": 0}
        step = rolling.restore(state)
        skipped = rolling.save(3, {"s": 4}, on_exists="skip")
        with pytest.raises(StepAlreadyExists):
            rolling.save(3, {"s": 4})
        for name in ("rolling", "a b", "", "x" * 65, "a-b"):
            with pytest.raises(ConfigError):
                manager.series(name)
        return step, state["s"], skipped.skipped

    assert values(Job(root).run(train)) == [(3, 3, True)] * 2


# -- readers -----------------------------------------------------------------------------------------------------------

READER = """
import sys, distckpt
root = distckpt.open(sys.argv[1])
found = root.latest()
lease = root.lease(found, reason="upload", ttl=float(sys.argv[2]) if sys.argv[2] else None)
assert "torch" not in sys.modules, "a reader needs no torch"
print(found.name, flush=True)
sys.stdin.readline()
if sys.argv[2]:
    open(found.path + "/commit.json").read()
    lease.release()
print("released", flush=True)
sys.stdin.readline()
"""


class Reader:
    """Another process that holds the newest checkpoint."""

    def __init__(self, root: Path, ttl: float | None) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", READER, str(root), "" if ttl is None else str(ttl)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.name = self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "released\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def test_S22_what_another_process_reads_stays_until_it_has_let_go(root: Path) -> None:
    """Rotation passes over it, replace refuses it, and the first save after the release rotates it away."""
    job = Job(root, keep_last=1)
    job.start()
    values(job.each(lambda m: write(m, 1)))
    reader = Reader(root, 600)
    try:
        assert reader.name == "step-1"
        for step in (2, 3):
            values(job.each(lambda m, s=step: write(m, s)))
        assert names(root) == ["step-1", "step-3"]
        for error in same_error(job.each(lambda m: write(m, 1, on_exists="replace")), StepAlreadyExists):
            assert "in use and cannot be replaced" in str(error) and "upload" in str(error)
        reader.go_on()
        values(job.each(lambda m: write(m, 4)))
        assert names(root) == ["step-4"]
    finally:
        reader.end()
    job.finish()


def test_S22_a_killed_readers_lease_runs_out_by_the_rotators_own_clock(root: Path) -> None:
    job = Job(root, keep_last=1)
    job.start()
    values(job.each(lambda m: write(m, 1)))
    reader = Reader(root, 0.5)
    reader.end()
    steps = iter(range(2, 1000))

    def gone() -> bool:
        step = next(steps)
        values(job.each(lambda m: write(m, step)))
        return "step-1" not in names(root)

    begun = time.monotonic()
    await_(gone)
    assert time.monotonic() - begun >= 0.5
    job.finish()
    assert len(names(root)) == 1


def test_a_pin_outlives_its_process_and_unpin_ends_it(root: Path) -> None:
    job = Job(root, keep_last=1)
    job.start()
    values(job.each(lambda m: write(m, 1)))
    reader = Reader(root, None)
    reader.end()
    values(job.each(lambda m: write(m, 2)))
    assert names(root) == ["step-1", "step-2"]
    subprocess.run([sys.executable, "-m", "distckpt", "unpin", f"{root}@1"], check=True, capture_output=True)
    values(job.each(lambda m: write(m, 3)))
    assert names(root) == ["step-3"]
    job.finish()


# -- who owns the root ---------------------------------------------------------------------------------------------------


def _owner(rank: int, world: int, root: str) -> Any:
    """Two jobs of one process each. The first is killed in its second save; the second is refused, and then takes over."""
    bare()
    ready, refused = Path(f"{root}.ready"), Path(f"{root}.refused")
    if rank == 0:
        manager = distckpt.CheckpointManager(root)
        manager.save(1, {"w": 1})
        with manager.saving(2) as files:
            Path(files.mine("half")).write_bytes(b"x" * 1000)
            ready.with_suffix(".tmp").write_text(str(os.getpid()))
            os.replace(ready.with_suffix(".tmp"), ready)
            await_(refused.exists)
            os.kill(os.getpid(), signal.SIGKILL)
    await_(ready.exists)
    with pytest.raises(RootInUse) as caught:
        distckpt.CheckpointManager(root)
    error, pid = caught.value, int(ready.read_text())
    assert (error.pid, error.generation, error.job) == (pid, 1, None) and error.host == os.uname().nodename and error.age >= 0
    assert f"pid {pid} on {error.host}" in str(error) and "wait for it or stop it" in str(error)
    refused.touch()
    manager = await_(lambda: _try(root))
    with manager:
        assert manager.resume().step == 1
        manager.save(2, {"w": 2})
        return manager.checkpoints()[0].marker.head.generation, manager.all_steps()


def _try(root: str) -> Any:
    try:
        return distckpt.CheckpointManager(root)
    except RootInUse:
        return None


def test_S6_a_second_job_is_refused_by_name_and_takes_over_from_a_dead_one(tmp_path: Path) -> None:
    """With a higher generation, without hand work; the space of the dead attempt comes back."""
    root = str(tmp_path / "root")
    outcomes = start(2, _owner, root, init=False).join(60)
    assert outcomes[0].exitcode == -signal.SIGKILL
    assert values(outcomes[1:]) == [(2, [1, 2])]
    assert staged(root) == [] and events(root, "claimed")[-1]["generation"] == 2


def test_S6_root_in_use_is_raised_on_every_rank(root: Path) -> None:
    first = Job(root, 2)
    first.start()
    values(first.each(lambda m: write(m, 1)))
    second = Job(root, 3, hosts=["b", "b", "b"])
    second.living |= first.living
    registry = dict(owned._open)
    owned._open.clear()  # of what would be another process
    for error in same_error(second.threads.run(second.open), RootInUse):
        assert (error.host, error.pid, error.generation) == ("host-a", os.getpid(), 1)
    owned._open.update(registry)
    first.finish()
    values(Job(root, 3).run(lambda m: write(m, 2)))


def test_S5_a_zombie_of_an_older_generation_can_publish_nothing_and_every_rank_is_told(root: Path) -> None:
    """The first job was taken for dead and goes on: its staging directory is gone, whatever it tries."""
    zombie = Job(root, 2)
    zombie.start()
    values(zombie.each(lambda m: write(m, 1)))
    taker = Job(root, 2, hosts=["b", "b"])
    owned._open.clear()
    taker.start()
    values(taker.each(lambda m: write(m, 2)))
    for error in same_error(zombie.each(lambda m: write(m, 3)), RootInUse):
        assert error.generation == 2 and error.host == "b"
    assert names(root) == ["step-1", "step-2"]
    taker.finish()


def test_S5_a_takeover_right_before_the_publishing_rename_leaves_it_to_the_new_owner(root: Path) -> None:
    """The check is a courtesy and comes too early here; the file system itself stops the zombie, whose ranks are told
    *unknown*; the new owner publishes what was committed."""
    disk = FaultyFiles(REAL)
    zombie, taker = Job(root, 2, files={0: disk}), Job(root, 2, hosts=["b", "b"])
    zombie.start()
    values(zombie.each(lambda m: write(m, 1)))

    def take_over(operation: Any) -> None:
        owned._open.clear()
        taker.start()

    disk.faults.append(call(take_over, op="rename", path=lambda path: path == str(root / "step-2")))
    for error in same_error(zombie.each(lambda m: write(m, 2)), SaveError):
        assert error.outcome == "unknown"
    assert events(root, "claimed")[-1]["published"] == ["step-2"] and holds(root, 2, 2)
    same_error(zombie.each(lambda m: write(m, 3)), RootInUse)
    assert [r.step for r in values(taker.each(lambda m: m.resume()))] == [2, 2]
    taker.finish()
    assert names(root) == ["step-1", "step-2"]


def test_two_runs_share_no_root(root: Path) -> None:
    values(Job(root, 2, run_id="alpha").run(lambda m: write(m, 1)))
    for error in same_error(Job(root, 2, run_id="beta").run(lambda m: m.resume()), ConfigError):
        assert "belongs to run 'alpha', not 'beta'" in str(error)
    assert [r.step for r in values(Job(root, 2).run(lambda m: m.resume()))] == [1, 1]


def _jobs(rank: int, world: int, root: str) -> str:
    """A gloo job of two ranks while another process owns the root."""
    with pytest.raises(RootInUse) as caught:
        distckpt.CheckpointManager(root)
    return str(caught.value)


def test_real_ranks_are_all_told_who_owns_the_root(root: Path) -> None:
    with distckpt.CheckpointManager(str(root)):
        first, second = values(run(2, _jobs, str(root)))
    assert first == second and f"pid {os.getpid()}" in first
