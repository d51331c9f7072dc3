"""The garbage collector, beside the reports of very many ranks."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from distckpt.coordination import collector
from distckpt.coordination.collector import held_off
from distckpt.durable import Files, Stat
from distckpt.marker import FileEntry
from distckpt.patience import NONE
from distckpt.saving.compare import compare


@pytest.mark.parametrize(("ranks", "inside"), [(1023, True), (1024, False)])
def test_it_is_held_off_for_many_ranks_and_goes_on_whatever_happens_inside(ranks: int, inside: bool) -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), held_off(ranks):
        assert gc.isenabled() is inside
        raise KeyError
    assert gc.isenabled()


def test_one_that_the_program_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with held_off(1 << 20):
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_on_while_rank_0_looks_at_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A disk that hangs does not let the garbage of the training grow."""
    class Looking(Files):
        def stat(self, path: str) -> Stat:
            on.append(gc.isenabled())
            return super().stat(path)

    on: list[bool] = []
    monkeypatch.setattr(collector, "_MANY", 1)
    (tmp_path / "a").write_bytes(b"1")
    assert compare(Looking(), str(tmp_path), {0: [FileEntry("a", 1, None, 0)]}, {0: "host"}, NONE) == ([], None)
    assert on and all(on)
