"""A Megatron-style asynchronous save: a request with a function for a forked writer, and functions to finalize it.

    torchrun --nproc-per-node 2 scripts/examples/megatron_async.py ROOT STEPS

Megatron runs the finalize functions on every rank once every rank's writer has ended, and asks for that at every step. So the
block of ``manager.saving`` is entered when the save is scheduled and left in the finalize function: that is the commit. A
writer that failed on one rank is an exception in the block there, and a SaveError on all.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import distckpt


class AsyncRequest(NamedTuple):
    """As ``megatron.core.dist_checkpointing.strategies.async_utils`` has it."""

    async_fn: Callable[..., None]
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[int], None]]


@dataclass
class AsyncCallsQueue:
    """One request at a time; every rank asks at every step."""

    running: list[tuple[AsyncRequest, Any]] = field(default_factory=list)

    def schedule_async_request(self, request: AsyncRequest) -> None:
        self.maybe_finalize_async_calls(blocking=True)
        process = multiprocessing.get_context("fork").Process(target=request.async_fn, args=request.async_fn_args)
        process.start()
        self.running.append((request, process))

    def maybe_finalize_async_calls(self, blocking: bool = False) -> None:
        if not self.running:
            return
        request, process = self.running[0]
        if blocking:
            process.join()
        ended = torch.tensor([not process.is_alive()], dtype=torch.int)
        dist.all_reduce(ended, dist.ReduceOp.MIN)  # Megatron's way: a small collective at every step while a save runs
        if ended.item():
            process.join()
            self.running.pop()
            for finalize in request.finalize_fns:
                finalize(process.exitcode)


def save_checkpoint(manager: distckpt.CheckpointManager, queue: AsyncCallsQueue, step: int, state: dict[str, Any]) -> None:
    queue.maybe_finalize_async_calls(blocking=True)
    block = ExitStack()
    files = block.enter_context(manager.saving(step))
    copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    def commit(exitcode: int) -> None:
        with block:
            if exitcode:
                raise RuntimeError(f"the writer of this rank ended with {exitcode}")

    queue.schedule_async_request(AsyncRequest(torch.save, (copied, files.mine("shard.pt")), [commit]))


def main(folder: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, queue = dist.get_rank(), AsyncCallsQueue()
    torch.manual_seed(rank)  # every rank has a shard of its own, as with tensor parallelism
    weights, momentum = torch.randn(64, 64), torch.zeros(64, 64)
    with distckpt.CheckpointManager(folder, save_every=2, keep_last=2) as manager:
        found, step = manager.resume().checkpoint, 0
        if found is not None:
            stored = torch.load(found.mine("shard.pt"), weights_only=True)
            step, weights, momentum = found.step, stored["weights"], stored["momentum"]
        begun = step
        while step < steps:
            queue.maybe_finalize_async_calls()
            gradient = torch.tanh(weights + step)
            shared = gradient.mean()
            dist.all_reduce(shared)
            momentum.mul_(0.9).add_(gradient + shared)
            weights.sub_(0.01 * momentum)
            step += 1
            todo = manager.poll(step)
            if todo.save or step == steps:
                save_checkpoint(manager, queue, step, {"weights": weights, "momentum": momentum})
            if todo.stop:
                break
        queue.maybe_finalize_async_calls(blocking=True)
    total = weights.double().sum()
    dist.all_reduce(total)
    print(f"from {begun} to {step}: weights {total.item().hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
