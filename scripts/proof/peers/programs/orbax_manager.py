"""Orbax's CheckpointManager, max_to_keep=2, synchronous. Its rule is called: latest_step of a new manager."""

from __future__ import annotations

import os

import numpy as np
import orbax.checkpoint as ocp
from common import SAVES, Run, main


def session(run: Run) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(run.root, options=options) as manager:
        for number in range(1, SAVES + 1):
            manager.save(number, args=ocp.args.StandardSave({"w": np.arange(1000.0) * number}))
            manager.wait_until_finished()
            run.ack(number)


def pick(root: str) -> str | None:
    with ocp.CheckpointManager(root) as manager:
        found = manager.latest_step()
    return None if found is None else os.path.join(root, str(found))


if __name__ == "__main__":
    main(ocp.__version__, session, pick)
