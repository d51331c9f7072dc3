"""The training script that the job scripts run unchanged: small, deterministic, and held in the middle of a step.

``train.py KIND FOLDER``: KIND is torch, deepspeed or mpi. In the first run of a job every rank is held inside of step HELD until
the file ``go`` is there, and then trains until it is told to stop; a later run takes MORE steps. Each rank leaves a file when it
is held (``at``), when a stop signal arrives (``signalled``), and at its end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

import distckpt

HELD, MORE = 3, 4


class Torch:
    """A linear model with dropout, whose gradients are averaged over the ranks."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        torch.manual_seed(rank)
        self.state: Any = distckpt.TrainState(model=self.model, optimizer=self.optimizer, rng=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().mean().backward()
        for parameter in self.model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        self.optimizer.step()

    def numbers(self) -> Any:
        return [p.detach() for p in self.model.parameters()]


class DeepSpeed:
    def __init__(self, rank: int) -> None:
        from tests.frameworks import dsranks

        self.one_step, self.engine = dsranks.step, dsranks.engine(2)
        self.state: Any = distckpt.TrainState(model=self.engine, rng=True)

    def step(self) -> None:
        self.one_step(self.engine)

    def numbers(self) -> Any:
        return [p.detach() for p in self.engine.module.parameters()]


class Mpi:
    """A field of each rank's own, and a sum over all of them in each step."""

    def __init__(self, rank: int) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.state: Any = {"field": field(rank)}

    def step(self) -> None:
        advance(self.state["field"], sum(self.comm.allgather(float(self.state["field"].sum()))))

    def numbers(self) -> Any:
        return [self.state["field"]]


def field(rank: int) -> torch.Tensor:
    return torch.full((64,), float(rank + 1), dtype=torch.float64)


def advance(field: torch.Tensor, total: float) -> None:
    field.mul_(0.5).add_(torch.arange(64) * total / 1e4)


def without_mpi(world: int, total: int) -> list[str]:
    """What a run of ``Mpi`` that nobody stops ends with, rank by rank: its ranks one after the other, in this process."""
    fields = [field(rank) for rank in range(world)]
    for _ in range(total):
        sums = sum([float(f.sum()) for f in fields])
        for f in fields:
            advance(f, sums)
    return [digest([f]) for f in fields]


KINDS = {"torch": Torch, "deepspeed": DeepSpeed, "mpi": Mpi}


def digest(numbers: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in numbers)).hexdigest()


def train(kind: str, rank: int, folder: Path, total: int | None = None) -> tuple[dict[str, Any], Any]:
    """What this rank saw, and its manager, not yet closed. Steps up to ``total``; None: held, and then until told to stop; a run
    that resumes takes MORE."""
    job = KINDS[kind](rank)
    manager = distckpt.CheckpointManager(folder / "root", keep_last=2)
    started = step = manager.restore(job.state) or 0
    total = started + MORE if started else total
    while total is None or step < total:
        todo = manager.poll(step)
        if todo.save:
            manager.save(step, job.state)
        if todo.stop:
            break
        if total is None and step == HELD:
            (folder / f"at.{rank}").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)
        job.step()
        step += 1
    else:
        manager.save(step, job.state, on_exists="skip")
    return {"rank": manager.rank, "world": manager.world, "started": started, "ended": step, "stopped": manager.stopped,
            "digest": digest(job.numbers()), "host": socket.gethostname()}, manager


def uninterrupted(rank: int, world: int, kind: str, folder: str, total: int) -> str:
    """For ranks of the tests' own harness: the digest of a run that nobody stops."""
    seen, manager = train(kind, rank, Path(folder), total)
    manager.close()
    return str(seen["digest"])


def main(kind: str, folder: Path) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    launch = distckpt.launch.detect()
    if kind == "torch":
        launch.export()
        torch.distributed.init_process_group("gloo")
    signal.signal(signal.SIGUSR1, lambda *ignored: (folder / f"signalled.{launch.rank}").touch())
    seen, manager = train(kind, launch.rank, folder)
    seen.update(kind=launch.kind, restart=launch.restart, local=[launch.local_rank, launch.local_world], job=launch.job,
                cpus=os.environ.get("SRUN_CPUS_PER_TASK"))
    (folder / f"run-{launch.restart}.rank-{launch.rank}.json").write_text(json.dumps(seen))
    return distckpt.launch.finish(manager)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[-2], Path(sys.argv[-1])))  # deepspeed puts its --local_rank before them
