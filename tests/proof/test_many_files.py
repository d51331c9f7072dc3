"""Files that are synced together, with the whole library in the simulation: by threads that any schedule may delay."""

from __future__ import annotations

from typing import Any

import pytest

from distckpt.payloads.base import Ranks
from distckpt.saving.files import RankFiles
from distckpt.saving.piecewriter import PieceWriter
from distckpt.saving.unsynced import _FILES
from distckpt.testing.simulation import Simulation, Told
from tests.proof.stories import well

COUNT = _FILES + 20
"""One batch that is full, and a second one that the end of the save finds: both by threads."""


class Many:
    """Some small files of each rank, one after the other."""

    collective = False
    members: list[str] = []

    def __init__(self, step: int) -> None:
        self.step = step

    def check(self) -> None:
        return None

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        for number in range(COUNT):
            with files.writer(f"{number}.bin") as out:
                out.write(f"{number} of step {self.step} by rank {ranks.rank}".encode())

    def load(self, checkpoint: Any, ranks: Ranks) -> None:
        raise NotImplementedError


def two_saves(manager: Told, rank: int) -> None:
    manager.resume(verify="digest")
    for step in (1, 2):
        manager.save(step, Many(step))


def _operations() -> int:
    run = Simulation(2, seed=0).job(two_saves)
    well(run)
    return run.total


@pytest.mark.parametrize("kind", ["power", "kill:1", "fail:1"])
def test_whatever_is_cut_while_many_files_are_synced_nothing_that_was_told_is_lost(kind: str) -> None:
    total = _operations() if kind == "power" else _operations() // 2  # the others count those of rank 1
    fired = 0
    for at in range(30, total, max(1, total // 40)):
        run = Simulation(2, seed=at, faults=[f"{kind}@{at}"]).run(two_saves)
        fired += run.fired
        assert not run.violations, (at, run.violations)
    assert fired > 10


def test_a_batch_of_which_one_is_not_synced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real, forgotten = PieceWriter.sync, f"/{_FILES // 2}.rank-00001-of-00002.bin"

    def sync(self: PieceWriter) -> None:
        if not self.path.endswith(forgotten):
            real(self)
        else:
            self.release()
            self.durable = True

    monkeypatch.setattr(PieceWriter, "sync", sync)
    total = _operations()
    assert any(Simulation(2, seed=at, faults=[f"power@{at}"], cuts=8).run(two_saves).violations
               for at in range(total, total // 2, -max(1, total // 40)))
