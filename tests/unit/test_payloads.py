"""What is saved and how it comes back: shards, per-rank members, random states, and DCP with one rank."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.futures import Future

import distckpt
from distckpt import DCP, Member, Shards, TrainState
from distckpt.durable import REAL
from distckpt.errors import ConfigError, IntegrityError, MemberMissing, ResumeError, SaveError, WorldMismatch
from distckpt.options import Seams
from distckpt.payloads import loadable, train_state
from distckpt.payloads.base import Several, as_payload, check_only
from distckpt.payloads.rng import Rng
from distckpt.testing.faults import FaultyFiles
from tests.inprocess import Job, same_error, staged, tree, values


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def manager(root: Path, no_open_roots: None) -> Any:
    with distckpt.CheckpointManager(str(root)) as made:
        yield made


class Counter:
    """Something with ``state_dict``: a data loader, say."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def trained(seed: int = 0, steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# -- shards ----------------------------------------------------------------------------------------------------------


def test_a_state_dict_comes_back_in_place_and_anybody_can_read_the_file(manager: Any, root: Path) -> None:
    state = {"w": torch.arange(6.0), "nested": {"b": torch.ones(2, dtype=torch.bfloat16), "n": 3}, "list": [1, "x", None]}
    manager.save(1, state)
    target = {"w": torch.zeros(6), "nested": {"b": torch.zeros(2, dtype=torch.bfloat16), "n": 0, "gone": 1}, "new": 1}
    kept = target["w"], target["nested"]
    assert manager.restore(target) == 1
    assert same(target, state) and (target["w"], target["nested"]) is not kept
    assert target["w"] is kept[0] and target["nested"] is kept[1], "tensors and dicts are filled, not replaced"
    assert same(torch.load(root / "step-1" / "state.rank-00000-of-00001.pt", weights_only=True), state)


def test_safetensors_is_read_by_safetensors(manager: Any, root: Path) -> None:
    from safetensors.torch import load_file

    model, _ = trained()
    manager.save(1, Shards(model, name="model", format="safetensors"))
    read = load_file(root / "step-1" / "model.rank-00000-of-00001.safetensors")
    assert same(read, dict(model.state_dict()))
    other, _ = trained(seed=1)
    assert manager.restore(Shards(other, name="model", format="safetensors")) == 1
    assert same(dict(other.state_dict()), read)
    with pytest.raises(ConfigError, match=r"state\['n'\] is int; safetensors stores a flat dict of tensors only"):
        manager.save(2, Shards({"n": 1}, format="safetensors"))


class Odd:
    pass


@pytest.mark.parametrize(("state", "where", "kind"), [
    ({"a": {"b": [1, numpy.float64(2)]}}, "state['a']['b'][1]", "numpy.float64"),
    ({"rng": numpy.random.get_state()}, "state['rng'][1]", "numpy.ndarray"),
    ({"f": print}, "state['f']", "builtin_function_or_method"),
    ({"o": Odd()}, "state['o']", "Odd"),
    ({(1, Odd): 2}, "state, key", "builtins.type"),
    ({"path": Path("/x")}, "state['path']", "PosixPath"),
])
def test_what_weights_only_would_refuse_at_load_is_refused_at_save_by_key(state: Any, where: str, kind: str, manager: Any,
                                                                         root: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        manager.save(1, state)
    text = str(caught.value)
    assert where in text and kind in text and "torch.load(weights_only=True) refuses" in text
    assert tree(root) == {} and staged(root) == []


def test_what_it_accepts_is_accepted_and_comes_back(manager: Any) -> None:
    state = {"t": torch.ones(2), "p": torch.nn.Parameter(torch.ones(1)), "size": torch.Size([1, 2]), "dtype": torch.float16,
             "device": torch.device("cpu"), "c": 1j, "set": {1, 2}, "od": OrderedDict(a=1), "tuple": (1, (2.5, b"x")), 3: True}
    loadable.check(state, "state")
    manager.save(1, state)
    target = dict.fromkeys(state)
    assert manager.restore(target) == 1
    assert same({k: v for k, v in target.items() if k != "p"}, {k: v for k, v in state.items() if k != "p"})


def test_fill_says_which_tensor_has_another_shape() -> None:
    with pytest.raises(ConfigError, match=r"state\['a'\]\[0\]|state\['a'\] has shape \(2,\) here and \(3,\) in the checkpoint"):
        loadable.fill({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, "state")
    assert loadable.fill([1], [2], "x") == [2]


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Shards(3), "a dict or an object with state_dict"), (lambda: Shards({}, format="pickle"), "format must be"),
    (lambda: Shards({}, name="../x"), "'..' component"), (lambda: as_payload(3), "cannot save a int"),
    (lambda: as_payload({"a": Shards({}), "b": {}}), "'b' is dict: wrap it in Shards"),
    (lambda: Several({"a/../b": Shards({})}), "'..' component"), (lambda: TrainState(), "holds nothing"),
    (lambda: TrainState(optimizer=Counter()), "needs model= as well"), (lambda: TrainState(model=3), "takes a torch module"),
    (lambda: TrainState(model=Counter()), "a Counter: it lacks named_parameters();"),
    (lambda: TrainState(model=torch.nn.Linear(1, 1), optimizer=[Counter()]), "not a Counter: it lacks param_groups"),
    (lambda: TrainState(x=iter([])), "'x' is a list_iterator, which lacks state_dict() and load_state_dict()"),
    (lambda: TrainState(step=3), "member 'step' is a int"), (lambda: TrainState(x={}, rng=True), None),
    (lambda: Member({}, on_world_change="guess"), "on_world_change must be"), (lambda: DCP(), "needs a model, or state"),
    (lambda: DCP(None, 3, state={"a": 1}), "needs the model of the optimizer"), (lambda: DCP(3), "takes a torch module"),
    (lambda: DCP(torch.nn.Linear(1, 1), state={"model": 1}), "may not use the name 'model'"),
])
def test_a_payload_that_cannot_be_is_refused_when_it_is_made(make: Callable[[], Any], text: str | None) -> None:
    if text is None:
        make()
        return
    with pytest.raises(ConfigError, match=text.replace("(", r"\(").replace(")", r"\)")):
        make()


# -- several, and a part of them ---------------------------------------------------------------------------------------


def test_several_payloads_make_one_checkpoint_each_in_its_own_directory(manager: Any, root: Path) -> None:
    model, optimizer = trained()
    ema = {"w": torch.full((3,), 7.0)}
    manager.save(1, {"train": TrainState(model=model, optimizer=optimizer, loader=Counter(5)), "ema": Shards(ema),
                     "dcp": DCP(state={"t": torch.ones(2)})})
    assert {p.relative_to(root / "step-1").parts[0] for p in (root / "step-1").rglob("*.*")} >= {"train", "ema", "dcp"}
    other, other_optimizer = trained(seed=1)
    loader, extra = Counter(), {"t": torch.zeros(2)}
    target = {"train": TrainState(model=other, optimizer=other_optimizer, loader=loader), "ema": Shards({"w": torch.zeros(3)}),
              "dcp": DCP(state=extra)}
    assert manager.restore(target) == 1
    assert same(get_state_dict(other, other_optimizer), get_state_dict(model, optimizer))
    assert loader.value == 5 and float(extra["t"][0]) == 1 and float(target["ema"]._state["w"][0]) == 7  # type: ignore[union-attr]


def test_only_loads_the_parts_it_names_and_refuses_other_names(manager: Any) -> None:
    model, optimizer = trained()
    manager.save(1, {"a": TrainState(model=model, optimizer=optimizer, loader=Counter(5), rng=True)})
    manager.save(2, TrainState(model=model, optimizer=optimizer, loader=Counter(6), progress={"n": 1}))
    for only in ({"model"}, {"optimizer"}, {"loader"}, {"model", "progress"}):
        other, other_optimizer = trained(seed=1)
        loader, progress = Counter(), {"n": 0}
        before = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in flat(part).items()}
                  for part in get_state_dict(other, other_optimizer)]
        state = TrainState(model=other, optimizer=other_optimizer, loader=loader, progress=progress)
        assert manager.restore(state, only=only) == 2
        wanted = [flat(v) for v in get_state_dict(model, optimizer)]
        now = [flat(v) for v in get_state_dict(other, other_optimizer)]
        assert same(now[0], wanted[0] if "model" in only else before[0]), only
        assert same(now[1], wanted[1] if "optimizer" in only else before[1]), only
        assert loader.value == (6 if "loader" in only else 0) and progress["n"] == (1 if "progress" in only else 0)
    for only, text in ((["modle"], "'modle' is none; this state has 'model', 'optimizer'"), ("model", "a collection of names")):
        with pytest.raises(ConfigError, match=text):
            manager.restore(TrainState(model=model, optimizer=optimizer), only=only)
    with pytest.raises(ConfigError, match="no parts with names"):
        manager.restore({"w": torch.ones(1)}, only=["w"])
    loader = Counter()
    assert manager.restore({"a": TrainState(model=model, loader=loader)}, step=1, only=["a"], strict=False) == 1
    assert loader.value == 5, "a part that is named is loaded whole"
    check_only(Shards({}), None)


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix: state}
    found: dict[str, Any] = {}
    for key, value in state.items():
        found.update(flat(value, f"{prefix}/{key}"))
    return found


# -- members and their rules -------------------------------------------------------------------------------------------


def test_a_dict_of_json_values_is_updated_in_place(manager: Any) -> None:
    progress = {"tokens": 10, "files": ["a"], "best": {"loss": 0.5}}
    manager.save(1, TrainState(progress=progress))
    kept = progress
    progress.update(tokens=99, more=1)
    assert manager.restore(TrainState(progress=progress)) == 1
    assert progress is kept and progress == {"tokens": 10, "files": ["a"], "best": {"loss": 0.5}}


def test_a_member_that_the_checkpoint_lacks_is_an_error_unless_waived(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager.save(1, TrainState(loader=Counter(5)))
    loader, extra = Counter(), Counter(8)
    with pytest.raises(MemberMissing) as caught:
        manager.restore(TrainState(loader=loader, extra=extra))
    assert caught.value.members == ["extra"] and "it has: loader" in str(caught.value)
    with caplog.at_level("WARNING"):
        assert manager.restore(TrainState(loader=loader, extra=extra), strict=False) == 1
    assert (loader.value, extra.value) == (5, 8) and "has no state for extra" in caplog.text
    manager.save(2, {"w": torch.ones(1)})
    with pytest.raises(MemberMissing):
        manager.restore(TrainState(loader=loader), step=2)
    assert manager.restore(TrainState(loader=loader), step=2, strict=False) == 2


def test_a_part_that_dcp_has_nothing_of_is_an_error_unless_waived(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    manager.save(1, TrainState(model=model, optimizer=optimizer, empty=torch.nn.Identity()))
    (other, _), (average, _) = trained(1), trained(2)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    with pytest.raises(MemberMissing, match="has no state for average") as caught:
        manager.restore(TrainState(model=other, average=average))
    assert caught.value.members == ["average"] and "it has: model, optimizer" in str(caught.value)
    with caplog.at_level("WARNING"):
        assert manager.restore(TrainState(model=other, average=average, empty=torch.nn.Identity()), strict=False) == 1
    assert same(dict(average.state_dict()), before) and same(dict(other.state_dict()), dict(model.state_dict()))
    assert "has no state for average" in caplog.text and "no state for empty" not in caplog.text


def test_without_a_process_group_modules_and_each_of_several_optimizers_are_this_ranks_own(
        manager: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MPI program: DCP has no group to plan over."""
    monkeypatch.setattr(train_state, "alone", lambda: False)

    def make(seed: int) -> Any:
        (model, one), (average, two) = trained(seed), trained(seed + 10)
        return model, [one, two], average

    model, optimizers, average = make(0)
    state = TrainState(model=model, optimizer=optimizers, average=average)
    assert not state.collective
    manager.save(1, state)
    assert sorted(p.name for p in (root / "step-1").iterdir()) == [
        "commit.json", *(f"{n}.rank-00000-of-00001.pt" for n in ("members", "model", "optimizer-0", "optimizer-1"))]
    again, others, other = make(1)
    assert manager.restore(TrainState(model=again, optimizer=others, average=other)) == 1
    assert same([again.state_dict(), other.state_dict(), [o.state_dict() for o in others]],
                [model.state_dict(), average.state_dict(), [o.state_dict() for o in optimizers]])
    _, others, _ = make(2)
    again, _, _ = make(2)
    assert manager.restore(TrainState(model=again, optimizer=others), only=["optimizer"]) == 1
    assert same(others[1].state_dict(), optimizers[1].state_dict())
    assert not same(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("world", [1, 3])
def test_at_another_number_of_ranks_each_member_follows_its_rule(world: int, root: Path,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    def save(m: Any) -> None:
        m.save(1, TrainState(a=Counter(10 + m.rank), b=Counter(20 + m.rank), c={"n": 30 + m.rank}, d=Counter(40 + m.rank),
                             scheduler=Counter(50)))

    values(Job(root, 2).run(save))
    targets = [(Counter(), Counter(), {"n": 0}, Counter(), Counter()) for _ in range(world)]

    def load(m: Any, rule: Any = "drop") -> Any:
        a, b, c, d, scheduler = targets[m.rank]
        state = TrainState(
            a=Member(a, on_world_change="rank0"), b=Member(b, on_world_change=rule),
            c=Member(c, on_world_change=lambda old: {"n": sum(s["n"] for s in old)}),
            d=Member(d, on_world_change=lambda old: {"value": [s["value"] for s in old]}), scheduler=scheduler)
        return m.restore(state)

    job = Job(root, world)
    job.start()
    with caplog.at_level("WARNING"):
        assert values(job.each(load)) == [1] * world
    for a, b, c, d, scheduler in targets:
        assert (a.value, b.value, c["n"], d.value, scheduler.value) == (10, 0, 61, [40, 41], 50)
    assert "member b starts anew: saved by 2 ranks" in caplog.text
    for error in same_error(job.each(lambda m: load(m, "error")), WorldMismatch):
        assert (error.saved, error.now) == (2, world) and "'b'" in str(error) and "on_world_change" in str(error)
    job.finish()
    values(Job(root, 2).run(lambda m: m.restore(TrainState(a=Counter(), b=Counter(), c={}, d=Counter(), scheduler=Counter()))))


# -- random states -----------------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.normal(), float(torch.rand(1)),
            int(torch.randint(1000, (1,)))]


def test_random_states_of_python_numpy_and_torch_come_back(manager: Any) -> None:
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    draws()  # a gaussian is left in the cache of python's and numpy's generators
    random.gauss(0, 1)
    manager.save(1, TrainState(rng=True))
    wanted = draws()
    draws()
    assert manager.restore(TrainState(rng=True)) == 1
    assert draws() == wanted


def test_random_states_of_all_cuda_devices_come_back_where_there_are_as_many(monkeypatch: pytest.MonkeyPatch,
                                                                           caplog: pytest.LogCaptureFixture) -> None:
    devices = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", taken.extend)
    state = Rng().state_dict()
    Rng().load_state_dict(state)
    assert same(taken, devices)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    Rng().load_state_dict(state)
    assert len(taken) == 2 and "RNG states of 2 CUDA devices were saved and 3 are here" in caplog.text


def test_at_another_number_of_ranks_random_streams_start_anew_reproducibly_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(42)
    states = [Rng().state_dict()] * 2
    found = []
    for _ in range(2):
        for rank in range(3):
            Rng().reseed(states, rank, 3)
            found.append(draws())
    assert found[:3] == found[3:] and len({str(d) for d in found}) == 3
    assert "saved by 2 ranks, loaded by 3: rank 2's streams start anew, derived from seed 42" in caplog.text


# -- DCP ---------------------------------------------------------------------------------------------------------------


def go_on(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The weights after two more steps."""
    for step in range(2):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(3, 4)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("gradients", [False, True])
def test_an_optimizer_before_its_first_step_comes_back_and_saving_it_changes_nothing(gradients: bool, manager: Any) -> None:
    """torch's own helper would make a step over zeros to have something to save, and Adam would count it."""
    model, optimizer = trained(steps=0)
    if gradients:
        model(torch.ones(1, 4)).sum().backward()
    manager.save(1, TrainState(model=model, optimizer=optimizer))
    assert not optimizer.state and all((p.grad is not None) == gradients for p in model.parameters())
    new, used = trained(seed=1, steps=0), trained(seed=1, steps=3)
    for other, other_optimizer in (new, used):
        assert manager.restore(TrainState(model=other, optimizer=other_optimizer)) == 1
        assert not other_optimizer.state
    wanted = go_on(*trained(steps=0))
    assert all(same(go_on(*pair), wanted) for pair in ((model, optimizer), new, used))


def test_gradients_left_from_before_do_not_make_the_optimizers_state_get_lost(manager: Any) -> None:
    """torch's helper takes them for a sign that the optimizer has no state, and would load none, silently."""
    model, optimizer = trained()
    manager.save(1, TrainState(model=model, optimizer=optimizer))
    other, other_optimizer = trained(seed=1, steps=0)
    other(torch.ones(1, 4)).sum().backward()
    gradients = [p.grad for p in other.parameters()]
    assert manager.restore(TrainState(model=other, optimizer=other_optimizer)) == 1
    assert all(p.grad is g for p, g in zip(other.parameters(), gradients, strict=True))
    assert same(go_on(other, other_optimizer), go_on(model, optimizer))


def test_a_parameter_that_never_got_a_gradient_has_no_state_and_needs_none(manager: Any) -> None:
    def half(seed: int, steps: int) -> Any:
        model, _ = trained(seed, steps=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model[0](torch.ones(3, 4)).pow(2).mean().backward()  # type: ignore[index]
            optimizer.step()
        return model, optimizer

    model, optimizer = half(0, 2)
    manager.save(1, TrainState(model=model, optimizer=optimizer))
    for other, other_optimizer in (half(1, 0), half(1, 1)):
        assert manager.restore(TrainState(model=other, optimizer=other_optimizer)) == 1
        assert len(other_optimizer.state) == len(optimizer.state) == 2
        assert same(other_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RMSprop])
def test_other_optimizers_come_back_too(kind: Any, manager: Any) -> None:
    def fresh(seed: int) -> Any:
        model, _ = trained(seed, steps=0)
        return model, kind(model.parameters(), lr=0.05)

    model, optimizer = fresh(0)
    go_on(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.01
    manager.save(1, TrainState(model=model, optimizer=optimizer))
    other, other_optimizer = fresh(1)
    assert manager.restore(TrainState(model=other, optimizer=other_optimizer)) == 1
    assert other_optimizer.param_groups[0]["lr"] == 0.01
    assert same(go_on(other, other_optimizer), go_on(model, optimizer))


def test_plain_dcp_reads_our_directory(manager: Any, root: Path) -> None:
    model, optimizer = trained()
    path = manager.save(1, DCP(model, optimizer)).path
    other, other_optimizer = trained(seed=1)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    assert same(state["model"], dict(model.state_dict()))


@pytest.mark.parametrize("digest", ["xxh3-128", None])
def test_dcp_computes_no_crc_of_what_is_digested(digest: str | None, root: Path, no_open_roots: None) -> None:
    """It costs as much as the writing itself. Without a digest it is all the protection that a file has."""
    with distckpt.CheckpointManager(str(root), digest=digest) as manager:
        path = manager.save(1, DCP(state={"t": torch.ones(64)})).path
    written = (Path(path) / "__0_0.distcp").read_bytes()
    with zipfile.ZipFile(io.BytesIO(written)) as archive:
        sums = {entry.CRC for entry in archive.infolist()}
    assert (sums == {0}) == (digest is not None)


def test_dcp_takes_tensors_stateful_objects_and_numbers_besides_the_model(manager: Any) -> None:
    manager.save(1, DCP(state={"t": torch.full((4,), 3.0), "loader": Counter(5), "n": 7, "nested": {"x": torch.ones(2), "m": 1}}))
    loader = Counter()
    target = {"t": torch.zeros(4), "loader": loader, "n": 0, "nested": {"x": torch.zeros(2), "m": 0}}
    kept = target["t"]
    assert manager.restore(DCP(state=target)) == 1
    assert target["t"] is kept and float(kept[0]) == 3 and loader.value == 5
    assert target["n"] == 7 and target["nested"]["m"] == 1 and float(target["nested"]["x"][0]) == 1


def test_several_optimizers(manager: Any) -> None:
    def two(seed: int) -> Any:
        model, _ = trained(seed)
        return model, [torch.optim.Adam(part.parameters(), lr=0.1) for part in model]  # type: ignore[union-attr]

    for step, before in ((1, False), (2, True)):
        model, pair = two(0)
        if before:
            go_on(model, *pair)
        pair[1].param_groups[0]["lr"] = 0.2
        manager.save(step, DCP(model, pair))
        other, others = two(1)
        assert manager.restore(DCP(other, others)) == step
        assert others[1].param_groups[0]["lr"] == 0.2
        assert same(go_on(other, *others), go_on(model, *pair))


def test_B89_a_dcp_writer_that_dropped_results_and_reports_success_is_caught(manager: Any, root: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP joins its writer threads and ignores what they raised: every planned item must have been written."""
    original = FileSystemWriter.write_data

    def forgetful(self: Any, plan: Any, planner: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(original(self, plan, planner).wait()[:-1])
        return future

    model, optimizer = trained()
    manager.save(1, DCP(model, optimizer))
    manager.wait()
    before = tree(root)
    monkeypatch.setattr(FileSystemWriter, "write_data", forgetful)
    with pytest.raises(SaveError, match="DCP reported success without writing 1 of") as caught:
        manager.save(2, DCP(model, optimizer))
    assert caught.value.failures[0].type == "OSError" and tree(root) == before


def test_B89_every_file_of_dcp_is_synced_by_us_when_it_is_whole(root: Path) -> None:
    """DCP fsyncs its metadata before the buffer is flushed; what counts is our own fsync, of the bytes that are measured. Its
    large files are ours: digested while they are written, and not read again."""
    files = FaultyFiles(REAL)
    model, optimizer = trained()
    with distckpt.CheckpointManager(str(root), seams=Seams(files=files)) as manager:
        manager.save(1, DCP(model, optimizer))
    synced = {op: {Path(o.path).name for o in files.operations(op, "/staging/")} for op in ("fsync_file", "fsync")}
    assert synced["fsync_file"] == {".metadata"} and "__0_0.distcp" in synced["fsync"]
    assert "__0_0.distcp" not in {Path(o.path).name for o in files.reads if o.op == "read"}
    found = distckpt.open(root).at(1)
    assert {e.path: e.size for e in found.marker.files} == {p.name: p.stat().st_size for p in (root / "step-1").iterdir()
                                                          if p.name != "commit.json"}


def test_small_tensors_reach_dcps_file_by_the_dozen_and_large_ones_as_they_are(root: Path) -> None:
    """DCP writes an archive per tensor, ten small writes each."""
    state = {**{f"small{n}": torch.full((4,), float(n)) for n in range(300)}, "large": torch.arange(1 << 20, dtype=torch.float32)}
    files = FaultyFiles(REAL)
    with distckpt.CheckpointManager(str(root), seams=Seams(files=files)) as manager:
        manager.save(1, DCP(state=state))
    size = (root / "step-1" / "__0_0.distcp").stat().st_size
    assert len(files.operations("write", "__0_0.distcp")) < 3 + size // (64 << 10)
    fresh = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(fresh, checkpoint_id=root / "step-1")
    assert all(torch.equal(fresh[name], value) for name, value in state.items())


def test_dcps_metadata_is_checked_before_dcp_unpickles_it(manager: Any, root: Path) -> None:
    model, _ = trained()
    manager.save(1, DCP(model))
    path = root / "step-1" / ".metadata"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"\.metadata .* has digest") as caught:
        manager.restore(DCP(model))
    assert list(caught.value.files) == [".metadata"]


def test_a_model_of_another_shape_is_an_error_that_names_the_checkpoint(manager: Any) -> None:
    manager.save(1, DCP(torch.nn.Linear(4, 4)))
    with pytest.raises(ResumeError, match="restore of step-1 failed: rank 0"):
        manager.restore(DCP(torch.nn.Linear(4, 5)))


def test_a_mean_object_cannot_pass_for_a_payload_by_accident() -> None:
    """Structural: what has write, load, check, members and collective is one; a module is a state_dict holder."""
    assert isinstance(as_payload(torch.nn.Linear(1, 1)), Shards)
    assert isinstance(as_payload({}), Shards)
    assert isinstance(as_payload({"a": Shards({})}), Several)
    payload = TrainState(model=torch.nn.Linear(1, 1), x={})
    assert as_payload(payload) is payload and payload.collective and payload.members == ["model", "x"]
    assert not TrainState(x={}).collective


_PLAIN = """
import sys, torch, distckpt
model = torch.nn.Linear(4, 4)
state = distckpt.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), progress={"epoch": 1})
with distckpt.CheckpointManager(sys.argv[1], keep_last=1) as manager:
    manager.restore(state)
    manager.save(1, state)
    manager.save(2, state, background=True)
with distckpt.CheckpointManager(sys.argv[1], keep_last=1) as manager:
    assert manager.restore(state) == 2
sys.exit(" ".join({"deepspeed", "accelerate", "transformers", "lightning", "mpi4py"} & set(sys.modules)) or 0)
"""


def test_a_plain_loop_imports_no_framework(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _PLAIN, tmp_path / "root"], capture_output=True, text=True, timeout=120,
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
