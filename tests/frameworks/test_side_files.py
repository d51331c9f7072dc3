"""Files beside the framework's own (a seed of this project): every rank wrote one shared ``prefetch_orders.json.tmp``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import distckpt
from distckpt.errors import ConfigError, SaveError
from tests.harness import run, values

NAME = "prefetch_orders.json"


def _orders(rank: int) -> dict[str, Any]:
    return {"rank": rank, "order": list(range(50 * (rank + 1)))}


def _naive(folder: str, rank: int) -> str:
    """What each rank did, in the order in which it went wrong: two writers, one temporary, one rename too many."""
    temporary = Path(folder, f"{NAME}.tmp")
    temporary.write_text(json.dumps(_orders(rank)))
    told = ""
    for turn in range(2):
        dist.barrier()
        if rank == turn:
            try:
                os.replace(temporary, Path(folder, NAME))
            except FileNotFoundError as error:
                told = str(error)
    dist.barrier()
    return told


def _torn(folder: str, rank: int) -> str:
    """The same where rank 1 has just opened the temporary that rank 0 renames: what stands then is empty."""
    temporary = Path(folder, f"{NAME}.tmp")
    if rank == 0:
        temporary.write_text(json.dumps(_orders(rank)))
    dist.barrier()
    stream = open(temporary, "w") if rank == 1 else None  # noqa: SIM115 - closed after the other's rename
    dist.barrier()
    if rank == 0:
        os.replace(temporary, Path(folder, NAME))
    dist.barrier()
    seen = Path(folder, NAME).read_text()
    dist.barrier()
    if stream is not None:
        stream.close()
    return seen


def _side_files(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    os.makedirs(f"{folder}/naive", exist_ok=True)
    found["naive"], found["torn"] = _naive(f"{folder}/naive", rank), _torn(f"{folder}/naive", rank)
    with distckpt.CheckpointManager(f"{folder}/root", keep_last=2) as manager:
        def save(step: int) -> None:
            """DCP into the directory, and the side files as they should be."""
            with manager.saving(step) as files:
                dcp_save({"w": torch.ones(4)}, checkpoint_id=files.path)
                Path(files.mine(NAME)).write_text(json.dumps(_orders(rank)))
                if files.writes("vocabulary.json"):
                    Path(files.shared("vocabulary.json")).write_text("{}")

        save(1)
        with pytest.raises(SaveError) as caught, manager.saving(2) as files:
            error = _naive(files.path, rank)
            if error:
                raise FileNotFoundError(error)
        found["in a save"] = {r: (f.type, f.message) for r, f in caught.value.failures.items()}
        with pytest.raises(SaveError) as caught, manager.saving(2) as files:
            Path(files.claim(NAME)).write_text(json.dumps(_orders(rank)))
        found["claimed twice"] = str(caught.value)
        with pytest.raises(SaveError) as caught, manager.saving(2) as files:  # a framework's writer that claims what it sees
            Path(files.directory, f"shard-{rank}").write_bytes(b"x")
            dist.barrier()
            for name in os.listdir(files.directory):
                files.claim(name)
        found["claimed by listing"] = str(caught.value)
        with pytest.raises(SaveError) as caught, manager.saving(2) as files:
            Path(files.shared("vocabulary.json")).write_text("{}")
        found["not its writer"] = {r: (f.type, f.message) for r, f in caught.value.failures.items()}
        assert isinstance(caught.value.__cause__, ConfigError) == (rank == 1)
        for step in (2, 3):
            save(step)
        checkpoint = manager.resume().checkpoint
        assert checkpoint is not None
        found["mine"] = json.loads(Path(checkpoint.mine(NAME)).read_text()) == _orders(rank)
        found["shared"] = Path(checkpoint.shared("vocabulary.json")).read_text()
    return found


def test_B35_B36_one_shared_temporary_fails_and_a_file_per_rank_or_one_writer_does_not(tmp_path: Path) -> None:
    told = values(run(2, _side_files, str(tmp_path)))
    assert told[0]["naive"] == "" and f"{NAME}.tmp" in told[1]["naive"], "the fault itself"
    assert [t["torn"] for t in told] == ["", ""], "and its silent form: the file that stands is empty"
    for found in told:
        kind, message = found["in a save"].pop(1)
        assert not found["in a save"] and kind == "FileNotFoundError" and f"{NAME}.tmp" in message
        assert f"ranks 0 and 1 both wrote '{NAME}': use files.mine" in found["claimed twice"]
        assert "ranks 0 and 1 both wrote 'shard-0'" in found["claimed by listing"]
        (rank, (kind, message)), = found["not its writer"].items()
        assert (rank, kind) == (1, "ConfigError") and "written by rank 0 for all; rank 1 must not" in message
        assert found["mine"] and found["shared"] == "{}"
    assert sorted(os.listdir(tmp_path / "root")) == [".distckpt", "latest", "step-2", "step-3"]
    assert [name for name in sorted(os.listdir(tmp_path / "root" / "step-3")) if not name.endswith(".distcp")] == [
        ".metadata", "commit.json", "prefetch_orders.rank-00000-of-00002.json", "prefetch_orders.rank-00001-of-00002.json",
        "vocabulary.json"]
