"""The layer of real file systems in short: some of each kind of cut hold, and a library that forgets a sync is caught.

``scripts/prove`` runs the whole of it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from distckpt import CheckpointManager, DistckptError, Shards
from distckpt.options import Seams
from distckpt.testing.faults import FaultyFiles, fail
from scripts.proof import disks
from scripts.proof.l3 import run
from scripts.proof.l3_program import MUTANTS, WRITER_FIRST
from scripts.proof.l3_shutdown import expected


@pytest.fixture(autouse=True)
def _possible() -> None:
    lacking = disks.missing("/dev/fuse", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs")
    if lacking:
        pytest.skip(lacking)


@pytest.mark.parametrize("sweep, most, seconds", [("shutdown", 30, 60), ("replay", 9, 60), ("full", 8, 60)])
def test_nothing_that_was_promised_is_lost(sweep: str, most: int, seconds: float) -> None:
    found = run(sweep, seconds, seed=7, most=most)
    print(found.covers)
    assert not found.violations and not found.hangs, "\n".join(found.violations)
    assert found.runs >= most // 2, "too slow to have shown anything"


def test_a_library_that_forgets_a_sync_is_caught() -> None:
    mutant = next(iter(MUTANTS))
    found = run("shutdown", 60, seed=1, most=40, mutant=mutant)
    print(found.covers)
    assert found.violations, f"{found.runs} cuts did not show that {mutant}"


def test_a_writer_process_that_forgets_its_syncs_is_caught_by_the_first_life_with_every_option_on() -> None:
    found = run("shutdown", 60, seed=1, most=4, mutant=WRITER_FIRST)
    print(found.covers)
    assert found.violations and all("every option on" in line for line in found.violations), found.violations


@pytest.mark.parametrize("gone", [True, False])
def test_a_disk_that_is_gone_while_a_checkpoint_is_loaded_is_no_alarm_and_wrong_bytes_are(gone: bool, tmp_path: Path) -> None:
    """What the layer once took for a violation: the janitor's operation was the one before which the cut came."""
    files = FaultyFiles()
    with CheckpointManager(tmp_path, seams=Seams(files=files)) as manager:
        path = manager.save(1, Shards({"w": torch.ones(300)})).path
        shard, = Path(path).glob("*.pt")
        if gone:
            files.faults.append(fail(errno.EIO, op="read", path=".pt", forever=True))
        else:
            with open(shard, "r+b") as out:
                out.seek(os.path.getsize(shard) // 2)
                out.write(b"?")
        with pytest.raises(DistckptError) as raised:
            manager.restore(Shards({"w": torch.zeros(300)}))
        assert expected({"type": type(raised.value).__name__, "text": str(raised.value)}) is gone
