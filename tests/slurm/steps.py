"""A job of srun's ranks without torch.distributed: ``steps.py FOLDER TOTAL``; each step is saved, under ``manager.saving``.

In the first run of a job every rank is held, until the file ``go`` is there, in the middle of step HELD, or of the save after it
(HOLD=save). A task of a job array has a folder of its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import distckpt
from distckpt.launch.environment import STORE

HELD = 2


def main(folder: Path, total: int) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    launch = distckpt.launch.detect()
    root = folder / os.environ.get("ROOT", "root")

    def held(where: str) -> None:
        if launch.restart == 0 and os.environ.get("HOLD", "step") == where:
            (folder / f"at.{launch.rank}").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)

    timeouts = distckpt.Timeouts(arrive=30, progress=8, visible=10, close=20)
    with distckpt.CheckpointManager(root, keep_last=3, timeouts=timeouts) as manager:
        found = manager.resume().checkpoint
        started = step = found.step if found is not None else 0
        while step < total:
            todo = manager.poll(step)
            if todo.stop:
                break
            if step == HELD:
                held("step")
            step += 1
            with manager.saving(step) as files:
                Path(files.mine("state.txt")).write_text(f"{step} of rank {manager.rank}")
                if step == HELD + 1:
                    held("save")
        (folder / f"run-{launch.restart}.rank-{launch.rank}.json").write_text(json.dumps({
            "started": started, "ended": step, "stopped": manager.stopped, "kind": manager._group.kind, "world": manager.world,
            "port": launch.port(STORE), "target": launch.target}))
        return distckpt.launch.finish(manager)


if __name__ == "__main__":
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    sys.exit(main(Path(sys.argv[1], f"task-{task}") if task else Path(sys.argv[1]), int(sys.argv[2])))
