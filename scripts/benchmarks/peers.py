"""Other checkpoint libraries, each in an environment of its own, in one process that saves the same bytes in its own way.

The environments are made on demand in ``.cache/peers`` (or $DISTCKPT_BENCH_PEERS), by pip, and borrow this one's torch. A peer
that does not install or run is named with its error. Every round each program changes its state and saves it once in each of its
modes; "+ fsync" is the save and an fsync of every file and directory of it, "as it ends" the same save without.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmarks.place import at_rest
from scripts.benchmarks.report import DISK, LATENCY, Row
from scripts.benchmarks.rounds import rotated, scenarios
from scripts.proof.peers.child import Child, environment

REPOSITORY = Path(__file__).parents[2]
HOMES = Path(os.environ.get("DISTCKPT_BENCH_PEERS", REPOSITORY / ".cache/peers"))
PROGRAMS = Path(__file__).parent / "programs"
_START, _ASK, _END = 180.0, 120.0, 20.0
_OURS, _BARE, _SYNC = "distckpt", "write + fsync", "sync"
_PLAIN = 0.85  # what row 1 asks beside the bare write


@dataclass(frozen=True)
class Peer:
    """``packages``: what its environment needs beside torch and numpy; none: it runs in this one."""

    name: str
    program: str
    packages: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        return str(HOMES.absolute() / self.name / "bin/python") if self.packages else sys.executable


PEERS = (
    Peer(_OURS, "distckpt_manager"),
    Peer(_BARE, "write"),
    Peer("torch DCP", "torch_dcp"),
    Peer("torchsnapshot", "torchsnapshot_take", ("torchsnapshot==0.1.0",)),
    Peer("orbax", "orbax_checkpointer", ("jax==0.10.2", "orbax-checkpoint==0.12.8")),
    Peer("torch_checkpointing", "torch_checkpointing_manager", ("torch-checkpointing==0.1.1",)),
    Peer("moonclip", "moonclip_manager", ("moonclip==0.3.1",)),
    Peer("ravex", "ravex_loop", ("moonclip==0.3.1", "ravex==0.10.1")),
)

Samples = dict[tuple[str, str], list[dict[str, float]]]
"""By peer and mode, each round's seconds: "stall", until "ended", until "durable"."""


def run(place: Path, quick: bool, only: str, peers: tuple[Peer, ...] = PEERS) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"durable": partial(_durable, peers), "stall": partial(_stall, peers)})


def _durable(peers: tuple[Peer, ...], place: Path, quick: bool) -> Iterator[Row]:
    size = 24 if quick else 512
    yield from _measured(peers, place, size, 1 if quick else DISK, lambda mode: mode == _SYNC, durable_rows)


def _stall(peers: tuple[Peer, ...], place: Path, quick: bool) -> Iterator[Row]:
    size = 24 if quick else 256
    yield from _measured(peers, place, size, 1 if quick else LATENCY, lambda mode: mode != _SYNC, stall_rows)


def _measured(peers: tuple[Peer, ...], place: Path, size: int, turns: int, wanted: Callable[[str], bool],
              rows: Callable[[Samples, str], Iterator[Row]]) -> Iterator[Row]:
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        running: dict[str, tuple[Child, list[str]]] = {}
        for peer in peers:
            try:
                child, modes = _start(peer, place, size, stack)
                running[peer.name] = child, [mode for mode in modes if wanted(mode)]
            except (RuntimeError, OSError) as error:
                failed[peer.name] = str(error)
        found = _rounds(running, failed, turns, place)
        for child, _ in running.values():
            child.end(_END)
    if _OURS in failed:
        raise RuntimeError(f"ours was not measured: {failed[_OURS]}")
    yield from rows(found, f"{size} MB, 1 process")
    for name, why in failed.items():
        yield Row(f"beside {name}", [], [], note=" ".join(why.split()))


def _start(peer: Peer, place: Path, size: int, stack: ExitStack) -> tuple[Child, list[str]]:
    if peer.packages:
        why = environment(HOMES / peer.name, peer.packages)
        if why:
            raise RuntimeError(f"did not install: {why}")
    env = {**os.environ, "PYTHONPATH": "" if peer.packages else str(REPOSITORY), "OMP_NUM_THREADS": "1",
           "RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONDONTWRITEBYTECODE": "1"}
    program = PROGRAMS / f"{peer.program}.py"
    folder = place / peer.name.replace(" ", "")
    child = Child(peer.name, [peer.python, str(program), str(folder), str(size)], env, place / f"{folder.name}.log")
    stack.enter_context(child)
    try:
        hello = child.hear(_START)
    except RuntimeError as error:
        raise RuntimeError(f"did not start: {error}: {child.complaint()}") from error
    print(f"   {peer.name} {hello['version']}", flush=True)
    modes = hello["modes"]
    assert isinstance(modes, list)
    return child, modes


def _rounds(running: dict[str, tuple[Child, list[str]]], failed: dict[str, str], turns: int, place: Path) -> Samples:
    """Everybody's rounds, without the first, which warms up. Who fails is in ``failed`` and out of the found."""
    found: Samples = {(name, mode): [] for name, (_, modes) in running.items() for mode in modes}
    save = 0
    for turn in range(turns + 1):
        for name in (n for n in rotated(list(running), turn) if n not in failed):
            child, modes = running[name]
            for mode in rotated(modes, turn) if modes else ():
                save += 1
                at_rest(place)
                try:
                    answer = child.ask(json.dumps({"mode": mode, "turn": save}), _ASK)
                except RuntimeError as error:
                    failed[name] = f"{error}: {child.complaint()}"
                    break
                found[name, mode].append({key: float(str(value)) for key, value in answer.items()})
    return {key: times[1:] for key, times in found.items() if key[0] not in failed}


def _beside(found: Samples, name: str, ours: str, theirs: tuple[str, str], figure: str, own: str = "", **more: Any) -> Row:
    return Row(name, [times[own or figure] for times in found[_OURS, ours]], [times[figure] for times in found[theirs]],
               **{"case": 1, **more})


def durable_rows(found: Samples, shown: str) -> Iterator[Row]:
    for name in dict.fromkeys(name for name, _ in found if name != _OURS):
        bare = name == _BARE
        yield _beside(found, f"Durable save, {shown} / {name}{'' if bare else ' + fsync'}", _SYNC, (name, _SYNC), "durable",
                      target=_PLAIN if bare else 1.0)
        if not bare:
            yield _beside(found, f"Durable save, {shown} / {name} as it ends", _SYNC, (name, _SYNC), "ended", "durable")


def stall_rows(found: Samples, shown: str) -> Iterator[Row]:
    behind = [key for key in found if key[0] != _OURS]
    best = min((key for key in behind if key[1] != "overlap"), default=None,
               key=lambda key: statistics.median(times["stall"] for times in found[key]))
    for key in behind:
        stall = partial(_beside, found, theirs=key, figure="stall", case=2, least=LATENCY)
        if key[1] == "overlap":
            yield stall(f"Stall, both overlap, {shown} / {key[0]}", "overlap", target=1.0)
            continue
        wanted: dict[str, Any] = {"target": 1 / 40, "limit": 3e-3} if key == best else {}
        which = ", the best that copies" if wanted else ""
        yield stall(f"Stall, overlap, {shown} / {key[0]}{which}", "overlap", **wanted)
        yield stall(f"Stall, both copy, {shown} / {key[0]}", "background")
    for name, mode in behind:
        yield _beside(found, f"Background, durable, {shown} / {name}, {mode}, + fsync", "background", (name, mode), "durable",
                      case=4)
