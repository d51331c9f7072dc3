"""The program that launchers start: an engine with a block of ours in its configuration, trained two steps further."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import distckpt
from distckpt.integrations.deepspeed import manager_from
from tests.frameworks import dsranks


def main(root: str) -> None:
    engine = dsranks.engine(0, distckpt={"root": root, "save_every": 2, "keep_last": 2})
    state = distckpt.TrainState(model=engine, rng=True)
    with manager_from(engine) as manager:
        started = manager.restore(state) or 0
        while engine.global_steps < started + 2:
            dsranks.step(engine)
        manager.save(engine.global_steps, state)
    Path(f"{root}.{started}.rank-{os.environ['RANK']}").write_text(f"{manager.rank} of {manager.world}")


if __name__ == "__main__":
    main(sys.argv[-1])
