"""FSDP2, FSDP1, DDP and plain modules on real gloo ranks: they go on bit for bit, and reshard to fewer and more ranks."""

from __future__ import annotations

import errno
import hashlib
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import distckpt
from distckpt import DCP, Member, Shards, TrainState
from distckpt.errors import DiskFull, IntegrityError, RankDisagreement, SaveError, WorldMismatch
from tests.harness import run, values

KINDS = ["fsdp2", "fsdp1", "ddp", "plain"]


FIXED = torch.linspace(-1, 1, 32).reshape(4, 8)


class Loop:
    """A training loop of one kind: its state, a step, and what the weights are, whatever shards them."""

    def __init__(self, kind: str, rank: int, world: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        if kind == "fsdp2":
            mesh = init_device_mesh("cpu", (world,))
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif kind == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        elif kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        self.model, self.world, self.by_hand = model, world, kind == "plain"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.progress = {"samples": 0}
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        torch.manual_seed(100 + rank)
        random.seed(200 + rank)
        numpy.random.seed(300 + rank)

    def state(self) -> TrainState:
        return TrainState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, rng=True,
                          progress=Member(self.progress, on_world_change=lambda old: {"samples": sum(o["samples"] for o in old)}))

    def step(self) -> float:
        """Data from three generators of this rank, so that each of them must come back."""
        self.optimizer.zero_grad()
        scale = random.random() + float(numpy.random.rand())
        loss = self.model(torch.randn(4, 8) * scale).pow(2).mean()
        loss.backward()
        if self.by_hand:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world
        self.optimizer.step()
        self.scheduler.step()
        self.progress["samples"] += 4
        return float(loss)

    def digest(self) -> str:
        """What the weights make of a fixed input, bit for bit, however they are sharded."""
        with torch.no_grad():
            return hashlib.sha256(self.model(FIXED).numpy().tobytes()).hexdigest()

    def next_digest(self) -> str:
        """The same after one more step over data that are equal on all ranks: it tells the optimizer's state as well."""
        self.optimizer.zero_grad()
        self.model(FIXED).pow(2).mean().backward()
        self.optimizer.step()
        return self.digest()


def _train_and_save(rank: int, world: int, folder: str) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        loop = Loop(kind, rank, world)
        with distckpt.CheckpointManager(f"{folder}/{kind}") as manager:
            assert manager.restore(loop.state()) is None
            manager.save(0, loop.state())
            for _ in range(3):
                loop.step()
            manager.save(3, loop.state())
            digest = loop.digest()
        losses = [loop.step() for _ in range(3)]
        found[kind] = {"digest": digest, "losses": losses, "end": loop.digest(), "rng": float(torch.rand(1))}
        dist.barrier()
    return found


def _restore(rank: int, world: int, folder: str) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        with distckpt.CheckpointManager(f"{folder}/{kind}") as manager:
            loop = Loop(kind, rank, world, seed=7)
            step = manager.restore(loop.state(), step=3)  # named: what follows goes back to step 0
            digest, samples, rate = loop.digest(), loop.progress["samples"], loop.optimizer.param_groups[0]["lr"]
            losses = [loop.step() for _ in range(3)]
            found[kind] = {"step": step, "digest": digest, "losses": losses, "end": loop.digest(), "samples": samples,
                           "rng": float(torch.rand(1)), "lr": rate}
            early = Loop(kind, rank, world, seed=7)
            assert manager.restore(early.state(), step=3) == 3
            found[kind]["next"] = early.next_digest()
            early = Loop(kind, rank, world, seed=7)
            found[kind]["zero"] = manager.restore(early.state(), step=0)
            found[kind]["no state"] = not early.optimizer.state
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("kinds"))
    return folder, values(run(2, _train_and_save, folder))


def test_every_kind_goes_on_bit_for_bit_on_as_many_ranks_and_reshards_to_fewer_and_more(trained: Any) -> None:
    """B134: random states are of each rank, never rank 0's for all."""
    folder, before = trained
    following: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for world in (2, 1, 4):
        after = values(run(world, _restore, folder))
        for kind in KINDS:
            where = f"{kind} on {world}"
            assert all(r[kind]["step"] == 3 and r[kind]["zero"] == 0 and r[kind]["no state"] for r in after), where
            assert {r[kind]["digest"] for r in after} == {before[0][kind]["digest"]}, where
            following[kind] |= {r[kind]["next"] for r in after}
            assert all(r[kind]["lr"] == 0.005 for r in after), f"{where}: the scheduler's state"
            assert len({r[kind]["rng"] for r in after}) == world, f"{where}: every rank has a stream of its own"
            if world == 2:
                assert all(r[kind]["samples"] == 12 for r in after), where
                for rank in range(2):
                    for what in ("losses", "end", "rng"):
                        assert after[rank][kind][what] == before[rank][kind][what], f"{where}: {what} of rank {rank}"
            else:
                assert all(r[kind]["samples"] == 24 for r in after), f"{where}: the rule of a member"
    assert all(len(digests) == 1 for digests in following.values()), "the optimizers' states differ by number of ranks"


def _around_dcp(rank: int, world: int, folder: str) -> dict[str, Any]:
    """What one process group is enough for."""
    found: dict[str, Any] = {}
    root = f"{folder}/around"
    with distckpt.CheckpointManager(root) as manager:
        loop = Loop("fsdp2", rank, world)
        loop.step()
        own = {"r": torch.full((3,), float(rank))}
        ema = {"w": torch.full((8,), 5.0)}
        manager.save(1, {"train": loop.state(), "own": Shards(own), "ema": DCP(state=ema)})
        other, mine, average = Loop("fsdp2", rank, world, seed=9), {"r": torch.zeros(3)}, {"w": torch.zeros(8)}
        found["several"] = manager.restore({"train": other.state(), "own": Shards(mine), "ema": DCP(state=average)})
        found["equal"] = other.digest() == loop.digest() and float(mine["r"][0]) == rank and float(average["w"][0]) == 5.0

        # plain PyTorch reads what we wrote
        plain = Loop("fsdp2", rank, world, seed=9)
        sharded = {"model": get_model_state_dict(plain.model)}
        dcp.load(sharded, checkpoint_id=f"{root}/step-1/train")
        full = StateDictOptions(full_state_dict=True)
        theirs, ours = get_model_state_dict(plain.model, options=full), get_model_state_dict(loop.model, options=full)
        found["plain"] = all(torch.equal(theirs[name], ours[name]) for name in ours) and len(ours) == 4

        # B89 on one rank: its writer drops a result and reports success
        original = dcp.FileSystemWriter.write_data

        def forgetful(self: Any, plan: Any, planner: Any) -> Any:
            future: Any = torch.futures.Future()
            future.set_result(original(self, plan, planner).wait()[:-1])
            return future

        if rank == 1:
            dcp.FileSystemWriter.write_data = forgetful  # type: ignore[method-assign]
        with pytest.raises(SaveError) as caught:
            manager.save(2, loop.state())
        dcp.FileSystemWriter.write_data = original  # type: ignore[method-assign]
        found["dropped"] = {r: f.message for r, f in caught.value.failures.items()}

        # the metadata is bad as one rank sees it: no rank is left waiting in DCP's load
        opened = distckpt.Checkpoint.open
        if rank == 1:
            distckpt.Checkpoint.open = lambda self, path, digest=True: (_ for _ in ()).throw(  # type: ignore[method-assign]
                IntegrityError("bad here", files={path: "bad"}))
        with pytest.raises(IntegrityError) as bad:
            manager.restore({"train": other.state(), "own": Shards(mine), "ema": DCP(state=average)})
        distckpt.Checkpoint.open = opened  # type: ignore[method-assign]
        found["load"] = bad.value.files

        with pytest.raises(RankDisagreement) as differ:
            manager.save(3, loop.state() if rank else Shards(own))
        found["kinds"] = differ.value.values
        manager.save(3, loop.state())

    # a warm start from another root, the model only
    with distckpt.CheckpointManager(f"{folder}/warm") as manager:
        warm = Loop("fsdp2", rank, world, seed=11)
        found["warm"] = manager.restore(warm.state(), source=root, only=["model"])
        found["fresh optimizer"] = not warm.optimizer.state
        theirs = get_model_state_dict(warm.model, options=full)
        found["warm equal"] = all(torch.equal(theirs[name], ours[name]) for name in ours)
    return found


def test_around_dcp_on_two_ranks(tmp_path: Path) -> None:
    """Several payloads in one checkpoint; plain PyTorch reads it; B89; a load that fails on one rank; a warm start."""
    for found in values(run(2, _around_dcp, str(tmp_path))):
        assert found["several"] == 1 and found["equal"] and found["plain"]
        assert list(found["dropped"]) == [1] and "DCP reported success without writing 1 of" in found["dropped"][1]
        assert found["load"] == {".metadata": "bad"}
        assert found["kinds"] in ({0: False, 1: True}, {0: [""], 1: ["model"]}, {0: [], 1: ["model"]})
        assert found["warm"] == 3 and found["warm equal"] and found["fresh optimizer"]


def _no_rule(rank: int, world: int, root: str) -> Any:
    state = TrainState(model=torch.nn.Linear(2, 2), loader={"n": rank})
    with distckpt.CheckpointManager(root) as manager:
        if world == 2:
            manager.save(1, state)
            return None
        with pytest.raises(WorldMismatch) as caught:
            manager.restore(state)
        dist.barrier()
    return caught.value.saved, caught.value.now, str(caught.value)


def test_a_per_rank_member_without_a_rule_is_a_world_mismatch_on_every_rank(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    values(run(2, _no_rule, root))
    for saved, now, text in values(run(3, _no_rule, root)):
        assert (saved, now) == (2, 3) and "'loader'" in text and "on_world_change" in text


def _dcp_in_a_block(rank: int, world: int, root: str) -> Any:
    write = dcp.FileSystemWriter.write_data

    def full(self: Any, plan: Any, planner: Any) -> Any:
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, plan, planner)

    with distckpt.CheckpointManager(root) as manager:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(DiskFull) as caught, manager.saving(1) as files:
            patch.setattr(dcp.FileSystemWriter, "write_data", full)
            dcp.save({"a": torch.ones(3)}, checkpoint_id=files.path)
        with manager.saving(2) as files:
            dcp.save({"a": torch.ones(3)}, checkpoint_id=files.path)
        return caught.value.outcome, sorted(caught.value.failures), manager.all_steps()


def test_an_error_of_dcp_in_a_block_of_saving_is_a_save_error_that_blames_its_rank_alone(tmp_path: Path) -> None:
    """DCP raises on every rank alike, and what it raises is no Exception: ``except SaveError`` would have missed it."""
    assert values(run(2, _dcp_in_a_block, str(tmp_path / "root"))) == [("aborted", [1], [2])] * 2
