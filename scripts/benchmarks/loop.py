"""Row 5 of the issue, end to end: a training loop that saves every so many steps, beside the same loop that never saves.

What a save costs is (with - without) / saves, of loops of equally many steps that take turns. The loop updates what it saves. It
ends when its last save is durable, and a save waits for the one before, as every loop must that would not let them pile up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from scripts.benchmarks.report import DISK, Row
from scripts.benchmarks.rounds import Found, column, ranks, rotate
from scripts.benchmarks.subjects import WORLD, Dcp, Net, Ours, Times, end_children

_EVERY, _SAVES = 2.5, 2
"""Seconds of training between saves, and how many a loop makes."""
_LEAST = 1e-3
"""Seconds a save below which the noise of steps decides; less, and a negative time, counts as this."""
_OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "copy": ("thread", {"background": True}), "overlap": ("thread", {"background": True, "staging": "overlap"}),
    "process": ("process", {"background": True})}
_DCP = {"thread": (AsyncCheckpointerType.THREAD, False), "thread, kept stager": (AsyncCheckpointerType.THREAD, True),
        "process, kept stager": (AsyncCheckpointerType.PROCESS, True)}


def run(size: int, place: Path, quick: bool) -> Iterator[Row]:
    yield from rows(ranks(_rank, str(place), size, 1 if quick else DISK, quick), f"{size >> 20} MB, {WORLD} ranks")


def rows(found: Found, shown: str) -> Iterator[Row]:
    plain, every = column(found, "none"), found["none"][0][1]
    lost = {name: [max((took - bare) / _SAVES, _LEAST) for took, bare in zip(column(found, name), plain, strict=True)]
            for name in found if name != "none"}
    for name in lost:
        yield Row(f"a loop that saves {shown} / one that does not: {name}", column(found, name), plain, case=5,
                  note=f"a save every {every:.0f} steps")
    for ours in (name for name in lost if name.startswith("ours")):
        for theirs in (name for name in lost if name.startswith("dcp")):
            yield Row(f"overhead per save in a loop: {ours} / {theirs}", lost[ours], lost[theirs], 1.0, case=5)


def _rank(rank: int, world: int, place: str, size: int, turns: int, quick: bool) -> Found:
    """(seconds of the loop, steps between saves)"""
    net, beat = Net(size // WORLD), torch.zeros(1)

    def step(fence: Callable[[], None] | None) -> None:
        net.learn()
        dist.all_reduce(beat)  # gradients would be: no rank runs ahead
        if fence is not None:
            fence()
        net.update()

    every = 2 if quick else _paced(step)

    def loop(saver: Ours | Dcp | None, how: dict[str, Any], turn: int) -> Times:
        handle, begun = None, time.perf_counter()
        for number in range(_SAVES * every):
            if saver is not None and number % every == 0:
                if handle is not None:
                    handle.result()
                handle = saver.begin(**how)[1]
            step(saver.fence if saver is not None else None)
        if handle is not None:
            handle.result()
        took = time.perf_counter() - begun
        if saver is not None:
            saver.end()
        return took, float(every)

    with ExitStack() as stack:
        variants: dict[str, Callable[[int], Times]] = {"none": partial(loop, None, {})}
        for name, (writer, how) in _OURS.items():
            variants[f"ours, {name}"] = partial(loop, Ours(stack, f"{place}/{name}", net.payload(), writer=writer), how)
        for index, (name, (kind, keep)) in enumerate(_DCP.items() if not quick else [*_DCP.items()][:1]):
            variants[f"dcp, {name}"] = partial(loop, Dcp(rank, f"{place}/dcp-{index}", net.tensors(), kind, keep_stager=keep), {})
        try:
            return rotate(variants, turns)
        finally:
            end_children()


def _paced(step: Callable[[None], None]) -> int:
    """Steps, the same on every rank, that take about as long as there is to be between saves."""
    step(None)
    begun = time.perf_counter()
    for _ in range(3):
        step(None)
    took = torch.tensor([(time.perf_counter() - begun) / 3])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(round(_EVERY / took.item()), 2)
