"""For torchrun: rank 1 of the first generation dies in the middle of the second save. ``elastic.py FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

import distckpt

TOTAL = 4


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    launch = distckpt.launch.detect()
    with distckpt.CheckpointManager(folder / "root") as manager:
        found = manager.resume().checkpoint
        started = step = found.step if found is not None else 0
        while step < TOTAL:
            step += 1
            with manager.saving(step) as files:
                Path(files.mine("x")).write_text(str(step))
                if launch.elastic == 0 and step == 2 and launch.rank == 1:
                    os._exit(1)
    (folder / f"ended.{launch.rank}").write_text(json.dumps([launch.kind, launch.elastic, started, step]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
