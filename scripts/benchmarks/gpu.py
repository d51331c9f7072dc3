"""Staging from a GPU, beside a plain pinned copy of the same bytes (as fast as the bus) and beside DCP's by pinned memory.

One rank with an NCCL process group, whose every step all-reduces its gradients while the saves' control plane and writer work
beside it. ``--mocked`` runs all of it on the CPU with the tests' mocked GPU: that shows that it runs, and its figures nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import distckpt
from distckpt.saving.staging import tensors_of
from scripts.benchmarks.report import LATENCY, Row, table
from scripts.benchmarks.rounds import Found, column, rotate, row
from scripts.benchmarks.subjects import Ours, Times
from tests.fakegpu import FakeGpu

_NO_GPU = 3
_WIDTH, _BATCH = 2048, 8192
_STALL, _STEP, _BESIDE, _DURABLE = range(4)  # of a variant's times

Begin = Callable[[], tuple[Callable[[], Any], Callable[[], bool], Callable[[], Any]]]  # the fence, whether it is durable, the end


class Job:
    """A model that trains on the device, and what saves it."""

    def __init__(self, stack: ExitStack, place: str, size: int, mocked: bool) -> None:
        self._stack, self._place, self._mocked, self._turn = stack, place, mocked, 0
        device = self._device = torch.device("cpu" if mocked else "cuda:0")
        width, batch = (64, 4) if mocked else (_WIDTH, _BATCH)
        layers = max(size // 3 // (4 * width * width), 1)  # AdamW keeps two more of every parameter
        self.model = torch.nn.Sequential(*(m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())))
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self._batch = torch.randn(batch, width, device=device)
        self._advance()
        self._update()
        self.ours = Ours(stack, place, {"model": distckpt.Shards(self.model), "optimizer": distckpt.Shards(self.optimizer)})
        if mocked:
            self.ours.manager._behind.device = FakeGpu()
        self._group = dist.new_group(backend="gloo")  # DCP's thread needs collectives on the CPU, apart from the training's

    def state(self) -> dict[str, torch.Tensor]:
        """What there is of it on the device."""
        tensors = tensors_of([dict(self.model.named_parameters()), list(self.optimizer.state.values())])
        return {str(index): t.detach() for index, t in enumerate(tensors) if t.device == self._device}

    def _advance(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self._sync()

    def _update(self) -> None:
        self.optimizer.step()
        self._sync()

    def _sync(self) -> None:
        if not self._mocked:
            torch.cuda.current_stream().synchronize()  # the training's; a copy beside it goes on

    def floor(self) -> Callable[[int], Times]:
        """One block on the device into one block of pinned host memory that was touched before, on a stream of its own."""
        block = torch.cat([t.reshape(-1).view(torch.uint8) for t in self.state().values()])
        target = torch.zeros(block.shape, dtype=torch.uint8, pin_memory=not self._mocked)
        stream = None if self._mocked else torch.cuda.Stream()

        def once(turn: int) -> Times:
            begun = time.perf_counter()
            with torch.cuda.stream(stream):
                target.copy_(block, non_blocking=True)
                self._sync()
            return (time.perf_counter() - begun,) * 4

        return once

    def by_us(self, how: str) -> Begin:
        return lambda: (self.ours.manager.staged, self.ours.begin(background=True, staging=how)[1].done, self.ours.end)

    def by_dcp(self, apart: bool) -> Begin:
        """``apart``: its staging goes on behind the call as well, as overlap does."""
        stager = DefaultStager(StagingOptions(not self._mocked, False, apart, not self._mocked))
        self._stack.callback(stager.close)

        def begin() -> Any:
            self._turn += 1
            path = f"{self._place}.dcp/{self._turn}"
            answer: Any = dcp.async_save(self.state(), checkpoint_id=path, process_group=self._group, async_stager=stager)
            staged = getattr(answer, "staging_completion", None)
            written = getattr(answer, "upload_completion", answer)

            def end() -> None:
                written.result()
                shutil.rmtree(path)

            return staged.result if staged else int, written.done, end

        return begin

    def step(self, begin: Begin | None) -> Callable[[int], Times]:
        """A step with a save in it, and the steps beside that until it is durable."""

        def once(turn: int) -> Times:
            begun = time.perf_counter()
            fence, done, end = begin() if begin else (int, lambda: True, int)
            call = time.perf_counter() - begun
            self._advance()
            fenced = time.perf_counter()
            fence()
            waited = time.perf_counter() - fenced
            self._update()
            step = time.perf_counter() - begun
            steps = 0
            while not steps or not done():
                self._advance()
                self._update()
                steps += 1
            durable = time.perf_counter() - begun
            end()
            return call + waited, step, (durable - step) / steps, durable

        return once

    def check(self) -> None:
        """What is in a checkpoint is of the moment of the save, though the next step followed at once."""
        for how in ("copy", "overlap"):
            saved = [t.clone() for t in self.state().values()]
            self.ours.begin(background=True, staging=how)
            self._advance()
            self._update()
            self.ours.end()
            self.ours.manager.restore(self.ours.state)
            if not all(torch.equal(a, b) for a, b in zip(saved, self.state().values(), strict=True)):
                raise SystemExit(f"staging={how!r}: the checkpoint is not of the moment of the save")


def rows(found: Found) -> Iterator[Row]:
    names = {"floor": "a pinned copy", "dcp": "DCP", "dcp-apart": "DCP, staging apart"}
    for theirs, copy, overlap in (("floor", 1.25, None), ("dcp", None, None), ("dcp-apart", None, 1 / 40)):
        yield row(f"save returns, 'copy' / {names[theirs]}", found, "copy", theirs, _STALL, copy)
        yield row(f"call + fence, 'overlap' / {names[theirs]}", found, "overlap", theirs, _STALL, overlap)
    for name in ("copy", "overlap", "dcp", "dcp-apart"):
        yield row(f"a step with the save in it / without: {names.get(name, name)}", found, name, "none", _STEP)
        yield row(f"a step beside the save / without: {names.get(name, name)}", found, name, "none", _BESIDE)
    for theirs in ("dcp", "dcp-apart"):
        yield row(f"save durable, 'copy' / {names[theirs]}", found, "copy", theirs, _DURABLE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench-gpu", description=__doc__)
    parser.add_argument("--mocked", action="store_true", help="on the CPU, to see that it runs")
    parser.add_argument("--size", type=int, default=2048, help="MB of state (default 2048)")
    parser.add_argument("--rounds", type=int, default=LATENCY)
    parser.add_argument("--dir", default=".cache/bench", help="where to write")
    given = parser.parse_args()
    if not given.mocked and not torch.cuda.is_available():
        print(f"scripts/bench-gpu: torch {torch.__version__} sees no GPU, so there is nothing to measure here; --mocked shows "
              "that the script runs", file=sys.stderr)
        return _NO_GPU
    place = Path(given.dir).resolve() / "gpu"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    dist.init_process_group("gloo" if given.mocked else "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1,
                            device_id=None if given.mocked else torch.device("cuda:0"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        job = Job(stack, f"{place}/ours", given.size << 20, given.mocked)
        job.check()
        found = rotate({"floor": job.floor(), "none": job.step(None), "copy": job.step(job.by_us("copy")),
                        "overlap": job.step(job.by_us("overlap")), "dcp": job.step(job.by_dcp(apart=False)),
                        "dcp-apart": job.step(job.by_dcp(apart=True))}, given.rounds)
        size = sum(t.nbytes for t in job.state().values())
    floor = statistics.median(column(found, "floor"))
    print(f"machine: {'mocked GPU, the figures say nothing' if given.mocked else torch.cuda.get_device_name(0)}, torch "
          f"{torch.__version__}, load {os.getloadavg()[0]:.1f}; {size >> 20} MB, pinned copy {size / floor / 1e9:.1f} GB/s")
    print(table(list(rows(found))))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
