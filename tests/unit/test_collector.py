"""The garbage collector, beside the reports of very many ranks."""

from __future__ import annotations

import gc

import pytest

from distckpt.coordination.collector import held_off


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
