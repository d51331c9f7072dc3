"""DCP's plans kept by real ranks: states that change on one rank, saves that fail on one rank, two roots by turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import distckpt
from distckpt.errors import SaveError
from distckpt.payloads.dcpplan import AsBefore, Planner
from tests.harness import run, values


def _state(rank: int, step: int, size: int, more: bool = False) -> dict[str, Any]:
    """Something that both ranks have, and something of this rank's own."""
    own = {f"own{rank}": torch.full((size,), float(step))}
    return {"same": torch.full((4,), float(step)), **own, **({f"more{rank}": torch.ones(3)} if more else {})}


def _job(rank: int, world: int, place: str) -> Any:
    sent: list[str] = []
    real, write = Planner.create_local_plan, FileSystemWriter.write_data

    def noted(self: Any) -> Any:
        plan = real(self)
        sent.append("as before" if isinstance(plan, AsBefore) else "plan")
        return plan

    def broken(self: Any, plan: Any, planner: Any) -> Any:
        raise ValueError("a bug in the writer")

    Planner.create_local_plan = noted  # type: ignore[method-assign]
    told: dict[str, list[str]] = {}
    with distckpt.CheckpointManager(f"{place}/a") as one, distckpt.CheckpointManager(f"{place}/b") as other:
        for step in (1, 2):
            for manager, size in ((one, 8), (other, 6)):
                manager.save(step, distckpt.DCP(state=_state(rank, step, size)))
        told["by turns"], sent[:] = list(sent), []
        one.save(3, distckpt.DCP(state=_state(rank, 3, 8, more=rank == 1)), background=True)
        one.wait()
        one.save(4, distckpt.DCP(state=_state(rank, 4, 8, more=rank == 1)))
        told["one grew"], sent[:] = list(sent), []
        if rank == 1:
            FileSystemWriter.write_data = broken  # type: ignore[method-assign]
        try:
            one.save(5, distckpt.DCP(state=_state(rank, 5, 8)))
        except SaveError as error:
            assert list(error.failures) == [1], error
        FileSystemWriter.write_data = write  # type: ignore[method-assign]
        for step in (5, 6):
            one.save(step, distckpt.DCP(state=_state(rank, step, 8, more=rank == 1)))
        told["one failed"] = list(sent)
    return told


def test_what_each_rank_plans_is_what_it_has_now(tmp_path: Path) -> None:
    as_before, plan = "as before", "plan"
    expected = [{"by turns": [plan, plan, as_before, as_before], "one grew": [grew, as_before],
                 "one failed": [shrank, plan, as_before]} for grew, shrank in ((as_before, as_before), (plan, plan))]
    assert values(run(2, _job, str(tmp_path))) == expected
    for root, size, steps in (("a", 8, range(1, 7)), ("b", 6, range(1, 3))):
        for step in steps:
            fresh: Any = {"same": torch.zeros(4), "own0": torch.zeros(size), "own1": torch.zeros(size)}
            if root == "a" and step > 2:
                fresh["more1"] = torch.zeros(3)
            dcp.load(fresh, checkpoint_id=tmp_path / root / f"step-{step}")
            assert all(float(fresh[name].min()) == step for name in ("same", "own0", "own1")), (root, step)
            stored = dcp.FileSystemReader(tmp_path / root / f"step-{step}").read_metadata()
            assert stored.state_dict_metadata.keys() == fresh.keys()
