"""The copy of a background save: apart from the source, in memory made ahead, fenced where it overlaps a step."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt.errors import ConfigError, SaveError
from distckpt.payloads.live import live_of
from distckpt.runtime import SYSTEM
from distckpt.saving import staging
from distckpt.saving.arena import Arena, size_of
from distckpt.saving.staging import Copy, Device
from tests.fakegpu import FakeGpu, poisoned
from tests.inprocess import await_


def model_and_optimizer(steps: int = 0, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()


# -- the arena and the copy -------------------------------------------------------------------------------------------

def test_a_copy_shares_nothing_with_its_source() -> None:
    shared = torch.arange(6.0)
    tree = {"a": shared.view(2, 3), "t": shared.view(2, 3).t(), "half": torch.ones(5, dtype=torch.bfloat16),
            "scalar": torch.tensor(3), "none": torch.empty(0, 4), "flag": torch.tensor([True, False]),
            "list": [torch.ones(2), {"deep": [1, 2]}],
            "ordered": OrderedDict(b=(torch.zeros(1), "text"))}
    arena = Arena()
    staged = staging.copy(tree, arena, SYSTEM)
    want = torch.arange(6.0)
    for tensor in staging.tensors_of(tree):
        tensor.zero_()
    tree["list"][1]["deep"].append(3)
    assert torch.equal(staged["a"], want.view(2, 3)) and torch.equal(staged["t"], want.view(2, 3).t())
    assert staged["half"].dtype == torch.bfloat16 and staged["half"].sum() == 5 and staged["scalar"] == 3
    assert staged["none"].shape == (0, 4) and staged["flag"].tolist() == [True, False]
    assert staged["list"][1] == {"deep": [1, 2]}
    assert staged["ordered"]["b"][1] == "text" and type(staged["ordered"]) is OrderedDict


@pytest.mark.parametrize("count", [3, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float8_e4m3fn,
                                   torch.float64, torch.complex64], ids=str)
def test_every_kind_of_number_is_copied_bit_for_bit(dtype: torch.dtype, count: int) -> None:
    raw = torch.arange(count * dtype.itemsize) % (2 if dtype == torch.bool else 119)
    source = raw.to(torch.uint8).view(dtype)
    staged = staging.copy({"odd": torch.ones(1, dtype=torch.uint8), "x": source}, Arena(), SYSTEM)["x"]
    kept = source.clone()
    source.view(torch.uint8).zero_()
    assert staged.dtype == dtype and torch.equal(staged.view(torch.uint8), kept.view(torch.uint8))
    assert staged.untyped_storage().nbytes() == kept.nbytes


def test_a_modules_state_dict_keeps_the_versions_of_its_parts() -> None:
    """torch goes by them when it loads an older state: without them a BatchNorm of today is taken for one of 2018."""
    state = torch.nn.BatchNorm1d(2).state_dict()
    staged = staging.copy({"model": state}, Arena(pin=False), SYSTEM)["model"]
    assert staged._metadata == state._metadata and staged._metadata is not state._metadata



def test_memory_is_made_once_and_used_again() -> None:
    arena = Arena()
    first = staging.copy({"x": torch.ones(1000)}, arena, SYSTEM)["x"].data_ptr()
    assert staging.copy({"x": torch.zeros(1000)}, arena, SYSTEM)["x"].data_ptr() == first
    assert staging.copy({"x": torch.zeros(10)}, arena, SYSTEM)["x"].data_ptr() == first and arena.version == 1
    staging.copy({"x": torch.zeros(1001)}, arena, SYSTEM)
    assert arena.version == 2 and arena.size == 4004


def test_the_old_memory_is_gone_before_a_state_that_grew_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, seen, real = Arena(shared=True), [], os.memfd_create

    def make(*args: Any) -> int:
        seen.append("distckpt-arena" in Path("/proc/self/maps").read_text())
        return real(*args)

    monkeypatch.setattr(os, "memfd_create", make)
    for count in (1000, 1_000_000):
        staging.copy({"a": torch.ones(500), "x": torch.ones(count)}, arena, SYSTEM)
    arena.close()
    assert seen == [False, False]


def test_a_cut_that_was_made_before_is_known_by_its_place_shape_and_dtype_and_is_the_callers_own() -> None:
    arena = Arena()
    arena.reserve(64)
    first = arena.cut(torch.zeros(4)).requires_grad_()
    for like in (torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(4)):
        arena.rewind()
        found = arena.cut(like)
        assert (found.shape, found.dtype, found.data_ptr()) == (like.shape, like.dtype, first.data_ptr())
        assert not found.requires_grad and found.is_leaf
    arena.reserve(128)
    arena.rewind()
    assert arena.offset(arena.cut(torch.zeros(4))) == 0, "of the memory that is there now"


def test_a_file_holds_its_own_tensors_and_not_the_whole_arena(tmp_path: Path) -> None:
    state = {"big": distckpt.Shards({"w": torch.zeros(250_000)}), "small": distckpt.Shards({"w": torch.ones(10)})}
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, state, background=True)
        manager.save(2, {"only": torch.ones(100)}, background=True).result()
        one, two = (sum(f.size for f in c.marker.files) for c in reversed(manager.checkpoints()))
    assert 1_000_000 < one < 1_010_000 and two < 5_000


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    weight = torch.ones(100_000)
    assert size_of([weight, weight]) == 400_000
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        made = manager.save(1, {"embed": weight, "head": weight, "part": weight[:10]}, background=True).result()
        assert sum(f.size for f in made.marker.files) < 410_000
        back = torch.load(made.mine("state.pt"), weights_only=True)
    assert back["embed"].data_ptr() == back["head"].data_ptr() and torch.equal(back["part"], torch.ones(10))


# -- memory made ahead ------------------------------------------------------------------------------------------------

def run_to_arena(manager: distckpt.CheckpointManager) -> None:
    await_(lambda: manager._behind._preparing is not None)
    manager._behind._await_arena()


def test_memory_is_made_before_the_first_save_by_the_first_poll(tmp_path: Path) -> None:
    state = {"w": torch.ones(3_000_000), "n": 3}
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        behind = manager._behind
        assert manager.restore(state) is None and behind.arena.size == 0 and behind._preparing is None
        manager.poll(0)
        assert not behind.attention
        run_to_arena(manager)
        size = behind.arena.size
        assert 12_000_000 <= size <= 12_000_000 * 1.02
        manager.poll(1)
        manager.save(1, state, background=True)
        assert behind.arena.version == 1 and behind.arena.size == size
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        assert manager.restore(state) == 1
        manager.poll(1)
        run_to_arena(manager)
        assert manager._behind.arena.size == size


def test_an_optimizer_is_given_its_first_step_before_its_size_is_believed(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    state = distckpt.TrainState(model=model, optimizer=optimizer, rng=True, progress={"n": 1})
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager.restore(state)
        manager.poll(0)
        assert manager._behind._preparing is None and not optimizer.state  # looking at it has no side effects
        step(model, optimizer)
        manager.poll(1)
        run_to_arena(manager)
        size = manager._behind.arena.size
        manager.save(1, state, background=True)
        assert manager._behind.arena.version == 1
        assert size <= manager._behind.arena._used * 1.02 + (1 << 16)


def test_an_optimizer_without_state_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    model = torch.nn.Linear(1000, 100)
    state = distckpt.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager.restore(state)
        for number in range(3):
            assert manager._behind._preparing is None
            manager.poll(number)
        run_to_arena(manager)
        assert not manager._behind.attention and manager._behind.arena.size >= 400_000


def test_nothing_is_made_for_who_never_polls_or_cannot_stage(tmp_path: Path) -> None:
    class Plain:
        collective, members = False, []  # type: ignore[var-annotated]

        def check(self) -> None: ...
        def write(self, files: Any, ranks: Any) -> None: ...
        def load(self, checkpoint: Any, ranks: Any) -> None: ...

    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager.restore({"w": torch.ones(1000)})
        manager.save(1, {"w": torch.ones(1000)})
        assert manager._behind.arena.size == 0
    with distckpt.CheckpointManager(tmp_path / "other") as manager:
        manager.restore(Plain())
        manager.poll(0)
        assert manager._behind.arena.size == 0 and manager._behind._preparing is None and not manager._behind.attention


def test_a_save_waits_for_memory_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    making = threading.Event()
    before, threads = Arena.reserve, []

    def slowly(arena: Arena, size: int) -> None:
        threads.append(threading.current_thread().name)
        if threads[-1] == "distckpt-arena":
            making.set()
            time.sleep(0.3)
        before(arena, size)

    monkeypatch.setattr(Arena, "reserve", slowly)
    state = {"w": torch.full((50_000,), 7.0)}
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager.restore(state)
        manager.poll(0)
        assert making.wait(5)
        made = manager.save(1, state, background=True)
        assert threads == ["distckpt-arena"] and manager._behind.arena.version == 1
        back = torch.load(made.result().mine("state.pt"), weights_only=True)
    assert torch.equal(back["w"], torch.full((50_000,), 7.0))


def test_knowing_the_tensors_takes_no_state_dict() -> None:
    model, optimizer = model_and_optimizer(steps=1)
    state = distckpt.TrainState(model=model, optimizer=optimizer, progress={"seen": torch.ones(3)})
    live = live_of(state)
    assert live is not None and live.complete and live.optimizers == [optimizer]
    used = Arena()
    staging.copy(state.tree(), used, SYSTEM)
    assert abs(live.size - used._used) <= 64
    assert {t.data_ptr() for t in live.moving} >= {b.data_ptr() for b in model.buffers()}
    assert not live.pointers & {b.untyped_storage().data_ptr() for b in model.buffers()}


# -- from a device ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["copy", "overlap"])
def test_no_byte_is_read_before_the_copy_from_the_device_has_ended(tmp_path: Path, how: str) -> None:
    gpu = FakeGpu()
    state = {"w": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.int8)}
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager._behind.device = gpu
        handle = manager.save(1, state, background=True, staging=how)
        manager.staged()
        state["w"].zero_()  # from here on the caller may do so
        back = torch.load(handle.result().mine("state.pt"), weights_only=True)
    assert torch.equal(back["w"], torch.arange(1000.0)) and torch.equal(back["b"], torch.ones(3, dtype=torch.int8))
    assert gpu.waits and not gpu.under_way


def test_the_mocked_device_poisons_what_is_read_too_early() -> None:
    gpu, target = FakeGpu(), torch.zeros(4)
    gpu.begin([])
    gpu.copy(target, torch.ones(4))
    early = gpu.event()
    late = torch.zeros(4)
    gpu.copy(late, torch.ones(4))
    assert poisoned(target) and poisoned(late)
    early.wait()
    assert target.sum() == 4 and poisoned(late)


# -- overlap ----------------------------------------------------------------------------------------------------------

class SlowDevice(Device):
    """Copies on the CPU that begin when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.threads: set[str] = set()

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = threading.current_thread().name
        self.threads.add(name)
        assert name == "MainThread" or self.go.wait(10)
        target.copy_(source)


def flat(tree: Any) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1).double() for t in staging.tensors_of(tree)])


def test_the_optimizer_waits_for_the_copy_that_overlaps_its_step(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(steps=2)
    state = distckpt.TrainState(model=model, optimizer=optimizer, progress={"n": 1})
    device = SlowDevice()
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager._behind.device = device
        before = flat(state.tree()).clone()
        manager.save(2, state, background=True, staging="overlap")
        assert device.threads == {"MainThread"}  # buffers only
        model(torch.randn(16, 64))  # forward: moves the running statistics at once
        copying = manager._behind._copying
        assert copying is not None and copying.unfinished

        def release() -> None:
            await_(lambda: copying._since is not None)  # the step has come as far as the fence
            time.sleep(0.25)
            device.go.set()

        threading.Thread(target=release, daemon=True).start()
        step(model, optimizer)
        assert not copying.unfinished
        assert device.threads == {"MainThread", "distckpt-finaliser"}
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        manager.poll(3)
        assert not optimizer._optimizer_step_pre_hooks and not manager._behind.attention
        manager.wait()
        record = next(e for e in _committed(tmp_path) if e["step"] == 2)
        assert record["blocked"] >= 0.2
        twin, other = model_and_optimizer(steps=1)
        again = distckpt.TrainState(model=twin, optimizer=other, progress={"n": 0})
        assert manager.restore(again) == 2
    assert torch.equal(flat(again.tree()), before) and not torch.equal(flat(state.tree()), before)


def _committed(tmp_path: Path) -> list[dict[str, Any]]:
    from tests.inprocess import events

    return events(tmp_path / "root", "committed")


@pytest.mark.parametrize("fence", ["staged", "poll", "save", "wait", "close", "saving"])
def test_whatever_comes_next_waits_for_the_copy(tmp_path: Path, fence: str) -> None:
    device = SlowDevice()
    state = {"w": torch.arange(1000.0)}
    manager = distckpt.CheckpointManager(tmp_path / "root")
    manager._behind.device = device
    handle = manager.save(1, state, background=True, staging="overlap")
    copying = manager._behind._copying
    assert copying is not None and copying.unfinished
    threading.Timer(0.2, device.go.set).start()
    if fence == "saving":
        with manager.saving(2) as files, files.writer("x") as out:
            out.write(b"x")
    elif fence == "save":
        manager.save(2, state, background=True)
    elif fence == "poll":
        manager.poll(1)
    elif fence == "wait":
        manager.wait(0.0)
    else:
        getattr(manager, fence)()
    assert not copying.unfinished and manager._behind._copying is None
    state["w"].zero_()
    assert torch.equal(torch.load(handle.result(10).mine("state.pt"), weights_only=True)["w"], torch.arange(1000.0))
    manager.close()


def test_an_optimizer_that_cannot_wait_gets_a_copy_at_once(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(steps=1)

    class Wrapped:
        def __init__(self) -> None:
            self.inner = optimizer

        def state_dict(self) -> Any:
            return optimizer.state_dict()

        def load_state_dict(self, state: Any) -> None: ...

    device = SlowDevice()
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager._behind.device = device
        parts = {"model": distckpt.Shards(model), "optimizer": distckpt.Shards(Wrapped())}
        manager.save(1, parts, background=True, staging="overlap")
        copying = manager._behind._copying
        assert copying is not None  # the model is the caller's own promise; the optimizer's state is copied
        assert len(copying._later) == len(list(model.parameters()))
        device.go.set()


def test_a_failed_copy_is_the_saves_error_and_frees_the_optimizer(tmp_path: Path) -> None:
    class Broken(SlowDevice):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            if threading.current_thread().name != "MainThread":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    model, optimizer = model_and_optimizer(steps=1)
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager._behind.device = Broken()
        manager.save(1, distckpt.TrainState(model=model, optimizer=optimizer), background=True, staging="overlap")
        step(model, optimizer)
        with pytest.raises(SaveError, match="illegal memory access") as caught:
            manager.wait()
        assert isinstance(caught.value.__cause__, RuntimeError) and not optimizer._optimizer_step_pre_hooks


def test_overlap_is_an_argument_that_is_checked(tmp_path: Path) -> None:
    with distckpt.CheckpointManager(tmp_path / "root") as manager:
        manager.staged()
        with pytest.raises(ConfigError, match="staging must be one of 'copy', 'overlap'"):
            manager.save(1, {"a": 1}, background=True, staging="later")


# -- the debug check --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("by", ["argument", "environment", "nothing"])
def test_tensors_that_change_while_being_staged_are_named(tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("DISTCKPT_CHECK_STAGING", "1")
    state = {"layer": {"w": torch.ones(100), "b": torch.ones(3)}, "moved": torch.zeros(5)}
    device = SlowDevice()
    with distckpt.CheckpointManager(tmp_path / "root", **({"check_staging": True} if by == "argument" else {})) as manager:
        manager._behind.device = device
        manager.save(1, state, background=True, staging="overlap")
        state["layer"]["w"][7] = 2.0  # a promise that is not kept
        state["moved"].add_(1)
        device.go.set()
        if by == "nothing":
            manager.wait()
            return
        with pytest.raises(SaveError, match=r"layer\.w, moved changed while being staged") as caught:
            manager.wait()
        assert "layer.b" not in str(caught.value) and manager.latest_step() is None
        manager.save(2, state, background=True, staging="overlap")
        manager.wait()
        assert manager.latest_step() == 2


def test_a_change_after_the_tensors_own_copy_is_found_too() -> None:
    state = {"a": torch.ones(4), "b": torch.ones(4)}

    class Meddling(SlowDevice):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source)
            state["a"].zero_()

    copy = Copy(SYSTEM, Meddling(), check=True)
    copy.begin(state, Arena(), {staging.pointer(t) for t in state.values()})
    with pytest.raises(RuntimeError, match=r"^a changed while"):
        copy.finish()


def test_without_a_change_the_check_passes_for_every_kind_of_tensor(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(steps=1)
    state = distckpt.TrainState(model=model, optimizer=optimizer, rng=True, extra={"half": torch.ones(3, dtype=torch.bfloat16)})
    with distckpt.CheckpointManager(tmp_path / "root", check_staging=True) as manager:
        for number, how in ((1, "copy"), (2, "overlap")):
            manager.save(number, state, background=True, staging=how)
            step(model, optimizer)
        manager.wait()
        assert manager.all_steps() == [1, 2]
    assert os.environ.get("DISTCKPT_CHECK_STAGING") is None
