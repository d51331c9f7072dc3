"""What a background save costs the training loop: beside a warm copy of the same bytes, and beside DCP's on the same machine.

Every scenario runs two real ranks with gloo. A round's figure is the slowest rank's, as a training step would feel it.
Peers start with ``torch.distributed.checkpoint``'s defaults; "kept stager" is what its documentation recommends for more.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import distckpt
from scripts.benchmarks import loop
from scripts.benchmarks.report import DISK, LATENCY, Row
from scripts.benchmarks.rounds import Found, column, ranks, rotate, row, scenarios
from scripts.benchmarks.subjects import WORLD, Dcp, Net, Ours, Times, Trainer, end_children, memcpy, share

_FULL, _QUICK = 256 << 20, 32 << 20
_ROOMY = 12  # times the state, in free memory: every variant has staging memory of its own
_KINDS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
_LEAST = 1e-3
"""Seconds of training lost below which the noise of steps decides; less, and a negative time, counts as this."""


def run(place: Path, quick: bool, only: str, size: int | None = None) -> Iterator[Row]:
    """``size``: MB of all ranks together."""
    wanted = size << 20 if size else _QUICK if quick else _FULL
    free = psutil.virtual_memory().available
    size = wanted
    while size > _QUICK and free < _ROOMY * size:
        size //= 2
    if size < wanted:
        print(f"{free >> 20} MB of memory are free: {size >> 20} MB are saved instead of {wanted >> 20}", flush=True)
    known = {"stall": _stall, "first": _first, "overlap": _overlap, "dcp": _dcp, "slowdown": _slowdown, "loop": loop.run}
    yield from scenarios(place, quick, only, {name: partial(scenario, size) for name, scenario in known.items()})


# -- the stall of a call -----------------------------------------------------------------------------------------------


def _stall_rank(rank: int, world: int, place: str, size: int, turns: int) -> Found:
    tensors = share(size)
    with ExitStack() as stack:
        thread = Ours(stack, f"{place}/thread", distckpt.Shards(tensors))
        process = Ours(stack, f"{place}/process", distckpt.Shards(tensors), writer="process")
        return rotate({"memcpy": memcpy(tensors), "thread": thread.background, "process": process.background}, turns)


def _stall(size: int, place: Path, quick: bool) -> Iterator[Row]:
    found = ranks(_stall_rank, str(place), size, 1 if quick else LATENCY)
    for writer in _KINDS:
        name = f"background save returns, {size >> 20} MB, {WORLD} ranks, writer={writer!r} / warm memcpy"
        yield row(name, found, writer, "memcpy", 0, 1.25, case=2, least=LATENCY)
        yield row(f"the same in CPU time, writer={writer!r}", found, writer, "memcpy", 2, 1.25, "of the training thread", case=2,
                  least=LATENCY)


def _first_rank(rank: int, world: int, place: str, size: int, turn: int, which: str) -> Found:
    """In a process that has saved nothing yet, some steps after its start."""
    tensors = share(size)
    trainer = Trainer()
    if which != "ours":
        peer = Dcp(rank, place, tensors, AsyncCheckpointerType[which.upper()])
        trainer.run(0.5)
        dist.barrier()
        try:
            return {which: [peer(turn)]}
        finally:
            end_children()
    with ExitStack() as stack:
        copy = memcpy(tensors)
        ours = Ours(stack, f"{place}/root", distckpt.Shards(tensors))
        ours.manager.restore(ours.state)
        step = 0
        while step < 3 or ours.manager._behind._preparing is None or ours.manager._behind._preparing.is_alive():
            ours.manager.poll(step)
            trainer.step()
            step += 1
        found: Found = {}
        for name, measured in (("ours", ours.background), ("memcpy", copy))[::1 if turn % 2 else -1]:
            dist.barrier()
            if name == "memcpy":
                copy(turn)  # its own warm-up
                dist.barrier()
            found[name] = [measured(turn)]
        for _ in range(2):
            dist.barrier()
            found["steady"] = [ours.background(turn)]
        return found


def _first(size: int, place: Path, quick: bool) -> Iterator[Row]:
    found: Found = {"ours": [], "memcpy": [], "steady": [], "thread": [], "process": []}
    for turn in range(1 if quick else LATENCY):
        order = ("ours", "thread") if turn % 2 else ("thread", "ours")
        for which in (*order, "process") if not quick and turn < DISK else order:
            folder = f"{place}/{which}-{turn}"
            Path(folder).mkdir()
            for name, times in ranks(_first_rank, folder, size, turn, which).items():
                found[name] += times
            shutil.rmtree(folder)
    shown = f"{size >> 20} MB"
    yield row(f"first save of a manager returns, {shown} / its third", found, "ours", "steady", 0, 1.25,
              "a fresh process each round; memory made by poll() while it trained", case=3, least=LATENCY)
    yield row("the same in CPU time of the training thread", found, "ours", "steady", 2, 1.25, case=3, least=LATENCY)
    yield row(f"first save of a manager returns, {shown} / warm memcpy", found, "ours", "memcpy", 0, case=3)
    for which in ("thread", "process") if not quick else ("thread",):
        count = len(found[which])
        part = {name: times[:count] for name, times in found.items()}
        yield row(f"first save returns, {shown} / first dcp.async_save, {which}", part, "ours", which, case=3)
        yield row(f"first save durable, {shown} / first dcp.async_save, {which}", part, "ours", which, 1, 1 / 1.6, case=3)


# -- overlap -----------------------------------------------------------------------------------------------------------


_OVERLAPS = "thread, async staging"


def _overlap_rank(rank: int, world: int, place: str, size: int, turns: int, quick: bool) -> Found:
    """A step with a save in it: (the call, the fence, both, the whole step, CPU time of both)."""
    net = Net(size // WORLD)
    with ExitStack() as stack:
        ours = Ours(stack, f"{place}/root", net.payload())

        def step(saver: Ours | Dcp | None, **how: Any) -> Times:
            begun, cpu = time.perf_counter(), time.thread_time()
            called = saver.begin(**how)[0] if saver is not None else 0.0
            cpu = time.thread_time() - cpu
            net.learn()
            at_fence, cpu = time.perf_counter(), cpu - time.thread_time()
            if saver is not None:
                saver.fence()
            fence, cpu = time.perf_counter() - at_fence, cpu + time.thread_time()
            net.update()
            whole = time.perf_counter() - begun
            if saver is not None:
                saver.end()
            return called, fence, called + fence, whole, cpu

        tensors = net.tensors()
        copy = memcpy(tensors)
        variants: dict[str, Callable[[int], Times]] = {
            "memcpy": lambda turn: (lambda t: (*t[:1] * 4, t[2]))(copy(turn)), "none": lambda turn: step(None),
            "copy": lambda turn: step(ours, background=True, staging="copy"),
            "overlap": lambda turn: step(ours, background=True, staging="overlap")}
        kinds = {"thread": _KINDS["thread"]} if quick else _KINDS
        for index, (name, kind) in enumerate([*kinds.items(), (_OVERLAPS, _KINDS["thread"])]):
            saver = Dcp(rank, f"{place}/dcp-{index}", tensors, kind, keep_stager=True, overlap=name == _OVERLAPS)
            variants[f"dcp, {name}"] = lambda turn, saver=saver: step(saver)  # type: ignore[misc]
        try:
            return rotate(variants, turns)
        finally:
            end_children()


def _overlap(size: int, place: Path, quick: bool) -> Iterator[Row]:
    found = ranks(_overlap_rank, str(place), size, 1 if quick else LATENCY, quick)
    shown = f"{size >> 20} MB"
    peers = [name for name in found if name.startswith("dcp, ") and not name.endswith(_OVERLAPS)]
    best = min(peers, key=lambda name: statistics.median(column(found, name, 2)))
    for peer in peers:
        wanted: dict[str, Any] = {"target": 1 / 40, "limit": 3e-3} if peer == best else {}
        which = ", the best that copies in it" if wanted else ""
        yield row(f"staging='overlap', {shown}: stall / {peer}{which}", found, "overlap", peer, 2, case=2,
                  note="call + fence, forward and backward between them; dcp keeps its stager", least=LATENCY, **wanted)
    yield row(f"staging='overlap', {shown}: stall / dcp, {_OVERLAPS}", found, "overlap", f"dcp, {_OVERLAPS}", 2, 1.0,
              "both copy during forward and backward", case=2, least=LATENCY)
    for index, what in enumerate(("call", "fence", "call + fence")):
        yield row(f"staging='overlap', {shown}: {what} / warm memcpy", found, "overlap", "memcpy", index,
                  case=5 if what == "fence" else 2, limit=5e-3 if what == "fence" else None, least=LATENCY)
    yield row("the same in CPU time of the training thread", found, "overlap", "memcpy", 4, case=2)
    yield row("call + fence, staging='overlap' / 'copy'", found, "overlap", "copy", 2, case=2)
    for how in ("overlap", "copy", *(name for name in found if name.startswith("dcp"))):
        yield row(f"the step with the save in it, {how} / a step", found, how, "none", 3, note="the writer works too", case=5)


# -- beside DCP --------------------------------------------------------------------------------------------------------


def _dcp_rank(rank: int, world: int, place: str, size: int, turns: int, quick: bool) -> Found:
    tensors = share(size)
    with ExitStack() as stack:
        ours = Ours(stack, f"{place}/ours", distckpt.Shards(tensors))
        variants: dict[str, Callable[[int], Times]] = {
            "ours": ours.background, "sync": ours.synchronous, "dcp.save": Dcp(rank, f"{place}/dcp", tensors)}
        for name, kind in _KINDS.items():
            if not quick or name == "thread":
                variants[f"{name}, kept stager"] = Dcp(rank, f"{place}/{name}-kept", tensors, kind, keep_stager=True)
            if not quick:
                variants[name] = Dcp(rank, f"{place}/{name}", tensors, kind)
        try:
            return rotate(variants, turns)
        finally:
            end_children()


def _dcp(size: int, place: Path, quick: bool) -> Iterator[Row]:
    found = ranks(_dcp_rank, str(place), size, 1 if quick else DISK, quick)
    shown = f"{size >> 20} MB"
    durable = {"sync": 1.15, "thread": 1 / 1.25, "process": 1 / 2}
    for name in ("sync", "dcp.save", *(n for n in found if n.partition(",")[0] in _KINDS)):
        label = {"sync": "our synchronous save", "dcp.save": "dcp.save"}.get(name, f"dcp.async_save, {name}")
        yield row(f"save returns, {shown} / {label}", found, "ours", name, case=2)
        yield row("the same in CPU time of the training thread", found, "ours", name, 2, case=2)
        yield row(f"save durable, {shown} / {label}", found, "ours", name, 1, durable.get(name), case=4)


# -- training beside a save --------------------------------------------------------------------------------------------


def _cpu_beside() -> float:
    """CPU seconds so far of everything but this thread: the process's other threads, and its children."""
    me = psutil.Process()
    times = [p.cpu_times() for p in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times) - time.thread_time()


def _slowdown_rank(rank: int, world: int, place: str, size: int, turns: int, quick: bool) -> Found:
    """(a step while a save is in flight, one without, seconds of training lost to the save, seconds in flight, CPU seconds
    that the save took beside the training thread)"""
    tensors, trainer = share(size), Trainer()
    alone = 0.2 if quick else 0.7
    kinds = {"thread": _KINDS["thread"]} if quick else _KINDS

    def beside(saver: Ours | Dcp, **how: Any) -> Callable[[int], Times]:
        def once(turn: int) -> Times:
            before, cpu = trainer.run(alone), _cpu_beside()
            trainer.fence = saver.fence
            stall, handle = saver.begin(**how)
            steps, seconds = trainer.until(handle.done)
            trainer.fence, cpu = None, _cpu_beside() - cpu
            saver.end()
            free = (before + trainer.run(alone)) / 2
            lost = max(stall + seconds - steps * free, _LEAST)
            return seconds / steps, free, lost, stall + seconds, cpu
        return once

    with ExitStack() as stack:
        variants = {f"ours, {name}": beside(Ours(stack, f"{place}/{name}", distckpt.Shards(tensors), writer=name),
                                            background=True) for name in kinds}
        variants["ours, overlap"] = beside(Ours(stack, f"{place}/overlap", distckpt.Shards(tensors)), background=True,
                                           staging="overlap")
        for name, kind in kinds.items():
            variants[f"dcp, {name}"] = beside(Dcp(rank, f"{place}/dcp-{name}", tensors, kind, keep_stager=True))
        try:
            return rotate(variants, turns)
        finally:
            end_children()


def _slowdown(size: int, place: Path, quick: bool) -> Iterator[Row]:
    found = ranks(_slowdown_rank, str(place), size, 1 if quick else DISK, quick)
    slower = {name: [t[0] / t[1] for t in times] for name, times in found.items()}
    for name in found:
        yield Row(f"a step beside a save of {size >> 20} MB / without: {name}", column(found, name, 0), column(found, name, 1),
                  note=f"in flight {statistics.median(column(found, name, 3)):.2f} s", case=5)
    for ours in (n for n in found if n.startswith("ours")):
        for theirs in (n for n in found if n.startswith("dcp")):
            lost = f"training lost per save: {ours} / {theirs}"
            yield row(lost, found, ours, theirs, 2, 1.0, "stall + slower steps", case=5)
            yield Row(f"slowdown of a step beside it: {ours} / {theirs}", slower[ours], slower[theirs], 1.0, unit="", case=5)
            yield row(f"CPU beside the training thread: {ours} / {theirs}", found, ours, theirs, 4, case=5)
