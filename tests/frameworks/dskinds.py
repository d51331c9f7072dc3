"""One rank's part of the DeepSpeed tests: engines of other kinds, saved and gone on from."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import distckpt
from distckpt.errors import SaveError
from distckpt.payloads.deepspeed import DeepSpeed
from distckpt.payloads.live import live_of
from distckpt.saving.arena import size_of
from distckpt.saving.staging import Device, pointer, tensors_of
from tests.frameworks import dsranks
from tests.frameworks.dscases import same_files
from tests.frameworks.dsranks import engine, final, step

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16, ZeRO 0": (0, {"bf16": {"enabled": True}}),
    "bf16, ZeRO 1": (1, {"bf16": {"enabled": True}}),
    "bf16, ZeRO 3": (3, {"bf16": {"enabled": True}}),
    "optimizer in host memory": (2, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                                     "zero_force_ds_cpu_optimizer": False}),
    "no parameter stays gathered": (3, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
    "torch's old format": (2, {"checkpoint": {"checkpoint_serialization": False}}),
}


def variants(rank: int, world: int, root: str) -> list[str]:
    """Which of them came back as saved, sync and in the background, and went on as the saved one did."""
    good = []
    for name, (zero, more) in VARIANTS.items():
        kind = torch.bfloat16 if "bf16" in more else torch.float32
        made, at = engine(zero, **more), os.path.join(root, name)
        with distckpt.CheckpointManager(at) as manager:
            step(made, kind)
            manager.save(1, DeepSpeed(made))
            step(made, kind)
            manager.save(2, DeepSpeed(made), background=True)
            manager.wait()
            random, two = torch.get_rng_state(), final(made)
            step(made, kind)
            for saved in (2, 1):
                other = engine(zero, **more)
                manager.restore(DeepSpeed(other), step=saved)
                if saved == 2:
                    assert final(other) == two, name
                    torch.set_rng_state(random)
                    step(other, kind)
                    assert final(other) == final(made), name
        one, two_ = ({p.name for p in Path(at, f"step-{s}").iterdir()} for s in (1, 2))
        assert one == two_, name
        good.append(name)
    return good


def doubled(rank: int, world: int, root: str) -> list[str]:
    """DeepSpeed's own writers (``"checkpoint": {"writer": ...}``): under 0.19.8 every rank writes the weights, into one file."""
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0")  # what its launcher says of nodes
    made = engine(2, checkpoint={"writer": {"type": "PYTHON", "data_parallel": "replica"}})
    step(made)
    texts = []
    with distckpt.CheckpointManager(root) as manager:
        for background in (False, True):
            try:
                manager.save(1, DeepSpeed(made), background=background)
                manager.wait()
            except SaveError as error:
                texts.append(str(error))
        assert manager.all_steps() == []
    return texts


OVERLAPPING: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"{kind}, ZeRO {zero}": (zero, more) for zero in range(4) for kind, more in (
        ("fp32", {}), ("bf16", {"bf16": {"enabled": True}}))},
    "optimizer in host memory": VARIANTS["optimizer in host memory"],
    "gradients clipped": (2, {"gradient_clipping": 0.01}),
    "running statistics": (2, {"model": torch.nn.Sequential(torch.nn.Linear(dsranks.WIDTH, 32), torch.nn.BatchNorm1d(32))}),
    "bf16 with gradients in fp32": (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
}


class _Late(Device):
    """Copies off the training thread begin when that thread waits for them, or has gone past where it should have."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.copying = threading.Event(), None

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            until = time.monotonic() + 30
            while not self.go.wait(0.005) and (self.copying is None or self.copying._since is None):
                assert time.monotonic() < until, "the training thread neither came to the fence nor past it"
        target.copy_(source)


def overlaps(rank: int, world: int, root: str) -> dict[str, tuple[int, int, bool]]:
    """By kind of engine: (bytes still to be copied when a save with staging="overlap" returned, bytes of the state without its
    buffers, whether its files are those of a sync save before it though a step followed at once)."""
    told = {}
    for name, (zero, more) in OVERLAPPING.items():
        kind, at = torch.bfloat16 if "bf16" in more else torch.float32, os.path.join(root, name)
        made = engine(zero, **more)
        state = DeepSpeed(made)
        with distckpt.CheckpointManager(at) as manager:
            step(made, kind)
            manager.series("sync").save(1, state)
            device = _Late()
            manager._behind.device = device
            before, buffers = final(made), {pointer(b) for b in made.module.buffers()}
            size = size_of(t for t in tensors_of(state.tree()) if pointer(t) not in buffers)
            manager.series("behind").save(1, state, background=True, staging="overlap")
            copying = device.copying = manager._behind._copying
            late = 0 if copying is None else size_of(source for _, _, source in copying._later)
            step(made, kind)
            device.go.set()
            manager.wait()
            assert final(made) != before or not size, name
        told[name] = late, size, all(same for _, same in same_files(*(Path(at, f"step-1-{s}") for s in ("sync", "behind"))))
    for owner, other in ((made, "DeepSpeedHybridEngine"), (made.optimizer, "ZenFlowZeroOptimizer"),
                         (made.basic_optimizer, "MuonWithAuxAdam")):  # they change their state outside of a step too
        kind_of = type(owner)
        owner.__class__ = type(other, (kind_of,), {})
        assert live_of(state).pointers == set(), other
        owner.__class__ = kind_of
    return told


def meddles(rank: int, world: int, root: str, zero: int) -> tuple[str, bool]:
    """What is said when a weight changes in forward while it is staged; and whether the next save works."""
    made = engine(zero)
    made.module[0].register_forward_pre_hook(lambda layer, given: (layer.bias.data.add_(1.0), given)[1])
    with distckpt.CheckpointManager(root, check_staging=True) as manager:
        device = manager._behind.device = _Late()
        step(made)
        try:
            manager.save(1, DeepSpeed(made), background=True, staging="overlap")
            device.copying = manager._behind._copying
            step(made)
            manager.wait()
            said = ""
        except SaveError as error:
            said = str(error)
        manager.save(2, DeepSpeed(made), background=True, staging="overlap")
        manager.wait()
        return said, manager.latest_step() == 2


def several(rank: int, world: int, root: str) -> list[str]:
    """Two engines, as reinforcement learning has them, as they are, in directories of their own; with a part of ours."""
    actor, critic, progress = engine(2), engine(1), {"epoch": 4}

    def state() -> dict[str, Any]:
        return {"actor": actor, "critic": critic, "rest": distckpt.TrainState(progress=progress, rng=True)}

    with distckpt.CheckpointManager(root) as manager:
        for background in (False, True):
            step(actor)
            step(critic)
            manager.save(actor.global_steps, state(), background=background)
        manager.wait()
        wanted = [final(actor), final(critic)]
        actor, critic, progress = engine(2), engine(1), {"epoch": 0}
        assert manager.restore(state()) == 2
    assert [final(actor), final(critic)] == wanted and progress == {"epoch": 4}
    return sorted({str(p.parent.relative_to(root)) for p in Path(root, "step-2").rglob("*.pt")})


def pipeline(rank: int, world: int, root: str, micro_batches: int = 2) -> list[str]:
    """PipelineModule, two stages: saved sync and in the background, restored into a new engine, the same next step."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    def make() -> Any:
        torch.manual_seed(7)
        layers = [torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8), torch.nn.Linear(8, 2)]
        module = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        return deepspeed.initialize(model=module, model_parameters=list(module.parameters()),
                                    config=dsranks.config(1))[0]

    def advance(made: Any, count: int) -> None:
        while made.global_steps < count:
            torch.manual_seed(made.global_steps)
            made.train_batch(iter([(torch.randn(2, 8), torch.randn(2, 2)) for _ in range(micro_batches)]))

    return _there_and_back(root, make, advance)


def moe(rank: int, world: int, root: str) -> list[str]:
    """A mixture of experts with ep_size 2: an expert on each rank."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)
            self.moe = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=2, k=1, use_residual=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.moe(self.first(x))[0]

    def make() -> Any:
        torch.manual_seed(7)
        module = Net()
        groups = split_params_into_different_moe_groups_for_optimizer({"params": list(module.parameters()), "name": "all"})
        return deepspeed.initialize(model=module, config=dsranks.config(1, gradient_accumulation_steps=1),
                                    optimizer=torch.optim.AdamW(groups, lr=0.01))[0]

    def advance(made: Any, count: int) -> None:
        while made.global_steps < count:
            torch.manual_seed(made.global_steps * 2 + rank)
            made.backward(made(torch.randn(4, 8)).square().mean())
            made.step()

    return _there_and_back(root, make, advance)


def _there_and_back(root: str, make: Callable[[], Any], advance: Callable[[Any, int], None]) -> list[str]:
    """The names that DeepSpeed gave its files. AssertionError if a restored engine does not go on as the saved one did."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    made = make()
    with distckpt.CheckpointManager(root) as manager:
        advance(made, 1)
        manager.save(1, DeepSpeed(made))
        advance(made, 2)
        manager.save(2, DeepSpeed(made), background=True, staging="overlap")
        advance(made, 3)
        manager.wait()
        wanted = final(made)
        for saved in (1, 2):
            other = make()
            assert manager.restore(DeepSpeed(other), step=saved) == saved
            assert other.global_steps == saved
            advance(other, 3)
            assert final(other) == wanted, f"restored from step {saved}, it went another way"
    one, two = ({p.name: p.stat().st_size for p in Path(root, f"step-{s}").iterdir() if p.suffix == ".pt"} for s in (1, 2))
    assert one.keys() == two.keys() and all(size < two[name] + 2000 for name, size in one.items()), (one, two)
    return sorted(one)
