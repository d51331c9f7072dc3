"""The program that ``test_strace_order`` runs under strace: three saves that rotate, then a replace.

``python -m tests.crash.traced ROOT WORLD``. Each rank prints its pid.
"""

from __future__ import annotations

import os
import sys

import torch

import distckpt
from distckpt.durable import REAL
from distckpt.options import Seams
from tests.crash.forks import Place, group

STEPS = (1, 2, 3, 3)


def saves(place: Place, root: str) -> int:
    torch.set_num_threads(1)
    seams = Seams(files=REAL, bootstrap=place.bootstrap()) if place.world > 1 else Seams()
    with distckpt.CheckpointManager(root, keep_last=2, seams=seams) as manager:
        manager.resume()
        for number, step in enumerate(STEPS):
            if number == 1:  # somebody else's writer, in directories of its own
                with manager.saving(step) as files, open(files.mine("sub/deep/x.bin"), "wb") as out:
                    out.write(b"x" * 5000)
                    os.makedirs(os.path.join(files.path, "empty", "inner"), exist_ok=True)  # no rank will sync this one
                continue
            state = {"w": torch.full((1000,), float(number + 10 * place.rank))}
            manager.save(step, {"here": distckpt.Shards(state), "there": distckpt.Shards(state, format="safetensors")},
                         on_exists="replace")
    return os.getpid()


def main() -> None:
    root, world = sys.argv[1], int(sys.argv[2])
    if world == 1:
        print(saves(Place(0, 1, 0, -1), root))
        return
    for end in group(world, saves, root):
        if not end.ok:
            sys.exit(str(end))
        print(end.value)


if __name__ == "__main__":
    main()
