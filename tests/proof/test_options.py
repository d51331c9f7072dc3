"""Every option on, in the simulation: speed costs no promise, and what would break one of these options' promises is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distckpt.durable import Files
from distckpt.marker import FileEntry
from distckpt.retention import KeepBest
from distckpt.saving.links import Twins
from distckpt.saving.staging import Copy
from distckpt.testing.simulation import ROOT, Told
from scripts.proof.cases import Case, sweep
from scripts.proof.scenarios import SCENARIOS, options
from tests.proof.stories import all_well, well


def test_every_option_is_on_and_at_work() -> None:
    """Files are linked, the copy was not done when ``save`` returned, and both policies took something away."""
    left: list[bool] = []

    def program(manager: Told, rank: int) -> None:
        options(manager, rank)
        left.append(manager._behind._copying is not None)

    simulation = SCENARIOS["options"].simulation(2, 1)
    well(simulation.job(program))
    assert left == [True, True]
    disk = simulation.files
    assert {item.name for item in disk.scan(ROOT) if item.name.startswith("step-")} == {"step-2", "step-3", "step-2-rolling"}
    for rank in (0, 1):
        frozen, model = (f"{part}/data.rank-{rank:05d}-of-00002.bin" for part in ("frozen", "model"))
        assert len({disk.stat(f"{ROOT}/step-{step}/{frozen}").inode for step in (2, 3)}) == 1
        assert len({disk.stat(f"{ROOT}/step-{step}/{model}").inode for step in (2, 3)}) == 2
    assert b'"sha256:' in disk.read(f"{ROOT}/step-3/commit.json", 1 << 20)


@pytest.mark.parametrize("scenario, stride", [("options", 149), ("undigested", 211), ("local-options", 307)])
def test_killed_failing_and_cut_at_many_operations(scenario: str, stride: int) -> None:
    all_well(sweep(scenario, 2, ["kill", "fail", "lost", "power"], stride, seed=4, offset=9))


# -- broken on purpose ---------------------------------------------------------------------------------------------------

def _no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer steps while its state is being copied."""
    monkeypatch.setattr(Copy, "wait", lambda self, gone: None)


def _believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had this name before has its bytes now."""
    real = Twins.link

    def link(self: Twins, files: Files, relative: str, size: int, digest: str, path: str) -> bool:
        assert self._entries is not None
        self._entries[relative] = FileEntry(relative, size, digest, 0)
        return real(self, files, relative, size, digest, path)

    monkeypatch.setattr(Twins, "link", link)


def _best_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeepBest, "__call__", lambda self, records: {})


@pytest.mark.parametrize("break_it, wrong", [(_no_fence, "I1"), (_believed, "I2"), (_best_forgotten, "I5")])
def test_a_broken_option_is_seen(break_it: Callable[[pytest.MonkeyPatch], None], wrong: str,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("options", seed=1)
    assert case.run().violations == []
    break_it(monkeypatch)
    assert any(line.startswith(wrong) for line in case.run().violations)
