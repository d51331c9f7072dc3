"""``dedup="link"`` on real ranks: each links its own files, on storage that all share and on nodes' own disks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt.errors import RankDisagreement
from tests.harness import run, values
from tests.inprocess import Job, same_error
from tests.ranks.test_domains import manager_on

BIG = 1 << 19


def _state(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"frozen": torch.full((BIG,), -1.0 - rank), "head": torch.full((BIG,), float(step)), "small": torch.ones(3)}


def _linked(path: str) -> list[str]:
    return sorted(name for name in os.listdir(path) if os.stat(f"{path}/{name}").st_nlink > 1)


def _train(manager: distckpt.CheckpointManager, rank: int) -> Any:
    found = []
    for step in (1, 2, 3):
        manager.save(step, distckpt.Shards(_state(rank, step)), background=step == 2)
        manager.wait()
        found.append(_linked(f"{manager.root}/step-{step}"))
    manager.save(3, distckpt.Shards(_state(rank, 4)), on_exists="replace")
    found.append(_linked(f"{manager.root}/step-3"))
    fresh = _state(9, 0)
    assert manager.restore(distckpt.Shards(fresh), verify="digest") == 3
    return found, float(fresh["frozen"][0]), float(fresh["head"][-1])


def _shared(rank: int, world: int, root: str) -> Any:
    with distckpt.CheckpointManager(root, dedup="link", keep_last=2) as manager:
        return _train(manager, rank)


def _names(*ranks: int) -> list[str]:
    """The frozen file and the small one of each of these ranks."""
    return sorted(f"shard{part}.rank-{rank:05d}-of-00002.pt" for rank in ranks for part in ("", ".part-00001"))


def test_every_rank_links_what_it_did_not_change(tmp_path: Path) -> None:
    for rank, (found, frozen, head) in enumerate(values(run(2, _shared, str(tmp_path / "run")))):
        assert found[1:] == [_names(0, 1)] * 3, found
        assert (frozen, head) == (-1.0 - rank, 4.0)
    again = values(run(2, _shared, str(tmp_path / "again")))
    assert again[0][0] == again[1][0]


def _local(rank: int, world: int, home: str) -> Any:
    with manager_on(home, rank, keep_last=2, dedup="link") as manager:
        return _train(manager, rank)


@pytest.mark.root_only
@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace of its own for every node needs root")
def test_on_nodes_own_disks_each_links_what_it_has(tmp_path: Path) -> None:
    for rank, (found, frozen, head) in enumerate(values(run(2, _local, str(tmp_path)))):
        assert found[1:] == [_names(rank)] * 3, found
        assert (frozen, head) == (-1.0 - rank, 4.0)


def test_ranks_must_agree_on_it(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    errors = same_error(job.threads.run(lambda rank: job.open(rank, dedup="link" if rank else None)), RankDisagreement)
    assert "dedup" in str(errors[0])
