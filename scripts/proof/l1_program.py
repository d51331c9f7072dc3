"""The program that L1 runs under strace: ``python -m scripts.proof.l1_program SCENARIOS.json``, all of them in one process tree.

Ranks are forked, meet through real gloo, save and resume with the real library, and mark what they begin and are told. What each
save must leave is found out before, from its number alone (``contents.json``).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
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
from distckpt.series import SeriesView
from distckpt.testing.checker import COMMITTED, content_of, tree_of
from distckpt.testing.faults import FaultyFiles, kill
from distckpt.testing.forks import start
from scripts.proof import l1_mutants
from scripts.proof.l1_scenarios import ROLLING, ROLLING_KEEP, Phase, Save, Scenario
from tests.crash.forks import Ended, Place

PATIENCE = 60.0
"""Seconds that the ranks of a job may take. A writer process is a fresh interpreter, which loads torch under strace."""
QUICK = Timeouts(arrive=PATIENCE / 2, progress=PATIENCE / 2, visible=5, close=PATIENCE / 2)


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


class Loop:
    """A training loop of one rank; what it holds is told by the number of the save."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._net = torch.nn.Linear(12, 8)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.5, momentum=0.9)
        self._progress = {"number": 0}
        self._frozen = {"w": torch.full((300,), -1.0 - rank)}
        self.train()  # an optimizer makes its state in its first step

    def train(self) -> None:
        """An optimizer step: one that waits until its state is copied."""
        for parameter in self._net.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._optimizer.step()

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for parameter in self._net.parameters()
                for tensor in (parameter.detach(), self._optimizer.state[parameter]["momentum_buffer"])]

    def become(self, number: int) -> None:
        for index, tensor in enumerate(self._tensors()):
            tensor.fill_(self._value(number, index))
        self._progress["number"] = number

    def holds(self, number: int) -> bool:
        return self._progress == {"number": number} and all(
            bool((tensor == self._value(number, index)).all()) for index, tensor in enumerate(self._tensors()))

    def _value(self, number: int, index: int) -> float:
        return float(number + 1000 * self._rank + 100 * index)

    @property
    def payload(self) -> dict[str, Any]:
        """By several kinds of payload, all of which a writer process can write."""
        return {"frozen": distckpt.Shards(self._frozen), "model": distckpt.Shards(self._net),
                "optimizer": distckpt.Shards(self._optimizer), "loop": distckpt.TrainState(progress=self._progress)}


_loop = functools.cache(Loop)


def plugged(number: int, rank: int) -> bytes:
    return b"%08d" % (number + 1000 * rank) * 150


def write(manager: distckpt.CheckpointManager, number: int, save: Save, rolling: SeriesView | None = None) -> None:
    """One save, to its verdict, into ``rolling`` if given. Raises what the manager raises."""
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
    elif save.payload == "trained":
        _loop(manager.rank).become(number)
        what = _loop(manager.rank).payload
    else:
        what = payload(save.payload, state_of(save.payload, number, manager.rank))
    line = manager if rolling is None else rolling
    handle = line.save(save.step, what, on_exists=save.on_exists, background=save.background, staging=save.staging,
                       metrics=None if save.loss is None else {"loss": save.loss})
    if save.payload == "trained":
        _loop(manager.rank).train()
    if save.background:
        handle.result(PATIENCE)
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
    writer = scenario.writer if phase.kill is None else "thread"
    manager = distckpt.CheckpointManager(scenario.root, writer=writer, timeouts=QUICK, seams=Seams(files=files),
                                         **scenario.options)
    with manager:
        further = any(save.series == ROLLING for save in phase.saves)
        rolling = manager.series(ROLLING, keep_last=ROLLING_KEEP) if further else None
        manager.resume()
        for number, save in enumerate(phase.saves, first):
            mark(f"BEGIN {number} {save.step}")
            try:
                write(manager, number, save, rolling if save.series == ROLLING else None)
            except distckpt.SaveError as error:
                mark(f"TOLD {number} {error.outcome}")
                if save.fails is None:
                    raise
                continue
            mark(f"TOLD {number} {COMMITTED}")
    return 0


# -- what must be in them --------------------------------------------------------------------------------------------------

def golden(place: Place, root: str, saves: Sequence[Save], first: int, options: dict[str, Any]) -> dict[int, str]:
    """The content of each of these saves, by number: written where nothing goes wrong, and read back. AssertionError when what
    was read is not what belongs to the number."""
    torch.set_num_threads(1)
    if place.world > 1:
        place.gloo()
    found = {}
    with distckpt.CheckpointManager(root, keep_last=0, timeouts=QUICK, **options) as manager:
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
    if kind == "trained":
        _loop(manager.rank).become(-1)
        manager.restore(_loop(manager.rank).payload, step=number + 1)
        return _loop(manager.rank).holds(number)
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


def _job(world: int, target: Callable[..., Any], *args: Any) -> list[Ended]:
    deadline = time.monotonic() + PATIENCE
    ends = [rank.end(deadline) for rank in start(world, target, *args, limit=PATIENCE)]
    for end in ends:
        if end.hung:
            sys.exit(f"a rank did not end within {PATIENCE:g} s; its stacks:\n{end.log}")
    return ends


_KNOWN: dict[object, dict[int, str]] = {}
"""Of the scenarios before: they differ in keep, kills and mutants more than in what they save."""


def contents(scenario: Scenario) -> dict[int, str]:
    """By the number of the save, what it must leave."""
    found: dict[int, str] = {}
    first = 0
    for phase in scenario.phases:
        options = {"dedup": scenario.dedup, "digest": scenario.digest}  # each is seen in the bytes, or in which files there are
        asked = (scenario.world, phase.saves, first, *options.values())
        if asked not in _KNOWN:
            root = f"{scenario.base}-golden"
            ends = _job(scenario.world, golden, root, phase.saves, first, options)
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
        ends = _job(scenario.world, rank, scenario, phase, first)
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
