"""What ``background`` measures, on one of two ranks: a plain copy, our saves, DCP's, and the training beside them."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import distckpt

WORLD = 2
_PIECE = 8 << 20

Times = tuple[float, ...]


def share(size: int, world: int = WORLD) -> dict[str, torch.Tensor]:
    """One rank's share of ``size`` bytes."""
    one = torch.randn(_PIECE // 4)
    return {f"layer.{i}": one.clone() for i in range(max(size // world // _PIECE, 1))}


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, DTensor]:
    """The same memory as tensors that the ranks share out, as FSDP does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}


def memcpy(tensors: dict[str, torch.Tensor]) -> Callable[[int], Times]:
    """One copy of the same bytes into memory that was touched before, by the fastest means there is here."""
    pairs = [(torch.empty_like(t).fill_(1.0).numpy(), t.numpy()) for t in tensors.values()]

    def once(turn: int) -> Times:
        begun, cpu = time.perf_counter(), time.thread_time()
        for into, source in pairs:
            numpy.copyto(into, source)
        took = time.perf_counter() - begun
        return took, took, time.thread_time() - cpu

    return once


class Net:
    """A model that trains: its parameters and AdamW's two moments of each are about ``size`` bytes."""

    def __init__(self, size: int) -> None:
        width = 1024
        layers = max(size // 3 // (4 * width * width), 1)
        self._model = torch.nn.Sequential(*(m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), foreach=True)
        self._batch = torch.randn(256, width)
        self.learn()
        self.update()

    def learn(self) -> None:
        """Forward and backward."""
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()

    def update(self) -> None:
        self._optimizer.step()

    def payload(self) -> dict[str, Any]:
        return {"model": distckpt.Shards(self._model), "optimizer": distckpt.Shards(self._optimizer)}

    def tensors(self) -> dict[str, torch.Tensor]:
        moments = (moment for state in self._optimizer.state.values() for moment in (state["exp_avg"], state["exp_avg_sq"]))
        return {str(i): t.detach() for i, t in enumerate([*self._model.parameters(), *moments])}


class Saver:
    """A manager and a way to save by it: ``save(step, background=...)``. Each call: (seconds in ``save``, until durable, of this
    thread's CPU in ``save``: other programs add to the first and hardly to the last, which in turn leaves out waiting)."""

    def __init__(self, manager: distckpt.CheckpointManager, save: Callable[..., Any]) -> None:
        self.manager, self._save = manager, save
        self._step = 0

    def begin(self, **how: Any) -> tuple[float, Any]:
        self._step += 1
        begun = time.perf_counter()
        handle = self._save(self._step, **how)
        return time.perf_counter() - begun, handle

    def fence(self) -> None:
        self.manager.staged()

    def end(self) -> None:
        """Durable on every rank, and what rotated away is deleted: the next variant finds the disk at rest."""
        self.manager.wait()
        dist.barrier()
        if self.manager._owned is not None:
            self.manager._owned.janitor.wait(60)

    def background(self, turn: int) -> Times:
        begun, cpu = time.perf_counter(), time.thread_time()
        stall, handle = self.begin(background=True)
        cpu = time.thread_time() - cpu
        handle.result() if handle is not None else self.manager.wait()  # a Trainer's save returns nothing
        durable = time.perf_counter() - begun
        self.end()
        return stall, durable, cpu

    def overlap(self, between: Callable[[], Any], turn: int) -> Times:
        """The seconds in ``save`` and those until the copy is done that is left after ``between``."""
        begun, cpu = time.perf_counter(), time.thread_time()
        called, handle = self.begin(background=True, staging="overlap")
        cpu = time.thread_time() - cpu
        between()
        fenced, cpu = time.perf_counter(), cpu - time.thread_time()
        self.manager.staged()
        fence, cpu = time.perf_counter() - fenced, cpu + time.thread_time()
        handle.result()
        durable = time.perf_counter() - begun
        self.end()
        return called + fence, durable, cpu

    def synchronous(self, turn: int) -> Times:
        cpu = time.thread_time()
        took, _ = self.begin()
        cpu = time.thread_time() - cpu
        self.end()
        return took, took, cpu


class Ours(Saver):
    """A manager and what it saves, one checkpoint kept."""

    def __init__(self, stack: ExitStack, root: str, state: Any, **options: Any) -> None:
        self.state = state
        manager = stack.enter_context(distckpt.CheckpointManager(root, keep_last=1, **options))
        super().__init__(manager, lambda step, **how: manager.save(step, state, **how))


class Dcp:
    """``torch.distributed.checkpoint`` on the same memory, as tensors that the ranks share out (as FSDP does).

    ``keep_stager``: its staging memory is kept, as its documentation recommends; ``overlap``: a thread copies, until ``fence``.
    """

    def __init__(self, rank: int, folder: str, tensors: dict[str, torch.Tensor], kind: AsyncCheckpointerType | None = None,
                 keep_stager: bool = False, overlap: bool = False) -> None:
        self._state = sharded(tensors)
        self._rank, self._folder, self._kind, self._turn = rank, folder, kind, 0
        self._made: list[str] = []
        self._group = dist.new_group(backend="gloo")  # its thread's collectives must not meet the training's
        shared = kind is AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(StagingOptions(False, shared, overlap, False)) if keep_stager or overlap else None
        self._pending: Any = None
        if shared:
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # or it may have no child

    def begin(self) -> tuple[float, Any]:
        """(seconds in the call, its future)"""
        self._turn += 1
        path = f"{self._folder}/{self._turn}"
        self._made.append(path)
        begun = time.perf_counter()
        if self._kind is None:
            dcp.save(self._state, checkpoint_id=path, process_group=self._group)
        else:
            self._pending = dcp.async_save(self._state, checkpoint_id=path, process_group=self._group, async_stager=self._stager,
                                           async_checkpointer_type=self._kind)
        return time.perf_counter() - begun, getattr(self._pending, "upload_completion", self._pending)

    def fence(self) -> None:
        if hasattr(self._pending, "staging_completion"):
            self._pending.staging_completion.result()

    def wait(self) -> None:
        future = getattr(self._pending, "upload_completion", self._pending)
        if future is not None:
            future.result()

    def end(self) -> None:
        self.wait()
        dist.barrier()
        while self._made:
            made = self._made.pop()
            if self._rank == 0:
                shutil.rmtree(made)
        dist.barrier()

    def __call__(self, turn: int) -> Times:
        begun, cpu = time.perf_counter(), time.thread_time()
        stall, _ = self.begin()
        cpu = time.thread_time() - cpu
        self.wait()
        durable = time.perf_counter() - begun
        self.end()
        return stall, durable, cpu


def end_children() -> None:
    """DCP's checkpoint process would outlive a rank that leaves without the interpreter's shutdown."""
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()


class Trainer:
    """Steps of many small operations, in lockstep over the ranks: they need both the core and the interpreter's lock."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(*(m for _ in range(24) for m in (torch.nn.Linear(256, 256), torch.nn.LayerNorm(256),
                                                                            torch.nn.GELU())))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(32, 256)
        self.fence: Callable[[], None] | None = None

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        if self.fence is not None:
            self.fence()
        self._optimizer.step()

    def until(self, done: Callable[[], bool]) -> tuple[int, float]:
        """(steps, seconds) until ``done`` on every rank, as all of them see it after the same step."""
        begun, steps = time.perf_counter(), 0
        while True:
            self.step()
            steps += 1
            ended = torch.tensor([float(done())])
            dist.all_reduce(ended)
            if int(ended) == WORLD:
                return steps, time.perf_counter() - begun

    def run(self, seconds: float) -> float:
        """Seconds per step, over about ``seconds``."""
        end = time.perf_counter() + seconds
        steps, took = self.until(lambda: time.perf_counter() >= end)
        return took / steps
