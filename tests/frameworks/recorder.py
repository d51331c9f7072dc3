"""A rank that writes down which signals it gets, with a data worker that does the same: ``recorder.py FOLDER``. No torch.

It outlives them all, and ends when ``leave.RANK`` is there, with the exit code in it; the worker ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(folder: Path) -> int:
    rank = os.environ.get("RANK") or os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    me = rank

    def got(number: int, frame: object) -> None:
        (folder / f"{signal.Signals(number).name}.{me}").touch()

    for name in ("SIGUSR1", "SIGTERM"):
        signal.signal(signal.Signals[name], got)
    if os.fork() == 0:
        me = f"{rank}-worker"
    (folder / f"new.{me}").write_text(str(os.getpid()))
    (folder / f"new.{me}").rename(folder / f"pid.{me}")
    leave = folder / f"leave.{rank}"
    parent = os.getppid()
    while not leave.exists() and (me == rank or os.getppid() == parent):
        time.sleep(0.05)
    (folder / f"ended.{me}").touch()
    return int(leave.read_text()) if me == rank else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[-1])))  # deepspeed puts its --local_rank before it
