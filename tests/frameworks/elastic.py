"""For torchrun: rank 1 of the first generation dies in the middle of the second save. ``elastic.py FOLDER [zombie]``.

``zombie``: it dies when rank 0 stands before the marker of that save; rank 0 outlives what torchrun does to it, and goes on with
the save when the second generation has resumed and saved that step, which then waits for how it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

import distckpt
from distckpt.durable import REAL, Files
from distckpt.options import Seams
from distckpt.testing.faults import FaultyFiles, Operation, call

TOTAL = 4
LIMIT = 60.0


def wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.02)


def zombie_disk(folder: Path, rank: int) -> Files:
    """Of the first generation."""
    def stand(operation: Operation) -> None:
        (folder / "stands").touch()
        wait_for(folder / "woken")

    def die() -> None:
        wait_for(folder / "stands")
        os._exit(1)

    if rank == 1:
        threading.Thread(target=die, daemon=True).start()
        return REAL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return FaultyFiles(REAL, call(stand, op="open", path=lambda path: "/step-2/commit.json" in path))


def main(folder: Path, zombie: bool) -> None:
    dist.init_process_group("gloo")
    launch = distckpt.launch.detect()
    disk = zombie_disk(folder, launch.rank) if zombie and launch.elastic == 0 else REAL
    with distckpt.CheckpointManager(folder / "root", seams=Seams(files=disk)) as manager:
        found = manager.resume().checkpoint
        started = step = found.step if found is not None else 0
        while step < TOTAL:
            step += 1
            with manager.saving(step) as files:
                Path(files.mine("x")).write_text(f"{step} of generation {launch.elastic}")
                if launch.elastic == 0 and step == 2 and launch.rank == 1 and not zombie:
                    os._exit(1)
            if zombie and launch.elastic == 1 and step == 2:
                (folder / "woken").touch()
                wait_for(folder / "zombie")
    (folder / f"ended.{launch.rank}").write_text(json.dumps([launch.kind, launch.elastic, started, step]))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:] == ["zombie"])
    except distckpt.DistckptError as error:
        if sys.argv[2:] != ["zombie"] or distckpt.launch.detect().elastic or distckpt.launch.detect().rank:
            raise
        Path(sys.argv[1], "told").write_text(str(error))
        Path(sys.argv[1], "told").rename(Path(sys.argv[1], "zombie"))
        os._exit(1)
