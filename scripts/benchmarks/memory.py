"""Memory over the state: saves, loads, background saves, fifty in a row: row 13 of the issue. In bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import distckpt
from scripts.benchmarks.report import Row
from scripts.benchmarks.rounds import scenarios
from tests.harness import run as run_ranks
from tests.harness import values


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"memory": _memory})


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def _peak(do: Callable[[], object]) -> int:
    """Bytes by which the process grows while it runs ``do``, at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    do()
    return _status("VmHWM") - before


def _measure(rank: int, world: int, place: str, size: int, many: int) -> dict[str, float]:
    state = {f"layer.{i}": torch.ones(size // 16 // 4) for i in range(16)}
    small, found = {"x": torch.ones(1 << 16)}, {}
    with distckpt.CheckpointManager(f"{place}/root", keep_last=1) as manager:
        manager.save(0, small)  # what the code itself needs
        manager.restore(small)
        manager.save(1, small, background=True)
        manager.wait()
        shards, ranks = distckpt.Shards(state), manager._ranks()
        found["save"] = _peak(lambda: manager.save(2, shards))
        checkpoint = manager.resume().checkpoint
        assert checkpoint is not None
        found["load"] = _peak(lambda: shards.load(checkpoint, ranks))

        def behind(step: int) -> None:
            manager.save(step, shards, background=True)
            manager.wait()

        found["background"] = _peak(lambda: behind(3))
        after = _status("VmRSS")
        for step in range(4, 4 + many):
            behind(step)
        found["growth"] = _status("VmRSS") - after
    dcp.save(small, checkpoint_id=f"{place}/warm")
    dcp.load(small, checkpoint_id=f"{place}/warm")
    found["dcp.save"] = _peak(lambda: dcp.save(state, checkpoint_id=f"{place}/dcp"))
    found["dcp.load"] = _peak(lambda: dcp.load(state, checkpoint_id=f"{place}/dcp"))
    return found


def _memory(place: Path, quick: bool) -> Iterator[Row]:
    size, many = (64 << 20, 10) if quick else (512 << 20, 50)
    found = values(run_ranks(1, _measure, str(place), size, many, timeout=900))[0]
    over = f"over a state of {size / 1e6:.0f} MB"
    for name, peer, shown in (("save", "dcp.save", "save"), ("load", "dcp.load", "verified load")):
        yield Row(f"{shown}, memory {over} / {peer}", [found[name]], [found[peer]], case=13, limit=16e6, unit="B")
    yield Row("background save, memory over the state / state", [found["background"]], [float(size)], 1.02, case=13, unit="B")
    yield Row(f"growth over {many} more background saves", [found["growth"]], [], case=13, limit=16e6, unit="B")
