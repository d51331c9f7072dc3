"""A reinforcement-learning loop with several models: actor, critic, a frozen reference, and each rank's rollouts.

    torchrun --nproc-per-node 2 scripts/examples/rl_models.py ROOT STEPS

They are saved by different code at different speeds, and an actor of one moment beside the critic of another trains on
without a word. In one block they are one checkpoint: all of this step, or none. The best by reward stays, too.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist

import distckpt

SHARED = ("actor", "critic", "reference", "optimizers")


def average(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def network(outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, outputs))


class Learner:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.actor, self.critic = network(2), network(1)
        self.reference = copy.deepcopy(self.actor).requires_grad_(False)
        self.optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (self.actor, self.critic)]
        torch.manual_seed(1 + dist.get_rank())
        self.rollouts = torch.randn(32, 4)

    def improve(self) -> float:
        """One update of all models on this rank's rollouts; the mean reward over all ranks."""
        self.rollouts = torch.cat([self.rollouts[8:], torch.randn(8, 4)])
        reward = -(self.rollouts.sum(1) - 1.0).abs()
        policy, value = self.actor(self.rollouts).log_softmax(1), self.critic(self.rollouts).squeeze(1)
        kept = torch.nn.functional.kl_div(policy, self.reference(self.rollouts).log_softmax(1), log_target=True)
        loss = -(policy[:, 0] * (reward - value.detach())).mean() + (reward - value).square().mean() + 0.1 * kept
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for module, optimizer in zip((self.actor, self.critic), self.optimizers, strict=True):
            average(module)
            optimizer.step()
        told = reward.mean()
        dist.all_reduce(told)
        return told.item() / dist.get_world_size()

    def part(self, name: str) -> Any:
        if name == "optimizers":
            return [optimizer.state_dict() for optimizer in self.optimizers]
        return getattr(self, name).state_dict()

    def save(self, files: Any) -> None:
        for name in SHARED:  # equal on all ranks: one writes it
            if files.writes(f"{name}.pt"):
                torch.save(self.part(name), files.shared(f"{name}.pt"))
        torch.save({"rollouts": self.rollouts, "random": torch.get_rng_state()}, files.mine("rollouts.pt"))

    def load(self, found: distckpt.Checkpoint) -> None:
        for name in ("actor", "critic", "reference"):
            getattr(self, name).load_state_dict(torch.load(found.shared(f"{name}.pt"), weights_only=True))
        for optimizer, state in zip(self.optimizers, torch.load(found.shared("optimizers.pt"), weights_only=True), strict=True):
            optimizer.load_state_dict(state)
        mine = torch.load(found.mine("rollouts.pt"), weights_only=True)
        self.rollouts = mine["rollouts"]
        torch.set_rng_state(mine["random"])


def main(folder: str, steps: int) -> None:
    dist.init_process_group("gloo")
    learner, reward = Learner(), 0.0
    with distckpt.CheckpointManager(folder, save_every=2, keep_last=2, keep_best=1, best_metric="reward",
                                    best_mode="max") as manager:
        found, step = manager.resume().checkpoint, 0
        if found is not None:
            learner.load(found)
            step = found.step
        begun = step
        while step < steps:
            reward = learner.improve()
            step += 1
            todo = manager.poll(step)
            if todo.save or step == steps:
                with manager.saving(step, metrics={"reward": reward}, on_exists="skip") as files:
                    learner.save(files)
            if todo.stop:
                break
    total = sum(p.double().sum().item() for m in (learner.actor, learner.critic) for p in m.parameters())
    print(f"from {begun} to {step}: reward {reward:.3f}, weights {total.hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
