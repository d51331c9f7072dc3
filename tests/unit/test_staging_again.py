"""The second save and those after it: what the first one left is used again where the state is as it was, and only there."""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt.payloads.base import as_payload
from distckpt.payloads.live import live_of
from distckpt.runtime import SYSTEM
from distckpt.saving import staging
from distckpt.saving.arena import Arena
from distckpt.saving.staging import Copy, Device
from tests.unit.test_staging import SlowDevice, model_and_optimizer

Model = tuple[torch.nn.Module, torch.optim.Optimizer]


def staged(tree: Any, arena: Arena) -> Any:
    """A copy to its end, and proof that it is one: equal, and in memory of its own."""
    pointers = {staging.pointer(t) for t in staging.tensors_of(tree)} - {0}
    work = Copy(SYSTEM, Device(), check=False)
    found = work.begin(tree, arena, pointers)
    work.finish()
    same(found, tree)
    assert not {staging.pointer(t) for t in staging.tensors_of(found) if t.numel()} & pointers
    return found


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other) or isinstance(one, torch.Tensor), (one, other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other.detach()), (one, other)
        assert not one.requires_grad and not vars(one)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            same(mine, its)
    else:
        assert one == other


def tree_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return as_payload({"model": distckpt.Shards(model), "optimizer": distckpt.Shards(optimizer)}).tree()  # type: ignore[attr-defined]


def values_move(pair: Model) -> Model:
    with torch.no_grad():
        for parameter in pair[0].parameters():
            parameter.add_(1)
    return pair


def optimizer_state_is_replaced(pair: Model) -> Model:
    state = copy.deepcopy(pair[1].state_dict())
    for slots in state["state"].values():
        slots["exp_avg"].fill_(7.0)
    pair[1].load_state_dict(state)
    return pair


def a_parameter_is_assigned(pair: Model) -> Model:
    pair[0][0].weight = torch.nn.Parameter(torch.full((128, 64), 3.0))  # type: ignore[index, union-attr]
    return pair


def its_memory_is_swapped(pair: Model) -> Model:
    pair[0][0].weight.data = torch.full((128, 64), 5.0)  # type: ignore[index, union-attr]
    return pair


def its_storage_is_resized(pair: Model) -> Model:
    bias = pair[0][2].bias.data  # type: ignore[index, union-attr]
    bias.untyped_storage().resize_(1 << 16)
    bias.fill_(9.0)
    return pair


def its_shape_changes(pair: Model) -> Model:
    pair[0][0].weight.data = torch.full((64, 128), 2.0)  # type: ignore[index, union-attr]
    return pair


def its_dtype_changes(pair: Model) -> Model:
    pair[0][0].weight.data = torch.full((128, 64), 1.5, dtype=torch.bfloat16)  # type: ignore[index, union-attr]
    return pair


def it_is_transposed(pair: Model) -> Model:
    pair[0][0].weight.data = torch.randn(64, 128).t()  # type: ignore[index, union-attr]
    return pair


def a_layer_comes_first(pair: Model) -> Model:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), *pair[0]), pair[1]  # type: ignore[misc]


def a_layer_goes(pair: Model) -> Model:
    return torch.nn.Sequential(*list(pair[0])[1:]), pair[1]  # type: ignore[call-overload]


def names_are_tied(pair: Model) -> Model:
    pair[0][1].weight = pair[0][1].bias  # type: ignore[index, union-attr]
    return pair


def another_model_has_its_names(pair: Model) -> Model:
    other = model_and_optimizer(steps=3)
    return values_move(other)


def a_tensor_is_empty(pair: Model) -> Model:
    pair[0][1].bias = torch.nn.Parameter(torch.empty(0, 4))  # type: ignore[index, union-attr]
    return pair


@pytest.mark.parametrize("change", [values_move, optimizer_state_is_replaced, a_parameter_is_assigned, its_memory_is_swapped,
                                    its_storage_is_resized, its_shape_changes, its_dtype_changes, it_is_transposed,
                                    a_layer_comes_first, a_layer_goes, names_are_tied, another_model_has_its_names,
                                    a_tensor_is_empty], ids=lambda change: change.__name__)
def test_what_changed_between_two_saves_is_in_the_second(change: Callable[[Model], Model]) -> None:
    arena, pair = Arena(), model_and_optimizer(steps=1)
    staged(tree_of(*pair), arena)
    staged(tree_of(*pair), arena)
    pair = change(pair)
    for _ in range(2):
        staged(tree_of(*pair), arena)
    staged(tree_of(*values_move(model_and_optimizer(steps=2))), arena)


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_states_has_two_tensors_in_one_place(seed: int) -> None:
    """What is known of the save before is worth nothing behind the first tensor that is another one."""
    dice, arena = random.Random(seed), Arena()
    arena.reserve(1 << 16)

    def tensor() -> torch.Tensor:
        dtype = dice.choice([torch.float32, torch.int8, torch.float64])
        return (torch.rand(dice.choice([(4,), (2, 2), (16, 4), (64,), (0,), ()])) * 100).to(dtype)

    state = {str(i): tensor() for i in range(8)}
    for _ in range(30):
        name = str(dice.randrange(12))
        if dice.random() < 0.3:
            state.pop(name, None)
        elif dice.random() < 0.3:
            state = {"front": tensor(), **{k: v for k, v in state.items() if k != "front"}}
        else:
            state[name] = state[dice.choice(list(state))] if state and dice.random() < 0.3 else tensor()
        found = staged(state, arena)
        places = sorted({(t.data_ptr(), t.data_ptr() + t.nbytes) for t in found.values() if t.numel()})
        assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False)), "two share memory"


def test_what_was_given_out_is_never_given_out_again() -> None:
    """A payload may mark its copy (``requires_grad``, an attribute): the next save's must not carry that."""
    arena, tree = Arena(), {"a": torch.ones(4), "b": torch.zeros(0)}
    known: list[torch.Tensor] = []
    for turn in range(6):
        work = Copy(SYSTEM, Device(), check=False)
        found = work.begin(tree, arena, set())
        if turn % 3:
            work.finish()  # in its course the next save's are made
        for tensor in found.values():
            assert all(tensor is not one for one in known) and not tensor.requires_grad and not vars(tensor)
            tensor.requires_grad_().mark = turn
            known.append(tensor)


def test_memory_that_is_swapped_while_it_is_copied_is_saved_as_it_was_at_the_call(tmp_path: Path) -> None:
    """As sharding and offloading do to parameters in the forward pass: the tensor goes on with other memory."""
    model, optimizer = model_and_optimizer(steps=1)
    device = SlowDevice()
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager._behind.device = device
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        moments = [slots["exp_avg"].clone() for slots in optimizer.state.values()]
        made = manager.save(1, {"m": distckpt.Shards(model), "o": distckpt.Shards(optimizer)}, background=True, staging="overlap")
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, -1.0)
        for slots in optimizer.state.values():
            slots["exp_avg"].data = torch.full_like(slots["exp_avg"], -1.0)
        device.go.set()
        back = torch.load(made.result(10).below("m").mine("shard.pt"), weights_only=True)
        state = torch.load(made.result(10).below("o").mine("shard.pt"), weights_only=True)["state"]
    assert all(torch.equal(back[name], want[name]) for name in want)
    assert all(torch.equal(slots["exp_avg"], moment) for slots, moment in zip(state.values(), moments, strict=True))


@pytest.mark.parametrize("count", [3, 20_000], ids=["small", "large"])
def test_a_conjugate_beside_what_it_is_a_view_of_keeps_its_own_values(count: int) -> None:
    """torch makes ``z.conj()`` without touching a byte: same memory, shape, strides and dtype, other values."""
    z = torch.randn(count, dtype=torch.complex64)
    x = torch.randn(count)
    tree = {"z": z, "conj": z.conj(), "imag": z.conj().imag, "x": x, "neg": torch._neg_view(x), "again": z}
    found = staging.copy(tree, Arena(), SYSTEM)
    want = {name: value.resolve_conj().resolve_neg().clone() for name, value in tree.items()}
    z.zero_()
    x.zero_()
    assert all(torch.equal(found[name], want[name]) for name in tree)
    assert found["again"] is found["z"]


def test_the_live_tensors_of_a_module_are_those_that_its_own_methods_name() -> None:
    shared = torch.nn.Linear(4, 4)

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = shared
            self.gone = None
            self.norm = torch.nn.BatchNorm1d(4)
            self.bare = torch.nn.Linear(4, 4, bias=False)
            self.tied = torch.nn.Linear(4, 4)
            self.tied.weight = shared.weight
            self.register_buffer("passing", torch.ones(3), persistent=False)
            self.register_buffer("none", None)
            self.register_parameter("nothing", None)
            self.register_module("nobody", None)

    model = torch.nn.ModuleDict({"odd": Odd(), "list": torch.nn.ModuleList([shared, torch.nn.PReLU()])})
    live = live_of(distckpt.Shards(model))
    assert live is not None
    assert {id(p) for p in live.steady} == {id(p) for p in model.parameters()}
    assert {id(b) for b in live.moving} == {id(b) for name, b in model.named_buffers() if not name.endswith("passing")}


def calls(layers: int, plain: bool) -> int:
    """Calls of functions, Python's and C's, that one save with an unchanged state makes on the training thread."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    with tempfile.TemporaryDirectory() as folder, distckpt.CheckpointManager(Path(folder) / "root") as manager:
        state: Any = {"model": distckpt.Shards(model), "optimizer": distckpt.Shards(optimizer)}
        if plain:
            state = {f"{i}-{j}": torch.ones(2) for i in range(layers) for j in range(8)}
        for step in range(2):
            manager.save(step, state, background=True, staging="overlap")
            manager.wait()
        sys.setprofile(count)
        try:
            manager.save(2, state, background=True, staging="overlap")
        finally:
            sys.setprofile(None)
    return made


@pytest.mark.parametrize("plain", [False, True], ids=["model and optimizer", "a dict"])
def test_what_a_call_does_for_each_tensor_is_little(plain: bool) -> None:
    """Its time is no test's to tell on a busy machine; what it calls for each is. (8 tensors in a layer; torch's own
    ``state_dict`` makes 2.8 of them.)"""
    assert (calls(60, plain) - calls(20, plain)) / 40 / 8 <= 21
