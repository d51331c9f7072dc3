"""Each framework's own save beside the same state saved through us, by the calls that its user would write.

Every scenario runs two real ranks with gloo and trains one step, so that the optimizer has its state. "Own save + fsync" is
that framework's save and then an fsync of every file and directory of it, shared out over the ranks.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distckpt
from scripts.benchmarks.report import DISK, LATENCY, Row
from scripts.benchmarks.rounds import Found, ranks, rotate, row, scenarios, sync_tree
from scripts.benchmarks.subjects import WORLD, Saver, Times
from tests.frameworks.stage import ENVIRONMENT, EXTENSIONS

_FULL, _QUICK = 512, 48  # MB
_WIDTH, _INPUTS = 1024, 8
_STALL = {"deepspeed": 0.2}

Own = Callable[[str], Any]
"""The framework's save into a directory; what it returns is called, if it can be, to wait for an asynchronous one."""


def run(place: Path, quick: bool, only: str, size: int | None = None) -> Iterator[Row]:
    """``size``: MB of all ranks together."""
    yield from scenarios(place, quick, only, {name: partial(_scenario, name, size) for name in _SCENARIOS})


def _scenario(name: str, size: int | None, place: Path, quick: bool) -> Iterator[Row]:
    if gone := absent(name):
        yield gone
        return
    megabytes = size or (_QUICK if quick else _FULL)
    found = measure(name, place, megabytes, 3 if quick else _least(name))
    yield from _rows(name, f"{megabytes} MB", found, _STALL.get(name))


def _least(name: str) -> int:
    """Where a stall has a target, a latency is measured beside the disk."""
    return LATENCY if name in _STALL else DISK


def absent(name: str) -> Row | None:
    """A row that says so, where the framework of this scenario is not installed."""
    package = name.partition("-")[0]
    if package in ("ddp", "fsdp2") or importlib.util.find_spec(package) is not None:
        return None
    return Row(f"beside {name}", [], [], note=f"did not install: {sys.executable} has no module {package}")


def measure(name: str, folder: Path, megabytes: int, turns: int, world: int = WORLD) -> Found:
    """A framework's rounds: "sync" and "background" are ours, the others its own calls, each (seconds in the call, until
    durable, CPU seconds in the call)."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", EXTENSIONS)
    env = {**ENVIRONMENT, "LOCAL_WORLD_SIZE": str(world), "TORCH_EXTENSIONS_DIR": extensions}
    return ranks(_rank, name, str(folder), megabytes * 1_000_000, turns, env=env, world=world)


def _rows(name: str, size: str, found: Found, stall: float | None) -> Iterator[Row]:
    own, *behind = (variant for variant in found if variant not in ("sync", "background", "overlap"))
    yield row(f"{name}: durable save / {own} + fsync", found, "sync", own, 1, 1.0, size, case=1)
    for theirs in (own, *behind):
        yield row(f"{name}: save returns / {theirs}", found, "background", theirs, 0, stall if theirs == own else None, size,
                  least=_least(name))
        yield row("the same in CPU time of the training thread", found, "background", theirs, 2)
    if "overlap" in found:
        yield row(f"{name}: overlap, call + fence / {own}", found, "overlap", own, 0, stall,
                  f"{size}; forward and backward stand between call and fence", least=_least(name))
        yield row("the same in CPU time of the training thread", found, "overlap", own, 2)


def _rank(rank: int, world: int, which: str, place: str, size: int, turns: int) -> Found:
    with ExitStack() as stack:
        return _SCENARIOS[which](_Job(rank, place, size, turns, stack))


@dataclass
class _Job:
    rank: int
    place: str
    size: int
    turns: int
    stack: ExitStack

    def manager(self) -> distckpt.CheckpointManager:
        return self.stack.enter_context(distckpt.CheckpointManager(f"{self.place}/ours", keep_last=1))

    def net(self, copies: int = 3) -> torch.nn.Sequential:
        """``copies``: how often a checkpoint holds each parameter, its optimizer state included; all in float32."""
        layers = max(round(self.size / (4 * copies * _WIDTH * _WIDTH)), 1)
        torch.manual_seed(7)
        return torch.nn.Sequential(torch.nn.Linear(_INPUTS, _WIDTH), *(m for _ in range(layers) for m in (
            torch.nn.ReLU(), torch.nn.Linear(_WIDTH, _WIDTH))))

    def measure(self, saver: Saver, own: dict[str, Own], between: Callable[[], Any] | None = None) -> Found:
        """``between``: what training does from a save to the step after it, where ``saver`` can copy beside that."""
        overlap = {} if between is None else {"overlap": partial(saver.overlap, between)}
        variants: dict[str, Callable[[int], Times]] = {
            "sync": saver.synchronous, "background": saver.background, **overlap,
            **{name: partial(self._own, f"{self.place}/{index}", call) for index, (name, call) in enumerate(own.items())}}
        return rotate({name: partial(self._at_rest, once) for name, once in variants.items()}, self.turns)

    def _at_rest(self, once: Callable[[int], Times], turn: int) -> Times:
        if self.rank == 0:
            os.sync()  # nothing of the variant before, or of other programs, waits in the page cache
        dist.barrier()
        return once(turn)

    def _own(self, folder: str, call: Own, turn: int) -> Times:
        """(seconds in the call, until all of it is durable, of this thread's CPU in the call)"""
        path = f"{folder}/{turn}"
        begun, cpu = time.perf_counter(), time.thread_time()
        pending = call(path)
        stall, cpu = time.perf_counter() - begun, time.thread_time() - cpu
        if callable(pending):
            pending()
        sync_tree(path)
        durable = time.perf_counter() - begun
        if self.rank == 0:
            shutil.rmtree(path)
        dist.barrier()
        return stall, durable, cpu


# -- one function for each framework -----------------------------------------------------------------------------------


def _dcp(job: _Job, sharded: bool) -> Found:
    """DDP and FSDP2 in a loop of the user's own, which is what DCP is for."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import async_save, save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = job.net()
    if sharded:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, _INPUTS)).square().mean().backward()
    optimizer.step()
    manager, state = job.manager(), distckpt.TrainState(model=model, optimizer=optimizer)
    group = dist.new_group(backend="gloo")  # the collectives of its thread must not meet the training's

    def theirs() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def behind(stager: DefaultStager | None, path: str) -> Any:
        future: Any = async_save(theirs(), checkpoint_id=path, process_group=group, async_stager=stager)
        return future.result

    return job.measure(Saver(manager, lambda step, **how: manager.save(step, state, **how)), {
        "dcp.save": lambda path: save(theirs(), checkpoint_id=path),
        "dcp.async_save": partial(behind, None),
        "dcp.async_save, kept stager": partial(behind, DefaultStager(StagingOptions(False, False, False, False)))})


def _deepspeed(job: _Job, zero: int = 2) -> Found:
    """Its files hold the weights, their float32 partition and two moments."""
    from distckpt.payloads.deepspeed import DeepSpeed
    from tests.frameworks.dsranks import engine

    made = engine(zero, job.net(copies=4))

    def forward_and_backward() -> None:
        made.backward(made(torch.randn(4, _INPUTS)).square().mean())

    for _ in range(made.gradient_accumulation_steps()):
        forward_and_backward()
        made.step()
    manager, state = job.manager(), DeepSpeed(made)

    def save(step: int, **how: Any) -> Any:
        made.global_steps = step  # as a step would, and DeepSpeed's are the checkpoint's
        return manager.save(step, state, **how)

    own: dict[str, Own] = {"save_checkpoint": lambda path: made.save_checkpoint(path, tag="own")}
    if zero == 3:  # with ZeRO-1 and 2 it cannot be given the optimizer's state
        own["its decoupled writer"] = _decoupled(job, made)
    return job.measure(Saver(manager, save), own, forward_and_backward)


def _decoupled(job: _Job, made: Any) -> Own:
    """DeepSpeed's asynchronous save, by the one of its writers that a CPU runs. The wait is what its next step begins with."""
    from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_writer_config
    from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import DataParallelWriterConfig

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it has a process of its own
    plain, settings = made.checkpoint_engine, made._config
    settings.checkpoint_config["writer"] = get_checkpoint_writer_config({"writer": {"type": "python", "decoupled": True}})
    writer = DecoupledCheckpointEngine(settings, DataParallelWriterConfig(1, 0, job.rank, job.rank, True), False)
    job.stack.callback(writer.cleanup)

    def save(path: str) -> Any:
        made.checkpoint_engine = writer
        made.save_checkpoint(path, tag="own")
        return wait

    def wait() -> None:
        made._commit_decoupled_checkpoint()
        made.checkpoint_engine = plain

    return save


def _accelerate(job: _Job) -> Found:
    from accelerate import Accelerator

    from distckpt.integrations.accelerate import Checkpointing

    accelerator = Accelerator(cpu=True)
    net = job.net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(model(torch.randn(4, _INPUTS)).square().mean())
    optimizer.step()
    manager = job.manager()
    return job.measure(Saver(manager, Checkpointing(accelerator, manager).save),
                       {"save_state": accelerator.save_state})


def _transformers(job: _Job) -> Found:
    """What Trainer calls when ``save_steps`` says so, inside ``train``."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from distckpt.integrations.transformers import CrashSafe

    class MyTrainer(CrashSafe, Trainer):  # type: ignore[misc]
        pass

    found: Found = {}

    class Measure(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **ignored: Any) -> None:
            assert trainer.manager is not None
            found.update(job.measure(Saver(trainer.manager, save), {"Trainer's save": own}))

    def save(step: int, background: bool = False) -> None:
        trainer.state.global_step, trainer.background_saves = step, background
        trainer._save_checkpoint(trainer.model_wrapped, None)

    def own(path: str) -> None:
        ours, trainer.args.output_dir = trainer.args.output_dir, path
        try:
            Trainer._save_checkpoint(trainer, trainer.model_wrapped, None)
        finally:
            trainer.args.output_dir = ours

    width = 512
    layers = max(round(job.size / (4 * 3 * 12 * width * width)), 1)
    torch.manual_seed(7)
    rows = torch.randint(0, 32, (8, 8))
    trainer = MyTrainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=width, n_layer=layers, n_head=8)),
        args=TrainingArguments(output_dir=f"{job.place}/ours", max_steps=1, save_strategy="no", save_total_limit=1, use_cpu=True,
                               per_device_train_batch_size=1, report_to=[], disable_tqdm=True, ddp_backend="gloo",
                               dataloader_pin_memory=False),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in rows], callbacks=[Measure()])
    trainer.train()
    return found


def _lightning(job: _Job, kind: str) -> Found:
    """Inside ``fit``, at the end of a batch, where ours saves and ModelCheckpoint does."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    from distckpt.payloads.lightning import Lightning
    from distckpt.payloads.rng import Rng
    from tests.frameworks.lightning_nets import Loader, Net, Sharded, strategy_of

    def own(path: str) -> None:
        trainer.save_checkpoint(f"{path}/own.ckpt")

    def behind(path: str) -> Any:
        plugin = AsyncCheckpointIO(TorchCheckpointIO())
        before, trainer.strategy.checkpoint_io = trainer.strategy.checkpoint_io, plugin
        try:
            own(path)
        finally:
            trainer.strategy.checkpoint_io = before
        return plugin.teardown

    found: Found = {}

    def measure(*args: Any) -> None:
        manager = job.manager()
        saver = Saver(manager, lambda step, **how: manager.save(step, Lightning(trainer, {"rng": Rng()}), **how))
        asynchronous = {} if kind == "fsdp2" else {"AsyncCheckpointIO": behind}  # a sharded strategy asks no CheckpointIO
        found.update(job.measure(saver, {"save_checkpoint": own, **asynchronous}))

    net = Sharded() if kind == "fsdp2" else Net()
    net.net = job.net()
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", devices=WORLD, strategy=strategy_of(kind, WORLD), logger=False,
                         plugins=[LightningEnvironment()], enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False, callbacks=[pl.callbacks.LambdaCallback(on_train_batch_end=measure)])
    trainer.fit(net, Loader(job.rank))
    return found


_SCENARIOS: dict[str, Callable[[_Job], Found]] = {
    "ddp": partial(_dcp, sharded=False), "fsdp2": partial(_dcp, sharded=True), "deepspeed": _deepspeed,
    "deepspeed-zero3": partial(_deepspeed, zero=3), "accelerate": _accelerate,
    "transformers": _transformers, "lightning-ddp": partial(_lightning, kind="ddp"),
    "lightning-fsdp2": partial(_lightning, kind="fsdp2")}
