"""The story itself, told by what needs no framework: DDP and TrainState. Every other adapter's test is like this one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import distckpt
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import Job, Story, Told, digest, loop


def train(rank: int, world: int, job: Job) -> Told:
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    def end(started: int) -> Told:
        return Told(started, digest([net.state_dict(), optimizer.state_dict()]))

    return end(loop(job, distckpt.TrainState(model=model, optimizer=optimizer, rng=True), step))


stage = staged()


@pytest.fixture(scope="module")
def plain(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return Story(stage, train, tmp_path_factory.mktemp("plain")).plain()


@pytest.mark.xdist_group("story")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
def test_ddp(stage: Stage, plain: list[str], tmp_path: Path, background: bool) -> None:
    Story(stage, train, tmp_path).whole(plain, background)
