"""A framework's writers through us: torch.save into our file, large states copied at the call and written behind."""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

import distckpt
from distckpt.checkpoint import Checkpoint
from distckpt.durable import REAL
from distckpt.errors import SaveError
from distckpt.options import Seams
from distckpt.payloads import memory
from distckpt.payloads.framework import FrameworkFiles, Held
from distckpt.payloads.memory import Memory
from distckpt.payloads.standin import WriterCall, standing_in
from distckpt.saving.piecewriter import PieceWriter
from distckpt.testing.faults import FaultyFiles, call, shorten
from tests.fakegpu import FakeGpu

MODES = pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
COUNT = memory.LARGE // 4 + 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def saved(root: Path, write: Callable[[str], None], background: bool, **more: Any) -> Checkpoint:
    """A checkpoint of what ``write(directory)`` writes."""
    with distckpt.CheckpointManager(root) as manager:
        manager.save(1, FrameworkFiles(lambda directory, held: write(directory), **more), background=background)
        manager.wait()
        found = manager.resume().checkpoint
        assert found is not None
        for name in found.names:
            found.check(name)
        return found


def test_a_large_state_is_copied_when_the_framework_writes_it_and_written_behind_by_the_same_writer(
        root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that a hook puts in for the time of the write are those in the file; so are those before a later step."""
    weights = torch.zeros(COUNT)
    here, calls = threading.get_ident(), []
    real_save, real_file = torch.save, safetensors.torch.save_file

    def save(value: Any, f: Any) -> None:
        calls.append((os.path.basename(getattr(f, "path", f)), isinstance(f, PieceWriter), threading.get_ident() == here))
        real_save(value, f)

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        calls.append((os.path.basename(filename), False, threading.get_ident() == here))
        real_file(tensors, filename, metadata)

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(safetensors.torch, "save_file", save_file)

    def write(directory: str, held: Held) -> None:
        with torch.no_grad():
            weights.data.copy_(torch.ones(COUNT))  # an average, say; through .data, which no version counter sees
            torch.save({"w": weights, "step": 1}, f"{directory}/w.pt")
            safetensors.torch.save_file({"w": weights}, f"{directory}/w.safetensors", metadata={"format": "pt"})
            torch.save({"w": weights[:3]}, f"{directory}/small.pt")
            weights.data.zero_()

    with distckpt.CheckpointManager(root) as manager:
        manager.save(1, FrameworkFiles(write), background=True)
        weights.fill_(2)
        manager.wait()
        assert set(calls) == {("small.pt", False, True), ("w.pt", True, False), ("w.safetensors", False, False)}
        calls.clear()
        manager.save(2, FrameworkFiles(write))
        assert calls == [("w.pt", True, True), ("w.safetensors", False, True), ("small.pt", True, True)]
    for step in (1, 2):
        path = root / f"step-{step}"
        assert torch.load(path / "w.pt")["w"].eq(1).all() and torch.load(path / "small.pt")["w"].eq(1).all()
        with safetensors.safe_open(path / "w.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"} and file.get_tensor("w").eq(1).all()


@MODES
def test_what_is_tied_stays_tied_and_a_part_of_a_large_storage_stays_small(root: Path, background: bool) -> None:
    """Torch keeps one storage for two names; views of one memory that differ are left to it."""
    base = torch.arange(4 * COUNT, dtype=torch.float32)
    tied, part = torch.rand(COUNT), base[COUNT:2 * COUNT]

    def write(directory: str) -> None:
        torch.save(OrderedDict(a=tied, b=tied, c=[part]), f"{directory}/tied.pt")
        torch.save({"whole": tied, "half": tied[:COUNT // 2], "row": part}, f"{directory}/views.pt")

    found = saved(root, write, background)
    loaded, views = (torch.load(os.path.join(found.path, name)) for name in ("tied.pt", "views.pt"))
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr() and torch.equal(loaded["a"], tied)
    assert torch.equal(loaded["c"][0], part) and torch.equal(views["row"], part)
    views["whole"][0] = -1
    assert views["half"][0] == -1
    if background:
        assert found.entry("tied.pt").size < 4 * COUNT * 2.1


class Stubborn:
    """It can be pickled and not copied."""

    def __deepcopy__(self, found: Any) -> Any:
        raise TypeError("cannot be copied")


class Mine(torch.Tensor):
    pass


class Named(dict):  # type: ignore[type-arg]
    pass


ODD: dict[str, Callable[[], Any]] = {
    "small": lambda: {"w": torch.rand(10)}, "no tensors": lambda: ["x" * memory.LARGE],
    "parameter": lambda: {"w": torch.nn.Parameter(torch.rand(COUNT))}, "subclass": lambda: [torch.rand(COUNT).as_subclass(Mine)],
    "dict subclass": lambda: {"w": torch.rand(COUNT), "more": Named(w=torch.rand(3))},
    "expanded": lambda: [torch.rand(COUNT), torch.rand(1).expand(COUNT)],
    "sparse": lambda: [torch.eye(9).to_sparse(), torch.rand(COUNT)],
    "stubborn": lambda: {"w": torch.rand(COUNT), "more": Stubborn()},
    "conjugate": lambda: torch.rand(COUNT, dtype=torch.cfloat).conj(),
    "meta": lambda: {"w": torch.rand(COUNT), "m": torch.empty(3, device="meta")}}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_odd_or_small_is_written_at_once(kind: str, root: Path) -> None:
    value, memory_ = ODD[kind](), Memory()
    assert memory_.copy(value) is None
    saved(root, lambda directory: torch.save(value, f"{directory}/odd.pt"), True, memory=memory_)
    assert memory_.size == 0
    assert type(torch.load(root / "step-1" / "odd.pt", weights_only=False)) is type(value)


def test_objects_among_the_tensors_are_copied_with_them(root: Path) -> None:
    state: dict[str, Any] = {"w": torch.rand(2, COUNT)[:, ::2], "master": torch.rand(9).requires_grad_(), "bytes": b"x",
                             "shape": torch.Size([2]), "seen": {"ids": [1, 2]}}
    before = {**state, "w": state["w"].clone(), "master": state["master"].detach().clone(), "seen": {"ids": [1, 2]}}
    with distckpt.CheckpointManager(root) as manager:
        files = FrameworkFiles(lambda directory, held: torch.save(state, f"{directory}/w.pt"))
        manager.save(1, files, background=True)
        state["w"].zero_()
        state["master"].data.zero_()
        state["seen"]["ids"].append(3)
        manager.wait()
    loaded = torch.load(root / "step-1" / "w.pt")
    assert loaded["master"].requires_grad
    assert torch.equal(loaded.pop("w"), before.pop("w")) and torch.equal(loaded.pop("master"), before.pop("master"))
    assert loaded == before


@MODES
@pytest.mark.parametrize("count", [10, COUNT])
def test_every_other_argument_reaches_the_writer(root: Path, background: bool, count: int) -> None:
    w = torch.rand(count)

    def write(directory: str) -> None:
        torch.save({"w": w}, Path(directory, "legacy.pt"), _use_new_zipfile_serialization=False)
        torch.save(obj={"w": w}, f=f"{directory}/protocol.pt", pickle_protocol=3)

    found = saved(root, write, background)
    path = Path(found.path)
    assert (path / "legacy.pt").read_bytes()[:2] == b"\x80\x02" and torch.equal(torch.load(path / "legacy.pt")["w"], w)
    assert torch.equal(torch.load(path / "protocol.pt")["w"], w)
    assert b"\x80\x03}" in (path / "protocol.pt").read_bytes()


@MODES
def test_the_last_of_several_writes_of_one_file_counts(root: Path, background: bool) -> None:
    def write(directory: str) -> None:
        for value in (torch.zeros(COUNT), torch.ones(3), torch.full((COUNT,), 2.0)):
            torch.save(value, f"{directory}/twice.pt")
        torch.save(torch.zeros(COUNT), f"{directory}/text")
        Path(directory, "text").write_text("by other means")
        Path(directory, "first").write_text("x" * 3 * memory.LARGE)
        torch.save(torch.ones(COUNT), f"{directory}/first")
        safetensors.torch.save_file({"w": torch.zeros(COUNT)}, f"{directory}/w.safetensors")
        safetensors.torch.save_file({"w": torch.ones(4)}, f"{directory}/w.safetensors")

    found = saved(root, write, background, owed=["twice.pt", "w.safetensors"])
    path = Path(found.path)
    assert sorted(found.names) == ["first", "text", "twice.pt", "w.safetensors"]
    assert torch.load(path / "twice.pt").eq(2).all() and (path / "text").read_text() == "by other means"
    assert torch.load(path / "first").eq(1).all() and safetensors.torch.load_file(path / "w.safetensors")["w"].tolist() == [1] * 4


@MODES
def test_a_disk_that_takes_half_of_a_write_and_says_so_of_none_is_found_out(root: Path, background: bool) -> None:
    disk = FaultyFiles(REAL, shorten(path="w.pt"))
    with distckpt.CheckpointManager(root, seams=Seams(files=disk)) as manager:
        files = FrameworkFiles(lambda directory, held: torch.save(torch.rand(COUNT), f"{directory}/w.pt"))
        with pytest.raises(SaveError, match=r"bytes were written and|the archive is cut off"):
            manager.save(1, files, background=background)
            manager.wait()
        assert disk.fired
        manager.save(2, files, background=background)
        manager.wait()
        assert manager.all_steps() == [2]


@MODES
def test_torch_save_that_reports_success_and_stops_short_ends_the_save(
        root: Path, background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.save

    def short(value: Any, f: Any) -> None:
        into = io.BytesIO()
        real(value, into)
        f.write(into.getbuffer()[:-20])

    monkeypatch.setattr(torch, "save", short)
    files = FrameworkFiles(lambda directory, held: torch.save(torch.rand(COUNT), f"{directory}/w.pt"))
    with distckpt.CheckpointManager(root) as manager:
        with pytest.raises(SaveError, match="the archive is cut off"):
            manager.save(1, files, background=background)
            manager.wait()
        assert manager.all_steps() == []


@MODES
def test_save_file_that_reports_success_and_stops_short_or_fails_ends_the_save(
        root: Path, background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = safetensors.torch.save_file

    def short(tensors: Any, filename: Any, metadata: Any = None) -> None:
        real(tensors, filename, metadata)
        os.truncate(filename, memory.LARGE)

    def broken(tensors: Any, filename: Any, metadata: Any = None) -> None:
        raise RuntimeError("a bug in the framework")

    def write(directory: str, held: Held) -> None:
        safetensors.torch.save_file({"w": torch.rand(COUNT)}, f"{directory}/w.safetensors")

    files = FrameworkFiles(write)
    with distckpt.CheckpointManager(root) as manager:
        for act, text in ((short, "bytes of"), (broken, "a bug in the framework")):
            monkeypatch.setattr(safetensors.torch, "save_file", act)
            with pytest.raises(SaveError, match=text):
                manager.save(1, files, background=background)
                manager.wait()
            assert safetensors.torch.save_file is act
        assert manager.all_steps() == []


def test_the_memory_holds_the_state_once_and_is_used_again(root: Path, tmp_path: Path) -> None:
    kept, held_elsewhere = Memory(), []
    states = [torch.rand(COUNT), torch.rand(2 * COUNT)]
    (tmp_path / "memory").mkdir()

    def write(directory: str, held: Held) -> None:
        for index, state in enumerate(states):
            torch.save(state, f"{directory}/{index}.pt")
        held_elsewhere.append([os.path.getsize(os.path.join(top, n)) for top, _, names in os.walk(directory) for n in names])

    with distckpt.CheckpointManager(root) as manager:
        blocks = []
        for step in range(1, 4):
            manager.save(step, FrameworkFiles(write, memory=kept, scratch=str(tmp_path / "memory")), background=True)
            manager.wait()
            blocks.append([arena._block.data_ptr() for arena in kept._arenas])
        assert kept.size == 3 * COUNT * 4 and held_elsewhere == [[]] * 3, "once, and not in the scratch directory as well"
        assert blocks[0] == blocks[1] == blocks[2]
        states.pop()
        manager.save(4, FrameworkFiles(write, memory=kept), background=True)
        assert kept.size == COUNT * 4
    for step in (1, 4):
        assert torch.equal(torch.load(root / f"step-{step}" / "0.pt"), states[0])


def test_two_managers_of_one_state_never_write_each_others_bytes(root: Path, tmp_path: Path) -> None:
    """The second save copies into the memory that the first is being written from: it waits, or the first one says so."""
    state, writing, go = torch.zeros(COUNT), threading.Event(), threading.Event()

    def hold(operation: Any) -> None:
        writing.set()
        assert go.wait(20)

    disk = FaultyFiles(REAL, call(hold, op="write", path="w.pt"))
    files = FrameworkFiles(lambda directory, held: torch.save(state, f"{directory}/w.pt"))
    with (distckpt.CheckpointManager(root, seams=Seams(files=disk)) as one,
          distckpt.CheckpointManager(tmp_path / "other") as other):
        one.save(1, files, background=True)
        assert writing.wait(20)
        state.fill_(1)
        threading.Timer(0.2, go.set).start()
        other.save(1, files, background=True)
        assert go.is_set(), "it copied while the other was being written"
        one.wait()
        other.wait()
        assert torch.load(root / "step-1" / "w.pt").eq(0).all() and torch.load(tmp_path / "other" / "step-1" / "w.pt").eq(1).all()
    staged = FrameworkFiles(lambda directory, held: torch.save(state, f"{directory}/w.pt"))
    first = staged.of(staged.tree())
    staged.tree()
    with pytest.raises(distckpt.ConfigError, match="saved again before"):
        first.write(None, None)  # type: ignore[arg-type]


def test_a_copy_from_a_device_has_come_when_the_call_returns() -> None:
    kept = Memory()
    kept._device = gpu = FakeGpu()
    source = torch.rand(COUNT)
    copied = kept.copy({"w": source})
    assert torch.equal(copied["w"], source) and gpu.waits == 1 and not gpu.under_way


def test_dtensors_are_copied_and_pickled_on_another_thread(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        full = torch.rand(2, COUNT)
        value = DTensor.from_local(full.clone(), init_device_mesh("cpu", (1,)), [Shard(0)])
        copied, into = Memory().copy({"w": value}), io.BytesIO()
        value._local_tensor.zero_()
        thread = threading.Thread(target=torch.save, args=(copied, into))
        thread.start()
        thread.join()
        into.seek(0)
        loaded = torch.load(into, weights_only=False)["w"]
        assert isinstance(loaded, DTensor) and loaded.placements == (Shard(0),) and torch.equal(loaded.to_local(), full)
    finally:
        dist.destroy_process_group()


def test_other_threads_write_as_they_always_do_and_everything_is_put_back(tmp_path: Path) -> None:
    real, seen = torch.save, []

    def answer(made: WriterCall) -> None:
        seen.append(made.where)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), standing_in(answer):
            thread = threading.Thread(target=torch.save, args=(1, tmp_path / "a"))
            thread.start()
            thread.join()
            torch.save(2, tmp_path / "b")
            raise KeyError
    assert (tmp_path / "a").exists() and seen == [tmp_path / "b"] and torch.save is real
