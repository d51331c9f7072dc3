"""The program that L1 runs under strace: ``python -m scripts.proof.l1_program SCENARIOS.json``, all of them in one process tree.

Ranks are forked, meet through real gloo, save and resume with the real library, and mark what they begin and are told. What each
save must leave is found out before, from its number alone (``contents.json``).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401 - loaded once here, and not in every rank under strace
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

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


def state_of(kind: str, number: int, rank: int) -> dict[str, Any]:
    """A few KiB that no other save and no other rank has; of "linked", one part that all saves have."""
    weights = torch.full((300,), float(number + 1000 * rank))
    if kind == "shards":
        return {"here": {"w": weights, "step": number}, "there": {"w": weights.clone()}}
    if kind == "linked":
        return {"frozen": {"w": torch.full((300,), -1.0 - rank)}, "head": {"w": weights, "step": number}}
    if kind == "dcp":
        return {f"w{rank}": weights, "both": torch.full((200,), float(number))}
    return {"w": weights, "step": number}


def payload(kind: str, state: dict[str, Any]) -> Any:
    if kind in ("shards", "linked"):
        return {name: distckpt.Shards(part, format="safetensors" if name == "there" else "torch") for name, part in state.items()}
    return distckpt.DCP(state=state) if kind == "dcp" else state


def plugged(number: int, rank: int) -> bytes:
    return b"%08d" % (number + 1000 * rank) * 150


def write(manager: distckpt.CheckpointManager, number: int, save: Save) -> None:
    """One save, to its verdict. Raises what the manager raises."""
    if save.payload == "plug":
        with manager.saving(save.step, on_exists=save.on_exists) as files:
            with open(files.mine("sub/deep/x.bin"), "wb") as out:
                out.write(plugged(number, manager.rank))
            if save.fails == manager.rank:
                raise Refused
            if files.writes("vocab.json"):
                Path(files.shared("vocab.json")).write_bytes(b"[%d]" % number)
        return
    if save.payload == "deepspeed":
        from scripts.proof import l1_deepspeed

        what: Any = l1_deepspeed.payload(number, manager.rank)
    else:
        what = payload(save.payload, state_of(save.payload, number, manager.rank))
    handle = manager.save(save.step, what, on_exists=save.on_exists, background=save.background)
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
        manager.resume()
        for number, save in enumerate(phase.saves, first):
            mark(f"BEGIN {number} {save.step}")
            try:
                write(manager, number, save)
            except distckpt.SaveError as error:
                mark(f"TOLD {number} {error.outcome}")
                if save.fails is None:
                    raise
                continue
            mark(f"TOLD {number} {COMMITTED}")
    return 0


# -- what must be in them --------------------------------------------------------------------------------------------------

def golden(place: Place, root: str, saves: Sequence[Save], first: int, writer: str) -> dict[int, str]:
    """The content of each of these saves, by number: written where nothing goes wrong, and read back. AssertionError when what
    was read is not what belongs to the number."""
    torch.set_num_threads(1)
    if place.world > 1:
        place.gloo()
    found = {}
    with distckpt.CheckpointManager(root, keep_last=0, writer=writer, timeouts=QUICK) as manager:
        for number, save in enumerate(saves, first):
            if save.fails is not None:
                continue
            step = number + 1  # of a scenario's saves two may have one step
            write(manager, number, replace(save, step=step, on_exists="error"))
            path = os.path.join(root, f"step-{step}")
            assert holds(manager, number, save.payload, path), f"{path} does not hold what save {number} wrote"
            found[number] = content(path)
    return found


def holds(manager: distckpt.CheckpointManager, number: int, kind: str, path: str) -> bool:
    if kind == "plug":
        file = f"sub/deep/x.rank-{manager.rank:05d}-of-{manager.world:05d}.bin"
        return Path(path, file).read_bytes() == plugged(number, manager.rank) and \
            Path(path, "vocab.json").read_bytes() == b"[%d]" % number
    if kind == "deepspeed":
        from scripts.proof import l1_deepspeed

        return l1_deepspeed.holds(path, manager.rank)
    wanted = state_of(kind, number, manager.rank)
    state = _blank(wanted)
    manager.restore(payload(kind, state), step=number + 1)
    return _equal(state, wanted)


def _blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _blank(inner) for key, inner in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


_KNOWN: dict[object, dict[int, str]] = {}
"""Of the scenarios before: they differ in keep, kills and mutants more than in what they save."""


def contents(scenario: Scenario) -> dict[int, str]:
    """By the number of the save, what it must leave."""
    found: dict[int, str] = {}
    first = 0
    for phase in scenario.phases:
        asked = (scenario.world, phase.saves, first, scenario.writer)
        if asked not in _KNOWN:
            root = f"{scenario.base}-golden"
            ends = group(scenario.world, golden, root, phase.saves, first, scenario.writer)
            shutil.rmtree(root)
            if not all(end.ok for end in ends):
                sys.exit(f"{scenario}, where nothing goes wrong: {[str(end) for end in ends if not end.ok]}")
            _KNOWN[asked] = ends[0].value
        found.update(_KNOWN[asked])
        first += len(phase.saves)
    return found


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


def _without_ids() -> None:
    """DCP writes down its own path and a random id: else no two saves of one state had the same bytes."""
    FileSystemWriter.storage_meta = lambda self: StorageMeta()  # type: ignore[method-assign]


def main() -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1"})
    with suppress(KeyError):
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    scenarios = [Scenario.of(one) for one in json.loads(Path(sys.argv[1]).read_text())]
    if any(save.payload == "deepspeed" for one in scenarios for save in one.saves):
        from scripts.proof import l1_deepspeed

        l1_deepspeed.load()
    _without_ids()
    known = [contents(one) for one in scenarios]
    Path(sys.argv[1]).with_name("contents.json").write_text(json.dumps(known))
    for one in scenarios:
        run(one)


if __name__ == "__main__":
    main()
