"""How a rank's process ends when a save failed and nobody catches the error: by that error, and by nothing else.

Real interpreters with a real end (the harness's ranks leave by ``os._exit``), because this is about the end: rank 0 takes
its store with it, and a thread that is inside the store when the interpreter ends aborts the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distckpt.coordination.pulse import bye_key
from distckpt.testing.faults import FaultyFiles, call
from tests.harness import free_port, values
from tests.inprocess import Job, write

PROGRAM = """
import os, signal, sys
import torch.distributed as dist
import distckpt

dist.init_process_group("gloo")
rank, bad, how = dist.get_rank(), int(sys.argv[2]), sys.argv[3]
with distckpt.CheckpointManager(sys.argv[1]) as manager:
    with manager.saving(1) as files:
        with open(files.mine("x.bin"), "wb") as out:
            out.write(b"x")
        if rank == bad and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == bad:
            raise ValueError("boom")
"""


def _run(folder: Path, world: int, bad: int, how: str) -> list[tuple[int, str]]:
    port = str(free_port())
    command = [sys.executable, "-c", PROGRAM, str(folder / "root"), str(bad), how]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                                   "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}) for rank in range(world)]
    try:
        texts = [process.communicate(timeout=60)[1] for process in ranks]
        return [(process.returncode, text) for process, text in zip(ranks, texts, strict=True)]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize("bad", [0, 1])
def test_every_rank_ends_with_the_save_error(tmp_path: Path, bad: int) -> None:
    for code, text in _run(tmp_path, 3, bad, "raises"):
        assert code == 1, text
        assert "distckpt.errors.SaveError: save of step 1 (attempt" in text, text
        assert f"failed on rank {bad}" in text
        assert "CoordinatorLost" not in text


def test_the_others_end_with_the_loss_of_a_killed_rank(tmp_path: Path) -> None:
    ended = _run(tmp_path, 3, 1, "killed")
    assert ended[1][0] == -signal.SIGKILL
    for code, text in (ended[0], ended[2]):
        assert code == 1, text
        assert "distckpt.errors.RankLost: save of step 1: rank 1" in text, text


def test_the_root_is_free_for_the_next_job_when_any_rank_has_left(tmp_path: Path) -> None:
    """Rank 0 gives it back before it says goodbye, which is what the others wait for."""
    said: list[bool] = []
    files = FaultyFiles()
    job = Job(tmp_path / "root", files={0: files})
    files.faults = [call(lambda _: said.append(job.threads.source().has(bye_key(1))), op="open", path="released")]
    values(job.run(lambda manager: write(manager, 1)))
    assert said == [False]


def test_who_has_closed_has_no_thread_in_the_store(tmp_path: Path) -> None:
    """Nor has rank 0, whose store it is: each waits for its listener, which hears the goodbye."""
    before = set(threading.enumerate())
    values(Job(tmp_path / "root", 3).run(lambda manager: write(manager, 1)))
    assert [t.name for t in threading.enumerate() if t not in before and t.name.startswith("distckpt")] == []
