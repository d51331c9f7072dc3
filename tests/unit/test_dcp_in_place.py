"""DCP's large tensors are read straight into those that wait for them; what that is not for is read by DCP as ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import distckpt
from distckpt import DCP, catalog
from distckpt.checkpoint import Checkpoint
from distckpt.durable import REAL
from distckpt.errors import IntegrityError
from distckpt.payloads import inplace, torchfile, weights
from distckpt.payloads.base import Ranks
from tests.harness import run, values
from tests.support import saved

MANY = 1 << 18  # elements


def _state(fill: float) -> dict[str, Any]:
    return {"weight": torch.arange(MANY).reshape(512, -1) * fill, "half": torch.full((MANY,), fill, dtype=torch.bfloat16),
            "parameter": torch.nn.Parameter(torch.full((3, MANY), fill)), "small": torch.full((9,), fill), "number": int(fill),
            "inner": {"flags": torch.arange(MANY) % 3 > fill % 2}}


def _flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in {**state, **state["inner"]}.items() if isinstance(value, torch.Tensor)}


def _load(directory: Path, target: dict[str, Any]) -> None:
    DCP(state=target).load(_here(directory), Ranks(0, 1, lambda: None))


def _here(directory: Path) -> Checkpoint:
    return Checkpoint(str(directory), catalog.read_marker(REAL, str(directory)), rank=0, world=1)


@pytest.fixture
def by_dcp(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of elements of the tensors that DCP makes anew."""
    made: list[int] = []
    narrow = filesystem.narrow_tensor_by_index

    def noted(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        made.append(tensor.numel())
        return narrow(tensor, *args)

    monkeypatch.setattr(filesystem, "narrow_tensor_by_index", noted)
    return made


@pytest.mark.parametrize("meta", [torchfile._META, False])
@pytest.mark.parametrize("digest", ["xxh3-128", None])
def test_large_tensors_get_their_values_where_they_stand(digest: Any, meta: bool, tmp_path: Path, by_dcp: list[int],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchfile, "_META", meta)
    source, target = _state(2.0), _state(5.0)
    directory = saved(tmp_path / "root", DCP(state=source), digest=digest)
    places = {name: tensor.data_ptr() for name, tensor in _flat(target).items()}
    _load(directory, target)
    assert by_dcp == [9], "only the small one is DCP's to make"
    assert target["number"] == 2
    for name, tensor in _flat(source).items():
        assert torch.equal(_flat(target)[name], tensor) and _flat(target)[name].data_ptr() == places[name], name


def _other_type(target: dict[str, Any]) -> None:
    target["weight"] = target["weight"].double()


def _by_columns(target: dict[str, Any]) -> None:
    target["weight"] = target["weight"].t().contiguous().t()


def _on_one_memory(target: dict[str, Any]) -> None:
    target["tied"] = target["weight"]


@pytest.mark.parametrize(("change", "made"), [(_other_type, [9, MANY]), (_by_columns, [9, MANY]),
                                              (_on_one_memory, [9, MANY, MANY, MANY, MANY, 3 * MANY])])
def test_what_is_not_plainly_the_same_is_read_by_dcp(change: Callable[[dict[str, Any]], None], made: list[int], tmp_path: Path,
                                                     by_dcp: list[int]) -> None:
    source = _state(2.0)
    source["tied"] = source["weight"] + 1
    directory = saved(tmp_path / "root", DCP(state=source))
    target, theirs = ({**_state(5.0), "tied": torch.zeros(512, MANY // 512)} for _ in range(2))
    change(target)
    change(theirs)
    _load(directory, target)
    assert sorted(by_dcp) == made
    dcp.load(theirs, checkpoint_id=directory)
    assert all(torch.equal(tensor, _flat(theirs)[name]) for name, tensor in _flat(target).items())


def test_what_is_exported_is_what_was_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job writes into the file when its digest was found right and its tensors are described."""
    directory = saved(tmp_path / "root", DCP(state={"net": {"weight": torch.full((4 * MANY,), 3.0)}}))
    here = _here(directory)
    (part,) = weights.parts(here)
    assert torch.equal(weights.read(here, part).tensors["weight"], torch.full((4 * MANY,), 3.0))
    overlap = inplace.overlap

    def written(rooms: Any) -> bool:
        with (directory / "__0_0.distcp").open("r+b") as file:
            file.seek(2 * MANY)
            file.write(b"\1" * 64)
        return overlap(rooms)

    monkeypatch.setattr(inplace, "overlap", written)
    with pytest.raises(IntegrityError, match="was written into after its digest was compared"):
        weights.read(here, part)


def test_a_files_digest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though large tensors are read by us and small ones by DCP."""
    directory = saved(tmp_path / "root", DCP(state={"net": {"large": torch.ones(MANY), "small": torch.ones(3)}}))
    asked, differs = [], catalog.differs

    def noted(file: Any, entry: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(entry.path)
        return differs(file, entry, *args, **kwargs)

    monkeypatch.setattr(catalog, "differs", noted)
    here = _here(directory)
    (part,) = weights.parts(here)
    assert set(weights.read(here, part).tensors) == {"large", "small"}
    assert asked.count("__0_0.distcp") == 1


# -- pieces of tensors -----------------------------------------------------------------------------------------------------

_WHOLE = torch.arange(4096 * 256, dtype=torch.float32).reshape(4096, 256)


def _save_rows(rank: int, world: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    with distckpt.CheckpointManager(root) as manager:
        manager.save(1, DCP(state={"weight": distribute_tensor(_WHOLE.clone(), mesh, [Shard(0)])}))


def _load_as(rank: int, world: int, root: str) -> list[tuple[bool, bool]]:
    """Whether the values are right, and whether all was read into its place: by rows, by columns, whole."""
    mesh, narrow, made = init_device_mesh("cpu", (world,)), filesystem.narrow_tensor_by_index, list[int]()

    def noted(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        made.append(tensor.numel())
        return narrow(tensor, *args)

    filesystem.narrow_tensor_by_index = noted
    found = []
    with distckpt.CheckpointManager(root) as manager:
        for placement in (Shard(0), Shard(1), Replicate()):
            made.clear()
            target = distribute_tensor(torch.zeros_like(_WHOLE), mesh, [placement])
            manager.restore(DCP(state={"weight": target}))
            assert isinstance(target, DTensor)
            found.append((torch.equal(target.full_tensor(), _WHOLE), not made))
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_rows_that_other_ranks_saved_are_read_into_their_place_and_columns_by_dcp(world: int, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, _save_rows, root)
    columns = world == 1  # of one rank they are the whole
    assert values(run(world, _load_as, root)) == [[(True, True), (True, columns), (True, True)]] * world
