"""Random states: what is saved is what comes next, CUDA's included (mocked: no test needs a GPU)."""

from __future__ import annotations

import io
import random

import numpy
import pytest
import torch

from distckpt.payloads.rng import Rng


def _draw() -> list[object]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(3).tolist()]


def _through_disk(state: dict[str, object]) -> dict[str, object]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def test_every_generator_goes_on_where_it_was() -> None:
    random.gauss(0, 1)
    numpy.random.randn()  # leaves a cached second value behind, in python's generator too
    state = _through_disk(Rng().state_dict())
    expected = _draw()
    _draw()
    Rng().load_state_dict(state)
    assert _draw() == expected


class FakeCuda:
    """A device whose generators are lists; states are handed out as byte tensors."""

    def __init__(self, devices: int) -> None:
        self.states = [torch.full((16,), d, dtype=torch.uint8) for d in range(devices)]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: [s.clone() for s in self.states])
        patch.setattr(torch.cuda, "set_rng_state_all", self._set)

    def _set(self, states: list[torch.Tensor]) -> None:
        self.states = [s.clone() for s in states]


def test_cuda_generators_are_saved_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(2)
    cuda.install(monkeypatch)
    state = _through_disk(Rng().state_dict())
    cuda.states = [torch.full((16,), 99, dtype=torch.uint8)] * 2
    Rng().load_state_dict(state)
    assert [int(s[0]) for s in cuda.states] == [0, 1]


def test_another_number_of_devices_keeps_the_seed_and_says_so(monkeypatch: pytest.MonkeyPatch,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    FakeCuda(2).install(monkeypatch)
    state = _through_disk(Rng().state_dict())
    cuda = FakeCuda(1)
    cuda.states = [torch.full((16,), 7, dtype=torch.uint8)]
    cuda.install(monkeypatch)
    Rng().load_state_dict(state)
    assert int(cuda.states[0][0]) == 7 and "2 CUDA devices" in caplog.text


def test_a_state_from_a_machine_without_cuda_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    state = _through_disk(Rng().state_dict())
    assert "cuda" not in state
    FakeCuda(1).install(monkeypatch)
    Rng().load_state_dict(state)


def test_reseeding_is_reproducible_and_differs_by_rank() -> None:
    states = [Rng().state_dict() for _ in range(2)]
    drawn = {}
    for rank in (0, 1, 2, 0):
        Rng().reseed(states, rank, 3)
        values = _draw()
        assert drawn.setdefault(rank, values) == values
    assert len({str(v) for v in drawn.values()}) == 3
