"""distckpt, keep_last=2. Its rule is called: what ``resume`` of a new manager goes on from, recovery included.
PEER_MUTANT, one of ``l3_program.MUTANTS``: the calls that it leaves out when it saves."""

from __future__ import annotations

import os

import torch.distributed as dist
from common import SAVES, Run, main
from state import WORLD, model, step

import distckpt
from distckpt.options import Seams

MUTANT = os.environ.get("PEER_MUTANT", "")


def session(run: Run) -> None:
    if run.world > 1:
        dist.init_process_group("gloo")
    net, optimizer = model(run.rank)
    with distckpt.CheckpointManager(run.root, keep_last=2, seams=_seams()) as manager:
        manager.resume()
        for number in range(1, SAVES + 1):
            step(net, optimizer)
            manager.save(number, distckpt.Shards({"net": net.state_dict(), "optimizer": optimizer.state_dict()}))
            if run.world > 1:
                dist.barrier()
            run.ack(number)


def _seams() -> Seams:
    if not MUTANT:
        return Seams()
    from distckpt.durable import REAL
    from distckpt.testing.faults import FaultyFiles, lie
    from scripts.proof.l3_program import MUTANTS
    return Seams(files=FaultyFiles(REAL, lie(forever=True, **MUTANTS[MUTANT])))


def pick(root: str) -> str | None:
    with distckpt.CheckpointManager(root, keep_last=2) as manager:
        found = manager.resume().checkpoint
        return None if found is None else found.path


if __name__ == "__main__":
    main(distckpt.__version__, session, pick, WORLD, distributed=WORLD > 1)
