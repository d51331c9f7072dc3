"""The front doors with real processes: torch's group and a part of it, mpiexec, SLURM's environment, a forked child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt.errors import ConfigError
from tests.harness import free_port, run, values
from tests.support import openmpi

BIN = Path(sys.executable).parent
LAUNCHERS = ("SLURM", "PMI", "MPI", "OMPI", "MASTER", "WORLD_SIZE", "RANK", "LOCAL")


def bare() -> None:
    """This process as no launcher started it."""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]


def life(root: str, first: int | None, **options: Any) -> dict[str, Any]:
    """A job on ranks without a torch process group: resume, save, fail on one rank, load again."""
    found: dict[str, Any] = {}
    with distckpt.CheckpointManager(root, **options) as manager:
        rank, world = manager.rank, manager.world
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = distckpt.TrainState(model=model, optimizer=optimizer, rng=True, progress={"n": rank})
        assert manager.restore(state) == first
        torch.nn.init.constant_(model.weight, float(rank))
        manager.save((first or 0) + 1, state)
        with pytest.raises(ConfigError) as refused:
            manager.save(99, distckpt.DCP(model))
        with pytest.raises(distckpt.SaveError) as caught, manager.saving(50) as files:
            Path(files.mine("x")).touch()
            if rank == world - 1:
                raise ValueError("boom")
        again, progress = torch.nn.Linear(2, 2), {"n": -1}
        manager.restore(distckpt.TrainState(model=again, optimizer=torch.optim.SGD(again.parameters(), lr=0.1), rng=True,
                                            progress=progress))
        found.update(rank=rank, world=world, kind=manager._group.kind, steps=manager.all_steps(), dcp=str(refused.value),
                     failed={str(r): f.type for r, f in caught.value.failures.items()},
                     mine=[float(again.weight[0, 0].detach()), progress["n"]])
    return found


def check(found: list[dict[str, Any]], world: int, kind: str, steps: list[int]) -> None:
    assert sorted(r["rank"] for r in found) == list(range(world)), found
    for result in found:
        rank = result["rank"]
        assert (result["world"], result["kind"], result["steps"]) == (world, kind, steps)
        assert result["failed"] == {str(world - 1): "ValueError"} and result["mine"] == [rank, rank], "each rank its own"
        assert f"DCP needs a torch process group, and these {world} ranks were found by {kind}" in result["dcp"]


MPI_PROGRAM = """
import json, sys
from mpi4py import MPI
from tests.ranks.test_bootstraps import life
rank = MPI.COMM_WORLD.Get_rank()
found = [life(sys.argv[1], None), life(sys.argv[1], 1, group=MPI.COMM_WORLD)]
half = MPI.COMM_WORLD.Split(rank % 2, rank)
found.append(life(sys.argv[1] + f"-{rank % 2}", None, group=half))
with open(f"{sys.argv[1]}.{rank}.json", "w") as out:
    json.dump(found, out)
"""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_four_ranks_of_mpiexec_without_any_torch_process_group(mpi: str, tmp_path: Path) -> None:
    """The world is found, or passed, or a part of it is; DCP says what it lacks, and models go through shards."""
    root = tmp_path / "root"
    env = {**{k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}, "OMP_NUM_THREADS": "1",
           "PYTHONPATH": str(Path(__file__).parents[2])}
    mpiexec = [str(BIN / "mpiexec")]
    if mpi == "openmpi":
        env.update(openmpi())
        mpiexec = [f"{os.environ['DISTCKPT_OPENMPI']}/bin/mpiexec", "--oversubscribe"]
    command = [*mpiexec, "-n", "4", sys.executable, "-c", MPI_PROGRAM, str(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-5000:]
    found = [json.loads((tmp_path / f"root.{rank}.json").read_text()) for rank in range(4)]
    check([f[0] for f in found], 4, "mpi", [1])
    check([f[1] for f in found], 4, "mpi", [1, 2])
    for part in (0, 1):
        check([f[2] for f in found[part::2]], 2, "mpi", [1])


def _slurm(rank: int, world: int, root: str, port: int) -> list[dict[str, Any]]:
    """As srun starts it: two managers, and a second step of the job."""
    bare()
    os.environ.update(SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS=str(world), SLURM_JOB_ID="4711", SLURM_STEP_ID="0",
                      SLURM_STEP_NODELIST="localhost", DISTCKPT_STORE_PORT=str(port))
    return [life(root, None), life(root, 1)]


@pytest.mark.parametrize("world", [2, 3])
def test_slurms_environment_without_a_process_group(world: int, tmp_path: Path) -> None:
    found = values(run(world, _slurm, str(tmp_path / "root"), free_port(), init=False))
    check([f[0] for f in found], world, "slurm", [1])
    check([f[1] for f in found], world, "slurm", [1, 2])


def _contradictions(rank: int, world: int, root: str) -> list[str]:
    """WORLD_SIZE of torchrun without a process group, alone and beside srun's numbers; mpiexec without mpi4py."""
    texts = []
    for env in ({"WORLD_SIZE": "2", "RANK": "0"}, {"WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
                {"PMI_SIZE": "2", "PMI_RANK": "0"}):
        bare()
        os.environ.update(env)
        with pytest.raises(ConfigError) as caught:
            distckpt.CheckpointManager(root)
        texts.append(str(caught.value))
    return texts


def test_a_launchers_promise_without_its_ranks_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (torchrun, both, mpi), = values(run(1, _contradictions, str(root), init=False))
    assert "WORLD_SIZE=2" in torchrun and "init_process_group (or deepspeed.initialize) before CheckpointManager" in torchrun
    assert "WORLD_SIZE=4" in both and "PMI_SIZE=2" in mpi and "import mpi4py first" in mpi
    assert not root.exists()


def _found(rank: int, world: int, folder: str) -> Any:
    """torch's own group, a part of it, several managers, and a launcher that promised something else."""
    record: dict[str, Any] = {}
    with distckpt.CheckpointManager(f"{folder}/all") as manager:
        record["all"] = manager._group.kind, manager.rank, manager.world
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        with distckpt.CheckpointManager(f"{folder}/pair", group=pair) as manager:
            record["pair"] = manager.rank, manager.world
            manager.save(1, {"model": distckpt.DCP(torch.nn.Linear(2, 2)), "own": distckpt.Shards({"r": torch.tensor(rank)})})
            with pytest.raises(distckpt.SaveError) as caught, manager.saving(2) as files:
                Path(files.mine("x")).write_text("x")
                if rank == 2:
                    raise ValueError("boom")
            record["failed"] = list(caught.value.failures)
            own = {"r": torch.tensor(0)}
            manager.restore({"model": distckpt.DCP(torch.nn.Linear(2, 2)), "own": distckpt.Shards(own)})
            record["own"] = int(own["r"])
    else:
        with pytest.raises(ConfigError) as refused:
            distckpt.CheckpointManager(f"{folder}/pair", group=pair)
        record["outside"] = str(refused.value)
    dist.barrier()
    with distckpt.CheckpointManager(f"{folder}/one") as one, distckpt.CheckpointManager(f"{folder}/two") as two:
        one.save(1, {"w": torch.ones(1)})
        two.save(2, {"w": torch.ones(1)})
        one.save(3, {"w": torch.ones(1)})
        record["two"] = one.all_steps(), two.all_steps()
    os.environ["WORLD_SIZE"] = "7"
    with pytest.raises(ConfigError) as wrong:
        distckpt.CheckpointManager(f"{folder}/none")
    record["promised"] = str(wrong.value)
    with distckpt.CheckpointManager(f"{folder}/said", group=dist.group.WORLD):
        record["said"] = True
    return record


def test_torchs_group_a_part_of_it_and_several_managers_side_by_side(tmp_path: Path) -> None:
    for rank, record in enumerate(values(run(3, _found, str(tmp_path)))):
        assert record["all"] == ("torch", rank, 3) and record["two"] == ([1, 3], [2]) and record["said"]
        assert "has 3 rank(s), but the environment says WORLD_SIZE=7" in record["promised"]
        if rank:
            assert record["pair"] == (rank - 1, 2) and record["failed"] == [1] and record["own"] == rank
        else:
            assert "not a member of the group" in record["outside"]


def _in_child(act: Any) -> str:
    """What ``act`` gives in a forked child, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr(act())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as out:
        text = out.read()
    os.waitpid(pid, 0)
    return text


def _forks(rank: int, world: int, root: str) -> dict[str, Any]:
    """A forked child (a DataLoader worker) never acts for its parent, not even when it unwinds the parent's block."""
    state = {"w": torch.ones(2)}
    record: dict[str, Any] = {}
    with distckpt.CheckpointManager(root) as manager:
        manager.save(1, state)
        record["save"] = _in_child(lambda: manager.save(2, state))
        record["resume"] = _in_child(lambda: manager.resume())
        record["restore"] = _in_child(lambda: manager.restore(state))
        record["series"] = _in_child(lambda: manager.series("x"))
        record["close"] = _in_child(lambda: manager.close())
        record["exit"] = _in_child(lambda: manager.__exit__(None, None, None))
        record["raised"] = _in_child(lambda: manager.__exit__(ValueError, ValueError("x"), None))
        record["read"] = _in_child(lambda: distckpt.open(root).latest().step)  # type: ignore[union-attr]
        for how in ("leaves", "raises", "exits"):
            with manager.saving({"leaves": 2, "raises": 3, "exits": 4}[how]) as files:
                Path(files.mine("a")).write_text("x")
                pid = os.fork()
                if pid == 0:
                    os.environ["IN_CHILD"] = "1"
                    if how == "raises":
                        raise ValueError("in the child")
                    if how == "exits":
                        sys.exit(3)
                else:
                    _, status = os.waitpid(pid, 0)
                    record[how] = status
        record["steps"] = manager.all_steps()
    record["released"] = os.path.exists(f"{root}/.distckpt/owner/1.released")
    return record


def _forks_outer(rank: int, world: int, root: str) -> dict[str, Any]:
    try:
        return _forks(rank, world, root)
    except BaseException:
        if os.environ.get("IN_CHILD"):
            os._exit(7)  # the child of the fork, unwound out of the parent's blocks
        raise


@pytest.mark.parametrize("world", [1, 2])
def test_a_forked_child_never_acts_for_its_parent(world: int, tmp_path: Path) -> None:
    for record in values(run(world, _forks_outer, str(tmp_path / "root"))):
        for name in ("save", "resume", "restore", "series"):
            assert record[name].startswith("ConfigError: this manager belongs to process"), record
        assert record["close"] == record["exit"] == record["raised"] == "None" and record["read"] == "1"
        assert record["steps"] == [1, 2, 3, 4] and record["released"]
        assert all(os.waitstatus_to_exitcode(record[how]) == 7 for how in ("leaves", "raises", "exits")), record


def _twice(rank: int, world: int, root: str) -> list[int]:
    os.environ.update(DISTCKPT_HOST=f"node-{rank}", TORCHELASTIC_RESTART_COUNT=str(1 + rank))
    for _ in range(2):
        with distckpt.CheckpointManager(root):
            pass
    owners = sorted(Path(root, ".distckpt/owner").glob("*.json"))
    return [json.loads(path.read_text())["identity"]["elastic"] for path in owners]


def test_restarts_by_torchrun_are_summed_over_the_nodes_and_not_over_managers(tmp_path: Path) -> None:
    """Each agent counts its own. What the first manager summed up is not a rank's own count when the second one asks."""
    assert values(run(2, _twice, str(tmp_path / "root")))[0] == [3, 3]
