"""distckpt, keep_last=2. Its rule is called: what ``resume`` of a new manager goes on from, recovery included."""

from __future__ import annotations

import torch.distributed as dist
from common import SAVES, Run, main
from state import WORLD, model, step

import distckpt


def session(run: Run) -> None:
    if run.world > 1:
        dist.init_process_group("gloo")
    net, optimizer = model(run.rank)
    with distckpt.CheckpointManager(run.root, keep_last=2) as manager:
        manager.resume()
        for number in range(1, SAVES + 1):
            step(net, optimizer)
            manager.save(number, distckpt.Shards({"net": net.state_dict(), "optimizer": optimizer.state_dict()}))
            if run.world > 1:
                dist.barrier()
            run.ack(number)


def pick(root: str) -> str | None:
    with distckpt.CheckpointManager(root, keep_last=2) as manager:
        found = manager.resume().checkpoint
        return None if found is None else found.path


if __name__ == "__main__":
    main(distckpt.__version__, session, pick, WORLD, distributed=WORLD > 1)
