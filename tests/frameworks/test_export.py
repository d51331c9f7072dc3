"""``distckpt export``: whole weights from what DCP, Shards and DeepSpeed wrote on two ranks, or an error and no file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distckpt
from distckpt.cli import export
from distckpt.durable import REAL
from distckpt.testing.faults import FaultyFiles, fail
from tests.frameworks.stage import Stage, staged
from tests.support import Command

stage = staged("tests.frameworks.dsranks")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one)


def tied() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model.to(torch.bfloat16)


def _save(rank: int, world: int, root: str) -> None:
    torch.manual_seed(0)
    model = tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    average = {name: p.detach() * 2 for name, p in model.named_parameters()}
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with distckpt.CheckpointManager(f"{root}/run") as manager:
        manager.save(1, distckpt.TrainState(model=model, optimizer=optimizer, rng=True))
        manager.save(2, distckpt.TrainState(model=model, optimizer=optimizer, ema=average, progress={"n": rank}))
        manager.save(3, {"train": distckpt.TrainState(model=model, optimizer=optimizer),
                         "actor": distckpt.Shards({"w": torch.ones(2)}), "critic": distckpt.Shards({"w": torch.zeros(2)})})
        manager.save(4, distckpt.Shards({f"stage{rank}": {"w": torch.full((2,), float(rank))}, "both": torch.ones(3),
                                         "step": 4, "nan": torch.tensor(float("nan"))}, name="pieces"))
        manager.save(5, distckpt.Shards({"w": torch.full((2,), float(rank))}, name="own", format="safetensors"))
        manager.save(6, distckpt.Shards({"w": dict(model.named_parameters())["0.bias"].detach()}))
        with manager.saving(7) as files:
            Path(files.mine("data.npy")).write_bytes(b"x")
    if rank == 0:
        torch.save(whole, f"{root}/whole.pt")


@pytest.fixture(scope="module")
def saved(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    stage.values(2, _save, str(folder))
    return folder


def test_what_dcp_wrote_is_one_file_of_whole_tensors(command: Command, saved: Path, tmp_path: Path) -> None:
    whole = torch.load(saved / "whole.pt", weights_only=True)
    out = tmp_path / "m.safetensors"
    said = command("export", f"{saved}/run@1", out)
    assert (said.code, said.err) == (0, "") and said.out.startswith("step-1: model (DCP), 4 tensors, ")
    assert same(load_file(out), whole) and set(whole) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert list(tmp_path.iterdir()) == [out]
    mask = os.umask(0)
    os.umask(mask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~mask
    with safe_open(out, "pt") as file:
        assert file.metadata()["distckpt"].startswith("step-1 model attempt ") and file.metadata()["format"] == "pt"

    assert command("export", f"{saved}/run@2", tmp_path / "2.safetensors").code == 0, "the model goes before other parts"
    said = command("export", "--json", f"{saved}/run", tmp_path / "ema.safetensors", "--step", 2, "--part", "ema")
    assert said.json["part"] == "ema" and said.json["tensors"] == 3 and said.json["left_out"] == []
    assert same(load_file(tmp_path / "ema.safetensors"), {k: v * 2 for k, v in whole.items() if k != "2.weight"})
    assert command("export", f"{saved}/run@3", tmp_path / "3.safetensors").code == 0
    assert same(load_file(tmp_path / "3.safetensors"), whole)
    assert list((saved / "run" / ".distckpt" / "leases").iterdir()) == [], "every lease was given back"


def test_shards_are_joined_where_the_pieces_are_whole(command: Command, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    said = command("export", f"{saved}/run@4", out)
    assert said.code == 0 and "left out, since safetensors holds tensors only: step" in said.err
    found = load_file(out)
    assert set(found) == {"stage0.w", "stage1.w", "both", "nan"} and found["stage1.w"].tolist() == [1, 1]
    for rank in (0, 1):
        one = tmp_path / f"{rank}.safetensors"
        assert command("export", f"{saved}/run@5", one, "--rank", rank).code == 0
        assert load_file(one)["w"].tolist() == [rank, rank]


@pytest.mark.parametrize(("step", "more", "code", "text"), [
    (5, [], 1, "'own': 'w' differs between ranks 0 and 1, so there is no whole of it; --rank N exports"),
    (6, [], 1, "'shard'"),
    (7, [], 1, "step-7: nothing in it is known to hold weights: export reads what TrainState, DCP, Shards, "),
    (2, ["--part", "optimizer"], 1, "step-2 has no part 'optimizer': say --part with one of 'ema', 'model'"),
    (2, ["--rank", 0], 1, "'model' of step-2 was written by DCP, not rank by rank"),
    (4, ["--rank", 2], 1, "--rank 2: step-4 was saved by 2 ranks"),
    (9, [], 3, "step 9 is not a committed checkpoint"),
])
def test_what_cannot_be_exported_is_said_and_nothing_is_left(step: int, more: list[Any], code: int, text: str,
                                                            command: Command, saved: Path, tmp_path: Path) -> None:
    said = command("export", f"{saved}/run@{step}", tmp_path / "o.safetensors", *more)
    assert said.code == code and text in said.err and said.err.count("\n") == 1 and said.out == "", said
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found_before_anything_is_written(command: Command, saved: Path, tmp_path: Path) -> None:
    """B03: no side door to a checkpoint that resume would refuse; every byte is compared with its digest."""
    for name, text in (("__1_0.distcp", "__1_0.distcp (rank 1's) has digest"), (".metadata", ".metadata (rank 0's) has digest")):
        path = saved / "run" / "step-1" / name
        right = path.read_bytes()
        path.write_bytes(right[:-9] + bytes([right[-9] ^ 1]) + right[-8:])
        said = command("export", f"{saved}/run@1", tmp_path / "o.safetensors")
        path.write_bytes(right)
        assert said.code == 1 and text in said.err, said
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-8").mkdir()
    (tmp_path / "run" / "step-8" / "model.rank-00000-of-00001.pt").write_bytes(b"half")
    assert command("export", tmp_path / "run", tmp_path / "o.safetensors").code == 4, "never committed"


def test_the_file_appears_whole_or_not_at_all(command: Command, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    assert command("export", f"{saved}/run@1", tmp_path / "o.pt").code == 2
    said = command("export", f"{saved}/run@1", tmp_path / "none" / "o.safetensors")
    assert said.code == 1 and f"{tmp_path}/none is not there, or is no directory" in said.err
    out.write_bytes(b"mine")
    said = command("export", f"{saved}/run@1", out)
    assert said.code == 1 and "--force replaces it" in said.err and out.read_bytes() == b"mine"
    tensors = {"w": torch.ones(4)}
    for fault in (fail(errno.ENOSPC, op="fsync_file"), fail(errno.EIO, op="rename")):
        with pytest.raises(OSError):
            export.write(FaultyFiles(REAL, fault), str(out), tensors, {}, "t", force=True)
        assert fault.fired and out.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [out]
    with pytest.raises(distckpt.ConfigError):
        export.write(REAL, str(out), tensors, {}, "t", force=False)
    log = FaultyFiles(REAL)
    export.write(log, str(out), tensors, {}, "t", force=True)
    assert [o.op for o in log.log] == ["open", "close", "fsync_file", "rename", "fsync_dir", "unlink"]
    assert load_file(out)["w"].tolist() == [1] * 4
    assert command("export", f"{saved}/run@1", out, "--force").code == 0 and len(load_file(out)) == 4


def test_a_lease_keeps_rotation_away_while_it_reads(command: Command, saved: Path, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    from distckpt.payloads import weights

    held: list[str] = []
    read = weights.read

    def look(checkpoint: Any, part: Any, rank: Any) -> Any:
        held.extend(lease.reason for lease in distckpt.open(saved / "run").leases_on(checkpoint.attempt))
        return read(checkpoint, part, rank)

    monkeypatch.setattr(weights, "read", look)
    assert command("export", f"{saved}/run@1", tmp_path / "o.safetensors").code == 0
    assert held == [f"export to {tmp_path}/o.safetensors"]


# -- DeepSpeed -----------------------------------------------------------------------------------------------------------

def _deepspeed(rank: int, world: int, root: str) -> None:
    import deepspeed

    for zero in range(4):
        torch.manual_seed(zero)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
        config = {"train_batch_size": 2 * world, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
                  "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0}}
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.step()
        with distckpt.CheckpointManager(f"{root}/zero{zero}") as manager, manager.saving(1) as files:
            engine.save_checkpoint(files.path, tag="tag", save_latest=False)
        with distckpt.CheckpointManager(f"{root}/state{zero}") as manager:
            progress = {"n": 1}
            state = distckpt.TrainState(model=engine, progress=progress)
            manager.save(1, state, background=bool(zero % 2))
            progress["n"] = 2
            engine.backward(engine(torch.ones(2, 6)).sum())
            engine.step()
            assert manager.restore(state) == 1 and progress == {"n": 1}, "an engine in a TrainState comes back with its members"
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=zero == 3):
            whole = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        if rank == 0:
            torch.save(whole, f"{root}/zero{zero}.pt")


def test_what_deepspeed_wrote_is_joined_by_its_own_zero_to_fp32(stage: Stage, command: Command, tmp_path: Path) -> None:
    stage.values(2, _deepspeed, str(tmp_path))
    for root in [f"{how}{zero}" for zero in range(4) for how in ("zero", "state")]:
        out = tmp_path / f"{root}.safetensors"
        said = command("export", "--json", tmp_path / root, out)
        assert said.code == 0, said.err
        assert said.json["kind"] == "DeepSpeed" and said.json["tensors"] == 4
        assert same(load_file(out), torch.load(f"{tmp_path}/zero{root[-1]}.pt", weights_only=True)), root
    path = next((tmp_path / "zero2" / "step-1" / "tag").glob("*_optim_states.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    said = command("export", tmp_path / "zero2", tmp_path / "o.safetensors")
    assert said.code == 1 and "has digest" in said.err and not (tmp_path / "o.safetensors").exists()


def test_what_transformers_names_is_one_part_and_pieces_of_layers_are_refused(command: Command, tmp_path: Path) -> None:
    whole = {f"layer.{n}": torch.full((2,), float(n)) for n in range(3)}
    with distckpt.CheckpointManager(str(tmp_path / "run")) as manager:
        with manager.saving(1) as files:
            for n, name in enumerate(whole):
                save_file({name: whole[name]}, files.claim(f"model-{n + 1:05d}-of-00003.safetensors"))
            torch.save({"param_groups": []}, files.claim("optimizer.pt"))
        with manager.saving(2) as files:
            torch.save(whole, files.claim("pytorch_model.bin"))
        with manager.saving(3) as files:
            torch.save({}, files.claim("layer_00-model_00-model_states.pt"))
            torch.save({}, files.claim("mp_rank_00_model_states.pt"))
    for step in (1, 2):
        assert command("export", f"{tmp_path}/run@{step}", tmp_path / f"{step}.safetensors").code == 0
        assert same(load_file(tmp_path / f"{step}.safetensors"), whole)
    said = command("export", f"{tmp_path}/run@3", tmp_path / "3.safetensors")
    assert said.code == 1 and "is of a pipeline or of experts" in said.err and not (tmp_path / "3.safetensors").exists()
