"""Memory over the state: saves, loads, background saves, fifty in a row: row 13 of the issue. In bytes.

Every sample is a process of its own, one rank, since memory that a process has had is not given back. What a writer's process
takes for itself counts too; what it shares with its parent counts once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp

import distckpt
from scripts.benchmarks.report import Row
from scripts.benchmarks.rounds import scenarios
from tests.harness import run as run_ranks
from tests.harness import values

_LIMIT, _SAMPLES, _MANY = 16e6, 3, 50
_WARM = 4 << 20
"""Bytes that are saved and loaded before, for what the code itself needs. A few kB would go another way than a large state."""
_PART = 16
"""The state of the fifty saves is this part of the other's: a leak of it would still be far over the limit."""

State = dict[str, torch.Tensor]
Sample = dict[str, float]

_PAYLOADS: dict[str, Callable[[State], Any]] = {
    "Shards": distckpt.Shards,
    "Shards(module)": lambda state: distckpt.Shards(torch.nn.ParameterDict(state)),
    "safetensors": partial(distckpt.Shards, format="safetensors"),
    "DCP": lambda state: distckpt.DCP(state=state)}
KINDS: dict[str, tuple[str, str, str]] = {
    **{name: (name, "thread", "copy") for name in _PAYLOADS},
    "overlap": ("Shards", "thread", "overlap"), "writer='process'": ("Shards", "process", "copy")}
"""Payload, writer, staging."""
FLAT = ("Shards", "overlap", "writer='process'")


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    known = {f"memory {kind}": partial(_memory, kind) for kind in KINDS}
    yield from scenarios(place, quick, only, {**known, "memory dcp": _theirs})


def _status(name: str, pid: int | str = "self") -> int:
    """Bytes of a line of /proc/PID/status."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def _children() -> int:
    """Bytes that this process's children have for themselves."""
    return sum(_status("RssAnon", child.pid) for child in psutil.Process().children(recursive=True))


def _peak(do: Callable[[], object]) -> float:
    """Bytes by which the process grows while it runs ``do``, at most, and by which its children have grown afterwards."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, beside = _status("VmRSS"), _children()
    do()
    return float(_status("VmHWM") - before + max(_children() - beside, 0))


def _state(size: int) -> State:
    return {f"layer_{i}": torch.ones(size // 16 // 4) for i in range(16)}


def _measure(rank: int, world: int, place: str, size: int, many: int, kind: str) -> Sample:
    payload, writer, staging = KINDS[kind]
    small, large, part = (_PAYLOADS[payload](_state(bytes_)) for bytes_ in (_WARM, size, size // _PART))
    found = {}
    with distckpt.CheckpointManager(f"{place}/root", keep_last=1, writer=writer) as manager:
        def behind(state: Any, *steps: int) -> None:
            for step in steps:
                manager.save(step, state, background=True, staging=staging)
                manager.wait()

        manager.save(0, small)  # what the code itself needs
        manager.restore(small)
        behind(small, 1)
        ranks = manager._ranks()
        found["save"] = _peak(lambda: manager.save(2, large))
        checkpoint = manager.resume().checkpoint
        assert checkpoint is not None
        found["load"] = _peak(lambda: large.load(checkpoint, ranks))
        found["background"] = _peak(lambda: behind(large, 3)) + _WARM  # for which there is staging memory already
    if kind in FLAT:
        with distckpt.CheckpointManager(f"{place}/flat", keep_last=1, writer=writer) as manager:
            behind(part, 0)
            found["growth"] = _peak(lambda: behind(part, *range(1, 1 + many)))
    return found


def _dcp(rank: int, world: int, place: str, size: int) -> Sample:
    small, state = _state(_WARM), _state(size)
    dcp.save(small, checkpoint_id=f"{place}/warm")
    dcp.load(small, checkpoint_id=f"{place}/warm")
    return {"save": _peak(lambda: dcp.save(state, checkpoint_id=f"{place}/dcp")),
            "load": _peak(lambda: dcp.load(state, checkpoint_id=f"{place}/dcp"))}


def _samples(place: Path, quick: bool, target: Callable[..., Sample], *args: Any) -> list[Sample]:
    """Of a process each."""
    size, found = 64 << 20 if quick else 512 << 20, []
    for turn in range(1 if quick else _SAMPLES):
        folder = place / str(turn)
        folder.mkdir()
        found += values(run_ranks(1, target, str(folder), size, *args, timeout=900))
    return found


def _memory(kind: str, place: Path, quick: bool) -> Iterator[Row]:
    size = (64 if quick else 512) << 20
    many = 10 if quick else _MANY
    yield from rows(kind, size, many, _samples(place, quick, _measure, many, kind))


def _theirs(place: Path, quick: bool) -> Iterator[Row]:
    for what in (found := _samples(place, quick, _dcp))[0]:
        yield Row(f"dcp.{what}, memory over the same state", [sample[what] for sample in found], [], case=13, unit="B",
                  least=_SAMPLES)


def rows(kind: str, size: int, many: int, found: list[Sample]) -> Iterator[Row]:
    def of(name: str, what: str, **more: Any) -> Row:
        return Row(name, [sample[what] for sample in found], [], case=13, unit="B", least=_SAMPLES, **more)

    over = f"memory over a state of {size / 1e6:.0f} MB"
    yield of(f"{kind}: save, {over}", "save", limit=_LIMIT)
    yield of(f"{kind}: verified load, {over}", "load", limit=_LIMIT)
    behind = [sample["background"] for sample in found]
    yield Row(f"{kind}: background save, memory over the state / state", behind, [float(size)] * len(found), 1.02, case=13,
              unit="B", least=_SAMPLES)
    if kind in FLAT:
        each = f"{size // _PART / 1e6:.0f} MB each"
        yield of(f"{kind}: growth over {many} more background saves, of {each}", "growth", limit=_LIMIT)
