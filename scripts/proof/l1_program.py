"""The program that L1 runs under strace: ``python -m scripts.proof.l1_program SCENARIOS.json``, all of them in one process tree.

Ranks are forked, meet through real gloo, save and resume with the real library, and mark what they begin and are told.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401 - loaded once here, and not in every rank under strace
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp

import distckpt
import distckpt.manager
import distckpt.payloads.dcp
import distckpt.payloads.shards
import distckpt.payloads.train_state
from distckpt.coordination.marks import mark
from distckpt.durable import REAL, Files
from distckpt.options import Seams, Timeouts
from distckpt.testing.checker import COMMITTED, content_of, tree_of
from distckpt.testing.faults import FaultyFiles, kill
from scripts.proof import l1_mutants
from scripts.proof.l1_scenarios import Phase, Save, Scenario
from tests.crash.forks import Place, group

QUICK = Timeouts(arrive=20, progress=20, visible=5, close=20)


class Refused(Exception):
    """What the user's writer raises on one rank."""


def content(path: str) -> str:
    """What the checker calls the content of a checkpoint."""
    return content_of({name: data for name, data in tree_of(path).items() if name != "commit.json"})


def state_of(number: int, rank: int) -> dict[str, Any]:
    """A few KiB that no other save and no other rank has."""
    return {"w": torch.full((300,), float(number + 1000 * rank)), "step": number}


def payload(kind: str, number: int, rank: int) -> Any:
    state = state_of(number, rank)
    if kind == "shards":
        return {"here": distckpt.Shards(state), "there": distckpt.Shards({"w": state["w"]}, format="safetensors")}
    if kind == "linked":
        return {"frozen": distckpt.Shards({"w": torch.full((300,), -1.0 - rank)}), "head": distckpt.Shards(state)}
    if kind == "deepspeed":
        from scripts.proof import l1_deepspeed

        return l1_deepspeed.payload(number, rank)
    if kind == "dcp":
        return distckpt.DCP(state={f"w{rank}": state["w"], "both": torch.full((200,), float(number))})
    return state


def write(manager: distckpt.CheckpointManager, number: int, save: Save) -> None:
    """One save, to its verdict. Raises what the manager raises."""
    if save.payload == "plug":
        with manager.saving(save.step, on_exists=save.on_exists) as files:
            with open(files.mine("sub/deep/x.bin"), "wb") as out:
                out.write(b"%08d" % (number + 1000 * manager.rank) * 150)
            if save.fails == manager.rank:
                raise Refused
            if files.writes("vocab.json"):
                Path(files.shared("vocab.json")).write_bytes(b"[%d]" % number)
        return
    handle = manager.save(save.step, payload(save.payload, number, manager.rank), on_exists=save.on_exists,
                          background=save.background)
    if save.background:
        handle.result(30.0)
        manager.wait()


def rank(place: Place, scenario: Scenario, phase: Phase, first: int) -> int:
    mark(f"RANK {place.rank}")
    torch.set_num_threads(1)
    if place.world > 1:
        place.gloo()
    l1_mutants.apply(scenario.mutant, place.rank, scenario.root)
    files: Files = REAL
    if phase.kill is not None and phase.kill[0] == place.rank:
        files = FaultyFiles(REAL, kill(phase.kill[1]))
    manager = distckpt.CheckpointManager(scenario.root, keep_last=scenario.keep, writer=scenario.writer, dedup=scenario.dedup,
                                         timeouts=QUICK, seams=Seams(files=files))
    with manager:
        found = manager.resume().checkpoint
        if place.rank == 0 and found is not None:
            mark(f"RESUMED {found.step} {content(found.path)}")
        for number, save in enumerate(phase.saves, first):
            mark(f"BEGIN {number} {save.step}")
            try:
                write(manager, number, save)
            except distckpt.SaveError as error:
                mark(f"TOLD {number} {error.outcome} -")
                if save.fails is None:
                    raise
                continue
            known = content(os.path.join(scenario.root, f"step-{save.step}")) if place.rank == 0 else "-"
            mark(f"TOLD {number} {COMMITTED} {known}")
    return 0


def run(scenario: Scenario) -> None:
    """All phases, one after the other; each is a job of its own."""
    first = 0
    mark(f"SCENARIO {scenario.base}")
    for phase in scenario.phases:
        mark("PHASE")
        ends = group(scenario.world, rank, scenario, phase, first)
        first += len(phase.saves)
        if phase.kill is not None and ends[phase.kill[0]].killed:
            mark("KILLED")
        elif not all(end.ok for end in ends):
            sys.exit(f"{scenario}: {[str(end) for end in ends if not end.ok]}")
    mark(f"END {scenario.base}")


def main() -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1"})
    with suppress(KeyError):
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    scenarios = [Scenario.of(one) for one in json.loads(Path(sys.argv[1]).read_text())]
    if any(save.payload == "deepspeed" for one in scenarios for save in one.saves):
        from scripts.proof import l1_deepspeed

        l1_deepspeed.load()
    for one in scenarios:
        run(one)


if __name__ == "__main__":
    main()
