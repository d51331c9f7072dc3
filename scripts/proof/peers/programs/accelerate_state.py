"""Accelerate's save_state with automatic names, total_limit=2. Its rule, from ``load_state`` without a directory: the folder
of ``checkpoints/`` with the highest number (the code is inside that function, so it stands here again)."""

from __future__ import annotations

import os
import re

import accelerate
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from common import SAVES, Run, main
from state import model, step


def session(run: Run) -> None:
    project = ProjectConfiguration(project_dir=run.root, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    net, optimizer = accelerator.prepare(*model())
    for number in range(1, SAVES + 1):
        step(net, optimizer)
        accelerator.save_state()
        run.ack(number)


def pick(root: str) -> str | None:
    folder = os.path.join(root, "checkpoints")
    if not os.path.isdir(folder) or not os.listdir(folder):
        return None
    folders = [os.path.join(folder, name) for name in os.listdir(folder)]
    return max(folders, key=lambda path: [*map(int, re.findall(r"[\/]?([0-9]+)(?=[^\/]*$)", path))][0])


if __name__ == "__main__":
    main(accelerate.__version__, session, pick)
