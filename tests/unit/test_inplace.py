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
from distckpt.payloads import inplace, loadable, safefile, torchfile
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


def filled(target: dict[str, Any], file: Any) -> bool:
    value = inplace.read(target, [file], torchfile.describe)
    if value is not None:
        loadable.fill(target, value[0], "state")
    return value is not None


def tensors(value: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in {**value, **value["inner"]}.items() if isinstance(v, torch.Tensor)}


def test_every_tensor_gets_its_values_where_it_stands() -> None:
    target, source = state(1.0), state(2.5)
    target["old"], places = "gone after it", {name: t.data_ptr() for name, t in tensors(target).items()}
    kept = tensors(target)
    assert filled(target, stored(source))
    assert set(target) == set(source) and (target["text"], target["inner"]["number"]) == ("2.5", 2)
    for name, tensor in tensors(source).items():
        assert torch.equal(kept[name], tensor) and kept[name] is tensors(target)[name], name
        assert kept[name].data_ptr() == places[name], name
    assert target["parameter"].requires_grad and type(target["parameter"]) is torch.nn.Parameter


def test_a_slice_and_two_names_of_one_memory() -> None:
    whole = torch.arange(4.0 * MANY)
    target = {"slice": torch.zeros(MANY), "twin": torch.zeros(4 * MANY), "again": torch.zeros(4 * MANY)}
    assert filled(target, stored({"slice": whole[MANY:2 * MANY], "twin": whole, "again": whole}))
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
    for number in range(600):
        target[f"s{number}"], source[f"s{number}"] = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize("change", [_other_type, _not_contiguous, _stored_transposed, _conjugated, _new_name, _in_a_list, _small])
def test_what_is_not_plainly_the_same_is_left_untouched_and_loaded_as_ever(change: Callable[..., None], tmp_path: Path) -> None:
    target, source, expected = state(1.0), state(2.5), state(1.0)
    change(target, source)
    change(expected, state(2.5))
    assert not filled(target, stored(source))
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
    assert not filled(target, stored({**state(2.5), "odd": odd()}))
    assert torch.equal(target["half"], state(1.0)["half"])
    torch.save({**state(2.5), "odd": odd()}, tmp_path / "file.pt")
    Shards(target, "file").load(_Alone(tmp_path), _ranks())  # type: ignore[arg-type]
    assert torch.equal(target["half"], state(2.5)["half"])
    found = target["odd"]
    assert list(found.untyped()) == list(odd()) if odd is _storage else str(found) == str(odd())


def test_a_file_that_somebody_compressed_is_torchs_to_read(tmp_path: Path) -> None:
    torch.save(state(2.5), tmp_path / "plain")
    with ZipFile(tmp_path / "plain") as plain, ZipFile(tmp_path / "file.pt", "w", ZIP_DEFLATED) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    target = state(1.0)
    Shards(target, "file").load(_Alone(tmp_path), _ranks())  # type: ignore[arg-type]
    assert torch.equal(target["half"], state(2.5)["half"])
    with open(tmp_path / "file.pt", "rb") as file:
        assert not filled(state(1.0), file)


class _Alone:
    """A checkpoint without digests: nothing was found wrong with what stands there."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def name_of(self, name: str, rank: int | None = None) -> str:
        return name

    def has(self, name: str) -> bool:
        return False

    def open(self, name: str, digest: bool) -> Any:
        return open(self.place / name, "rb")


def test_another_byte_order_is_torchs_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    file = stored(state(2.5))
    safe = io.BytesIO(_safe({"x": torch.ones(9)}))
    assert safefile.describe(safe) is not None
    monkeypatch.setattr(sys, "byteorder", "big")
    assert not filled(state(1.0), file)
    assert safefile.describe(safe) is None


def test_the_format_before_the_zip_is_torchs_to_read() -> None:
    file = io.BytesIO()
    torch.save(state(2.5), file, _use_new_zipfile_serialization=False)
    assert not filled(state(1.0), file)


def test_another_shape_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    saved(tmp_path / "root", Shards({**state(2.5), "part": torch.ones(7)}))
    target = state(1.0)
    with pytest.raises(ConfigError, match=r"state\['part'\] has shape"):
        Shards(target).load(_found(tmp_path), _ranks())
    assert filled(target, stored(state(2.5)))


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


def test_a_file_that_ends_too_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inplace, "read_at", lambda file, room, offset, wait: len(room) - 1)
    with pytest.raises(OSError, match="it ends 1 bytes before a tensor does"):
        filled({"x": torch.zeros(MANY)}, stored({"x": torch.ones(MANY)}))


def test_an_older_torch_describes_in_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchfile, "_META", False)
    test_every_tensor_gets_its_values_where_it_stands()
    test_a_slice_and_two_names_of_one_memory()


def test_one_memory_for_two_tensors_of_the_file_is_filled_in_their_order() -> None:
    one = torch.zeros(MANY)
    for target in ({"a": one, "b": one}, {"a": one[:MANY // 2], "b": one[MANY // 4:]}):
        source = {name: torch.full_like(tensor, fill) for fill, (name, tensor) in enumerate(target.items())}
        assert not filled(target, stored(source))
    tied = torch.rand(MANY)
    assert filled({"a": one, "b": one}, stored({"a": tied, "b": tied})) and torch.equal(one, tied)


class _Model(torch.nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(512, 512)
        self.norm = torch.nn.BatchNorm1d(512)
        self.last = torch.nn.Linear(512, 512, bias=False)
        if tied:  # safetensors stores no memory under two names
            self.last.weight = self.first.weight
        self.register_buffer("passing", torch.zeros(1 << 16), persistent=False)
        self.seen: list[Any] = []
        self._register_load_state_dict_pre_hook(lambda state, *rest: self.seen.append((state, rest[1])))


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
@pytest.mark.parametrize("dedup", [None, "link"])
def test_a_module_is_filled_where_it_stands_and_its_own_hooks_run(kind: str, dedup: Any, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = _Model(kind == "torch"), _Model(kind == "torch")
    saved(tmp_path / "root", Shards(source, format=kind), dedup=dedup)
    monkeypatch.setattr(torchfile, "whole", None)
    monkeypatch.setattr(safefile, "whole", None)
    monkeypatch.setattr(inplace, "_WORTH", 0)
    places = [p.data_ptr() for p in target.parameters()]
    Shards(target, format=kind).load(_found(tmp_path), _ranks())
    assert places == [p.data_ptr() for p in target.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True))
    ((state, versions),) = target.seen
    assert state["first.weight"] is target.first.weight
    assert kind == "safetensors" or dedup or versions == {"version": 1}, "the file's own"


def test_what_a_module_lacks_is_said_by_the_module(tmp_path: Path) -> None:
    saved(tmp_path / "root", Shards(torch.nn.Linear(512, 512)))
    with pytest.raises(RuntimeError, match='Unexpected key.*"bias"'):
        Shards(torch.nn.Linear(512, 512, bias=False)).load(_found(tmp_path), _ranks())


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_of_several_files_a_damaged_one_leaves_them_all_unread(format: str, tmp_path: Path) -> None:
    source = {"a": torch.ones(1 << 19), "b": torch.ones(1 << 19)}
    directory = saved(tmp_path / "root", Shards(source, format=format), dedup="link")
    last = max(directory.glob("*.part-*"))
    assert "part-00002" in last.name
    data = bytearray(last.read_bytes())
    data[-5000] ^= 1
    # safetensors' digests are resume's to compare, with verify="digest"; sizes are compared always
    last.write_bytes(data if format == "torch" else data[:-1])
    target = {name: torch.zeros(1 << 19) for name in source}
    with pytest.raises(IntegrityError):
        Shards(target, format=format).load(_found(tmp_path), _ranks())
    assert not any(tensor.any() for tensor in target.values())


# -- safetensors ---------------------------------------------------------------------------------------------------------


def _safe(value: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    return save(value, {"a": "note"})


def test_every_tensor_of_safetensors_is_described_where_safetensors_finds_it() -> None:
    from safetensors.torch import load

    data = _safe({name: torch.arange(5).to(kind).reshape(1, -1) for name, kind in safefile._TYPES.items()}
                 | {"none": torch.empty(0, 3), "zero": torch.tensor(7)})
    target = {name: torch.zeros_like(tensor) for name, tensor in load(data).items()}
    file = io.BytesIO(data)
    (value,) = inplace.read(target | {"large": torch.empty(1 << 24)}, [file], safefile.describe) or [{}]
    assert set(value) == set(target) and all(value[name] is tensor for name, tensor in target.items())
    for name, tensor in load(data).items():
        assert torch.equal(target[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("header", [
    b"", b"{", b"[]", b'{"x": 3}', b'{"x": {}}', b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
    *(b'{"x": {"dtype": "%s", "shape": %s, "data_offsets": %s}}' % odd for odd in (
        (b"F9", b"[1]", b"[0, 4]"), (b"F32", b"[2]", b"[0, 4]"), (b"F32", b"[-1]", b"[4, 0]"), (b"F32", b"[1]", b"[-4, 0]"),
        (b"F32", b"[1]", b"[1, 5]"), (b"F32", b'"a"', b"[0, 4]"))),
    b"[" * 100_000])
def test_a_header_that_is_not_safetensors_is_left_to_safetensors(header: bytes) -> None:
    assert safefile.describe(io.BytesIO(len(header).to_bytes(8, "little") + header + b"1234")) is None
    assert safefile.describe(io.BytesIO((len(header) + 9).to_bytes(8, "little") + header + b"1234")) is None


def _found(place: Path) -> Any:
    from distckpt import catalog
    from distckpt.checkpoint import Checkpoint
    from distckpt.durable import REAL

    directory = str(place / "root" / "step-1")
    return Checkpoint(directory, catalog.read_marker(REAL, directory), rank=0, world=1)


def _ranks() -> Any:
    from distckpt.payloads.base import Ranks

    return Ranks(0, 1, lambda: None)
