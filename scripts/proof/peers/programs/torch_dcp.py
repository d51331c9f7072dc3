"""torch.distributed.checkpoint, a new directory per step. It has no rule for resuming: this is TorchTitan's, the highest
step that has a ``.metadata``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import SAVES, Run, main
from state import WORLD, model, step

SAME = os.environ.get("PEER_SAME") == "1"


def session(run: Run) -> None:
    if run.world > 1:
        dist.init_process_group("gloo")
    net, optimizer = model(run.rank)
    for number in range(1, SAVES + 1):
        step(net, optimizer)
        name = "checkpoint" if SAME else f"step-{number}"
        state = {f"rank{run.rank}": net.state_dict(), "number": torch.tensor(number)}
        dcp.save(state, checkpoint_id=os.path.join(run.root, name), no_dist=run.world == 1)
        if run.world > 1:
            dist.barrier()
        run.ack(number)


def pick(root: str) -> str | None:
    names = [name for name in os.listdir(root) if os.path.isfile(os.path.join(root, name, ".metadata"))]
    if not names:
        return None
    return os.path.join(root, max(names, key=lambda name: int(name.rpartition("-")[2]) if "-" in name else 0))


if __name__ == "__main__":
    main(torch.__version__, session, pick, WORLD, distributed=WORLD > 1)
