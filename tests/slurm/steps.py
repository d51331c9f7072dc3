"""A job of srun's ranks without torch.distributed, or of a launcher's with it: ``steps.py FOLDER TOTAL``; each step is saved,
under ``manager.saving``.

In the first run of a job every rank is held, until the file ``go`` is there, in the middle of step HELD, or of the save after it
(HOLD=save); or one rank, HOLD_RANK, before it writes that save's marker (HOLD=marker), publishes it (HOLD=publish), or takes
step 1 away in its rotation (HOLD=rotate). START: a file to wait for before the manager is made. STEP_SECONDS: how long a step
takes; KEEP: how many checkpoints stay; STOP_GRACE: the manager's grace; POLICY: that of ``finish``. A rank that gets USR1 leaves
``signalled.RANK``. A task of a job array has a folder of its own.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed

import distckpt
from distckpt.durable import REAL, Files
from distckpt.launch.environment import STORE
from distckpt.options import Seams
from distckpt.testing.faults import FaultyFiles, Operation, call

HELD = 2


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def main(folder: Path, total: int) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    launch = distckpt.launch.detect()
    root = folder / os.environ.get("ROOT", "root")

    def held(where: str) -> None:
        if launch.restart == 0 and os.environ.get("HOLD", "step") == where:
            (folder / f"at.{launch.rank}").touch()
            wait_for(folder / "go")

    def disk() -> Files:
        """Real, but that this rank may be held before an operation of the commit."""
        hold, name = os.environ.get("HOLD", ""), f"step-{HELD + 1}"
        if hold not in ("marker", "publish", "rotate") or os.environ.get("HOLD_RANK") != str(launch.rank):
            return REAL

        def stop(operation: Operation) -> None:
            held(hold)

        if hold == "publish":
            return FaultyFiles(REAL, call(stop, op=("rename", "exchange"), path=lambda path: path == f"{root}/{name}"))
        if hold == "rotate":
            return FaultyFiles(REAL, call(stop, op="rename", path=lambda path: "/trash/" in path and "/step-1." in path))
        return FaultyFiles(REAL, call(stop, op="open", path=lambda path: f"/{name}/commit.json" in path))

    if "START" in os.environ:
        (folder / f"ready.{launch.rank}").touch()
        wait_for(Path(os.environ["START"]))
    (folder / f"pid.{launch.restart}.{launch.rank}").write_text(str(os.getpid()))
    signal.signal(signal.SIGUSR1, lambda *ignored: (folder / f"signalled.{launch.rank}").touch())
    if launch.kind in ("torchrun", "deepspeed"):
        torch.distributed.init_process_group("gloo")
    try:
        return train(launch, folder, root, total, held, disk())
    except distckpt.DistckptError as error:
        (folder / f"error-{launch.restart}.rank-{launch.rank}").write_text(str(error))
        raise


def train(launch: distckpt.launch.Launch, folder: Path, root: Path, total: int, held: Callable[[str], None], files: Files) -> int:
    timeouts = distckpt.Timeouts(arrive=30, progress=8, visible=10, close=20)
    keep = int(os.environ.get("KEEP", "3"))
    with distckpt.CheckpointManager(root, keep_last=keep, timeouts=timeouts, storage=os.environ.get("STORAGE", "shared"),
                                    seams=Seams(files=files), grace=float(os.environ.get("STOP_GRACE", "600"))) as manager:
        found = manager.resume().checkpoint
        started = step = found.step if found is not None else 0
        while step < total:
            todo = manager.poll(step)
            if todo.stop:
                break
            if step == HELD:
                held("step")
            step += 1
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
            with manager.saving(step) as files:
                Path(files.mine("state.txt")).write_text(f"{step} of rank {manager.rank}")
                if step == HELD + 1:
                    held("save")
        (folder / f"run-{launch.restart}.rank-{launch.rank}.json").write_text(json.dumps({
            "started": started, "ended": step, "stopped": manager.stopped, "kind": manager._group.kind, "world": manager.world,
            "port": launch.port(STORE), "target": launch.target, "launcher": launch.kind}))
        return distckpt.launch.finish(manager, policy=os.environ.get("POLICY", "auto"))


if __name__ == "__main__":
    task, (where, last) = os.environ.get("SLURM_ARRAY_TASK_ID"), sys.argv[-2:]  # deepspeed puts its --local_rank before them
    sys.exit(main(Path(where, f"task-{task}") if task else Path(where), int(last)))
