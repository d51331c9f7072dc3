"""A load straight into the tensors that wait for it gives what an ordinary one gives, or leaves all of it to that."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch

from distckpt import Shards
from distckpt.errors import ConfigError, IntegrityError
from distckpt.payloads import inplace, loadable, torchfile
from tests.support import restore, same_size, saved

MANY = 1 << 18


def state(fill: float) -> dict[str, Any]:
    big = torch.full((2 * MANY,), fill)
    return {"weight": torch.arange(MANY).reshape(512, -1) * fill, "half": torch.full((MANY,), fill, dtype=torch.bfloat16),
            "parameter": torch.nn.Parameter(torch.full((3, MANY), fill)), "part": big[MANY:] + fill,
            "inner": {"number": int(fill), "zero": torch.tensor(fill), "none": torch.empty(0), "flags": torch.ones(9) > fill},
            "text": f"{fill}"}


def stored(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    return file


def tensors(value: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in {**value, **value["inner"]}.items() if isinstance(v, torch.Tensor)}


def test_every_tensor_gets_its_values_where_it_stands() -> None:
    target, source = state(1.0), state(2.5)
    target["old"], places = "gone after it", {name: t.data_ptr() for name, t in tensors(target).items()}
    kept = tensors(target)
    assert inplace.fill(target, stored(source), "state")
    assert set(target) == set(source) and (target["text"], target["inner"]["number"]) == ("2.5", 2)
    for name, tensor in tensors(source).items():
        assert torch.equal(kept[name], tensor) and kept[name] is tensors(target)[name], name
        assert kept[name].data_ptr() == places[name], name
    assert target["parameter"].requires_grad and type(target["parameter"]) is torch.nn.Parameter


def test_a_slice_and_two_names_of_one_memory() -> None:
    whole = torch.arange(4.0 * MANY)
    target = {"slice": torch.zeros(MANY), "twin": torch.zeros(4 * MANY), "again": torch.zeros(4 * MANY)}
    assert inplace.fill(target, stored({"slice": whole[MANY:2 * MANY], "twin": whole, "again": whole}), "state")
    assert torch.equal(target["slice"], whole[MANY:2 * MANY]) and torch.equal(target["twin"], whole)
    assert torch.equal(target["again"], whole)


def _other_type(target: dict[str, Any], source: dict[str, Any]) -> None:
    source["weight"] = source["weight"].double()


def _not_contiguous(target: dict[str, Any], source: dict[str, Any]) -> None:
    target["weight"] = target["weight"].t().contiguous().t()


def _stored_transposed(target: dict[str, Any], source: dict[str, Any]) -> None:
    source["weight"] = source["weight"].t().contiguous().t()


def _conjugated(target: dict[str, Any], source: dict[str, Any]) -> None:
    target["c"] = torch.zeros(MANY, dtype=torch.complex64)
    source["c"] = torch.full((MANY,), 1 + 2j, dtype=torch.complex64).conj()


def _new_name(target: dict[str, Any], source: dict[str, Any]) -> None:
    source["more"] = torch.ones(5)


def _in_a_list(target: dict[str, Any], source: dict[str, Any]) -> None:
    target["list"], source["list"] = [torch.zeros(5)], [torch.ones(5)]


def _small(target: dict[str, Any], source: dict[str, Any]) -> None:
    for number in range(200):
        target[f"s{number}"], source[f"s{number}"] = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize("change", [_other_type, _not_contiguous, _stored_transposed, _conjugated, _new_name, _in_a_list, _small])
def test_what_is_not_plainly_the_same_is_left_untouched_and_loaded_as_ever(change: Callable[..., None], tmp_path: Path) -> None:
    target, source, expected = state(1.0), state(2.5), state(1.0)
    change(target, source)
    change(expected, state(2.5))
    assert not inplace.fill(target, stored(source), "state")
    assert torch.equal(target["half"], state(1.0)["half"]) and target["text"] == "1.0"
    saved(tmp_path / "root", Shards(source))
    assert restore(tmp_path / "root", Shards(target)) == 1
    loadable.fill(expected, source, "state")
    assert set(target) == set(expected)
    for name in ("weight", "half", "parameter", "c", "more"):
        assert name not in expected or torch.equal(target[name].resolve_conj(), expected[name].resolve_conj()), name


def _storage() -> Any:
    return torch.ones(9).untyped_storage()


@pytest.mark.parametrize("odd", [lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to_sparse_csr(), _storage,
                                 lambda: torch.quantize_per_tensor(torch.ones(9), 0.5, 0, torch.qint8)])
@pytest.mark.parametrize("there", [True, False], ids=["like it", "nothing like it"])
def test_what_fake_mode_can_only_describe_or_not_even_that_is_loaded_as_ever(odd: Callable[[], Any], there: bool,
                                                                             tmp_path: Path) -> None:
    target = {**state(1.0), "odd": odd() if there else None}
    assert not inplace.fill(target, stored({**state(2.5), "odd": odd()}), "state")
    assert torch.equal(target["half"], state(1.0)["half"])
    torch.save({**state(2.5), "odd": odd()}, tmp_path / "file")
    torchfile.read_into(_Alone(tmp_path), "file", target)  # type: ignore[arg-type]
    assert torch.equal(target["half"], state(2.5)["half"])
    found = target["odd"]
    assert list(found.untyped()) == list(odd()) if odd is _storage else str(found) == str(odd())


def test_a_file_that_somebody_compressed_is_torchs_to_read(tmp_path: Path) -> None:
    torch.save(state(2.5), tmp_path / "plain")
    with ZipFile(tmp_path / "plain") as plain, ZipFile(tmp_path / "file", "w", ZIP_DEFLATED) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    target = state(1.0)
    torchfile.read_into(_Alone(tmp_path), "file", target)  # type: ignore[arg-type]
    assert torch.equal(target["half"], state(2.5)["half"])
    with open(tmp_path / "file", "rb") as file:
        assert not inplace.fill(state(1.0), file, "state")


class _Alone:
    """A checkpoint without digests: nothing was found wrong with what stands there."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def open(self, name: str) -> Any:
        return open(self.place / name, "rb")


def test_another_byte_order_is_torchs_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    file = stored(state(2.5))
    monkeypatch.setattr(sys, "byteorder", "big")
    assert not inplace.fill(state(1.0), file, "state")


def test_the_format_before_the_zip_is_torchs_to_read() -> None:
    file = io.BytesIO()
    torch.save(state(2.5), file, _use_new_zipfile_serialization=False)
    assert not inplace.fill(state(1.0), file, "state")


def test_another_shape_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    saved(tmp_path / "root", Shards({**state(2.5), "part": torch.ones(7)}))
    target = state(1.0)
    with pytest.raises(ConfigError, match=r"state\['part'\] has shape"):
        Shards(target).load(_found(tmp_path), _ranks())
    assert inplace.fill(target, stored(state(2.5)), "state")


def test_a_damaged_file_touches_nothing(tmp_path: Path) -> None:
    directory = saved(tmp_path / "root", Shards(state(2.5)))
    path = next(directory.glob("shard*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    same_size(path, bytes(data))
    target = state(1.0)
    with pytest.raises(IntegrityError):
        Shards(target).load(_found(tmp_path), _ranks())
    assert all(torch.equal(a, b) for a, b in zip(tensors(target).values(), tensors(state(1.0)).values(), strict=True))


def test_a_file_that_ends_too_early_is_an_error() -> None:
    class Short(io.BytesIO):
        def readinto(self, room: Any) -> int:
            return 0 if len(room) > 1 << 16 else super().readinto(room)

    with pytest.raises(OSError, match="bytes before a tensor does"):
        inplace.fill({"x": torch.zeros(MANY)}, Short(stored({"x": torch.ones(MANY)}).getvalue()), "state")


def _found(place: Path) -> Any:
    from distckpt import catalog
    from distckpt.checkpoint import Checkpoint
    from distckpt.durable import REAL

    directory = str(place / "root" / "step-1")
    return Checkpoint(directory, catalog.read_marker(REAL, directory), rank=0, world=1)


def _ranks() -> Any:
    from distckpt.payloads.base import Ranks

    return Ranks(0, 1, lambda: None)
