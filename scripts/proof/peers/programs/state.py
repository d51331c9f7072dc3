"""The training that is saved: a few KiB that change with every step. For peers that take a torch module."""

from __future__ import annotations

import os

import torch

WORLD = int(os.environ.get("PEER_WORLD", "1"))
torch.set_num_threads(1)


def model(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = torch.nn.Linear(16, 16)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()


model()  # the first optimizer imports for a second: here once, instead of in every rank that is forked
