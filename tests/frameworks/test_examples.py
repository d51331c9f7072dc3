"""The examples of ``manager.saving``: each is run as it stands, killed in the middle of a save, started again."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

import distckpt
from tests.zygote import Zygote

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"

# In front of an example: one rank dies when it has left the block of that step, before its files are durable and acked.
KILL = """
import os, signal
from distckpt.saving.files import RankFiles
_finish = RankFiles.finish
def _strike(self):
    if self.rank == {rank} and self._directory.endswith("/step-{step}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return _finish(self)
RankFiles.finish = _strike
"""

TOLD = re.compile(r"from (\d+) to (\d+): (.*)")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    found = Zygote()
    yield found
    found.close()


def told(text: str) -> tuple[int, int, str]:
    found = TOLD.search(text)
    assert found is not None, text
    return int(found[1]), int(found[2]), found[3]


def program(name: str) -> str:
    """Without its ``from __future__``, which must come first and is not needed to run."""
    return (EXAMPLES / name).read_text().replace("from __future__ import annotations\n", "")


@pytest.mark.xdist_group("examples")
@pytest.mark.parametrize("name", ["titan_loop.py", "megatron_async.py", "rl_models.py"])
def test_an_example_that_loses_a_rank_in_a_save_ends_as_if_it_had_not(name: str, zygote: Zygote, tmp_path: Path) -> None:
    text = program(name)
    whole = [told(end.text) for end in zygote.run(tmp_path, 2, text, tmp_path / "whole", 8)]
    assert [w[:2] for w in whole] == [(0, 8)] * 2
    first = zygote.run(tmp_path, 2, KILL.format(step=6, rank=1) + text, tmp_path / "root", 8)
    assert first[1].code == -9 and first[0].code != 0, first[0].text
    assert [c.step for c in distckpt.open(tmp_path / "root").checkpoints()][:2] == [4, 2]
    again = [told(end.text) for end in zygote.run(tmp_path, 2, text, tmp_path / "root", 8)]
    assert [a[:2] for a in again] == [(4, 8)] * 2 and [a[2] for a in again] == [w[2] for w in whole]
    assert [c.step for c in distckpt.open(tmp_path / "root").checkpoints()][:2] == [8, 6]


# Around an example that has no process group of torch's: nobody makes one for it, on any thread.
NO_GROUP = """
import torch.distributed
def _refuse(*args, **options):
    raise AssertionError("somebody makes a process group")
torch.distributed.init_process_group = torch.distributed.new_group = _refuse
"""
STILL_NONE = """
assert not torch.distributed.is_initialized()
print("\\nno process group\\n", end="", flush=True)
"""
"""Lines of its own: what two ranks print may come in between what one of them prints and the end of its line."""


@pytest.mark.xdist_group("examples")
def test_the_mpi_example_that_loses_a_rank_in_a_save_ends_as_if_it_had_not(tmp_path: Path) -> None:
    def mpiexec(before: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", sys.executable, "-c",
                   NO_GROUP + before + program("mpi_numpy.py") + STILL_NONE, str(tmp_path / "root"), "50"]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)

    first = mpiexec(KILL.format(step=30, rank=1))
    assert first.returncode != 0
    assert [c.step for c in distckpt.open(tmp_path / "root").checkpoints()] == [20, 10]
    again = mpiexec("")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("no process group") == 2, again.stdout
    begun, ended, said = told(again.stdout)
    sys.path.insert(0, str(EXAMPLES))
    try:
        import mpi_numpy  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLES))
    ring = numpy.concatenate([mpi_numpy.start(rank) for rank in range(2)])
    for _ in range(50):
        ring = mpi_numpy.advance(ring, ring[-1], ring[0])
    assert (begun, ended, said) == (20, 50, f"field {ring.tobytes().hex()[-64:]}")
