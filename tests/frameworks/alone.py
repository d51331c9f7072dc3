"""A program that knows no distckpt: two ranks of each framework read, by its own loader, what stands at the paths it is given.

    python -m tests.frameworks.alone OUT accelerate=PATH transformers-fsdp2=PATH deepspeed=ROOT ddp=PATH fsdp2=PATH fsdp1=PATH

Writes ``OUT.<name>.<rank>``: a digest of what each rank has then. The nets and the settings are here as well, for the ranks that
save them.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import torch

WORLD = 2


def net() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def said(*states: Any) -> str:
    """Of all tensors and numbers in these states, to the last bit."""
    found = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                feed(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                feed(item)
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, (int, float, str)):
            found.update(repr(value).encode())

    for state in states:
        feed(state)
    return found.hexdigest()


# -- the frameworks ------------------------------------------------------------------------------------------------------


ZERO2 = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
         "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}}}
FSDP2 = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
TRAINERS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": FSDP2, "deepspeed": {"deepspeed": ZERO2}}
"""TrainingArguments by kind, after ``before(kind)``."""


def before(kind: str) -> None:
    """What a Trainer of that kind, or an engine, needs in this process."""
    if kind == "fsdp2":
        with_accelerator()
    elif kind == "deepspeed":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at its first use


def with_accelerator() -> None:
    """From here on Trainer believes that there is one, without which it passes FSDP over."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    real = PartialState.__init__

    def made_up(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = made_up


def settings_of(kind: str) -> dict[str, Any]:
    """For Accelerator(): "ddp", "fsdp2", "fsdp-full" (rank 0 writes the whole model) or "deepspeed" (ZeRO-2)."""
    from accelerate.state import PartialState
    from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin

    if kind == "deepspeed":
        before(kind)
        PartialState(cpu=True, backend="gloo")  # as TrainingArguments does; with cpu=True Accelerate passes the plugin over
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config={
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False})}
    if kind.startswith("fsdp"):
        # Accelerate passes the plugin over without an accelerator, so it is told of one; the tensors stay where they are.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False,
            state_dict_type="FULL_STATE_DICT" if kind == "fsdp-full" else "SHARDED_STATE_DICT")}
    return {"cpu": True}


def accelerated(kind: str) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(**settings_of(kind))
    module = net()
    return accelerator, *accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01))


def of_accelerated(model: Any, optimizer: Any) -> str:
    if hasattr(model, "save_checkpoint"):
        return said(of_engine(model), torch.get_rng_state())
    return said(model.state_dict(), optimizer.state_dict(), torch.get_rng_state())


def accelerate(path: str, kind: str) -> str:
    accelerator, model, optimizer = accelerated(kind)
    accelerator.load_state(path)
    return of_accelerated(model, optimizer)


def tiny() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.2))


def rows() -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(5)
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (40, 8), generator=made)]


def arguments(root: str, **options: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(**{"output_dir": root, "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2,
                                "use_cpu": True, "report_to": [], "disable_tqdm": True, "learning_rate": 0.01,
                                "ddp_backend": "gloo", "dataloader_pin_memory": False, **options})


def of_trainer(trainer: Any) -> str:
    return said(trainer.model.state_dict(), torch.get_rng_state())


def transformers(path: str, kind: str) -> str:
    """Goes on from step 4 to the end."""
    from transformers import Trainer

    before(kind)
    args = arguments(path + "-none", save_strategy="no", **TRAINERS[kind])
    trainer = Trainer(model=tiny(), args=args, train_dataset=rows())
    trainer.train(resume_from_checkpoint=path)
    return of_trainer(trainer)


def engine() -> Any:
    import deepspeed

    before("deepspeed")
    deepspeed.init_distributed("gloo")
    module = net()
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config={
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}}})[0]


def of_engine(made: Any) -> str:
    """The weights, and this rank's part of the optimizer."""
    return said(made.module.state_dict(), made.optimizer.state_dict()["base_optimizer_state"], made.global_steps)


def deepspeed(root: str) -> str:
    """By what ``latest`` names."""
    made = engine()
    path, _ = made.load_checkpoint(root)
    assert path is not None
    return of_engine(made)


def spread(kind: str) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: Any = net()
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def of_spread(model: Any, optimizer: Any) -> str:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return said(*get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))


def by_dcp(kind: str, path: str) -> str:
    """Model and optimizer, by ``dcp.load`` as torch's own documentation has it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = spread(kind)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return of_spread(model, optimizer)


# -- the program ---------------------------------------------------------------------------------------------------------


def read(name: str, path: str, rank: int, port: int) -> str:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo")
    framework, _, kind = name.partition("-")
    if framework == "deepspeed":
        return deepspeed(path)
    if framework in ("ddp", "fsdp1", "fsdp2"):
        return by_dcp(framework, path)
    found: str = {"accelerate": accelerate, "transformers": transformers}[framework](path, kind or "ddp")
    return found


def main(out: str, *wanted: str) -> None:
    from importlib import import_module

    from tests.harness import free_port

    for module in ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "deepspeed",
                   "deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo"):
        import_module(module)
    torch.set_num_threads(1)
    for name, _, path in (one.partition("=") for one in wanted):
        port = free_port()
        pids = []
        for rank in range(WORLD):
            pids.append(os.fork())
            if pids[-1] == 0:
                signal.alarm(60)
                code = 1
                try:
                    answer = read(name, path, rank, port)
                    assert "distckpt" not in sys.modules, "distckpt was imported"
                    with open(f"{out}.{name}.{rank}", "w") as file:
                        file.write(answer)
                    code = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    sys.stderr.flush()
                    os._exit(code)
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert ended == [0] * WORLD, f"{name}: {ended}"


if __name__ == "__main__":
    main(*sys.argv[1:])
