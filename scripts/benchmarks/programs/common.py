"""What every program has in common. It runs in the peer's own environment, so nothing of this repository is imported.

    PROGRAM PLACE MB    save MB into PLACE, once for each line of stdin, {"mode": "background", "turn": 3}, and answer each line
                        with a line of JSON: what it took. The first line is said unasked: the version, and the modes there are.

Every mode but "sync" lets training go on: some computing stands between the call and the fence, where a loop has its forward
and backward pass, and the state is not changed before the fence. The stall is the call and the fence.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PIECE = 8 << 20
BETWEEN = 0.3  # s
State = dict[str, np.ndarray]


def nothing() -> None:
    return


@dataclass
class Pending:
    """A save that goes on: ``wait`` until it has ended, ``fence`` until the state may be changed."""

    wait: Callable[[], object]
    fence: Callable[[], object] = nothing


Save = Callable[[str, int], "Pending | None"]
"""Save into this directory, which is not there yet, as this step. None: it has ended."""


@dataclass
class Peer:
    """``store``: the one directory in which it keeps its saves and deletes old ones; else each save has a directory of its own.
    ``durable``: when it says that a save has ended, that is durable. ``rest``: let it end what it does after a save."""

    version: str
    modes: dict[str, Save]
    store: str = ""
    durable: bool = False
    rest: Callable[[], object] = nothing
    close: Callable[[], object] = nothing


def main(start: Callable[[str, State], Peer]) -> None:
    place, size = sys.argv[1], int(sys.argv[2])
    os.makedirs(place)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print
    generator = np.random.default_rng(7)
    state = {f"layer_{i}": generator.standard_normal(PIECE // 4, dtype=np.float32) for i in range(max((size << 20) // PIECE, 1))}
    peer = start(place, state)
    print(json.dumps({"version": peer.version, "modes": list(peer.modes)}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        for array in state.values():
            array += 1e-3  # an optimizer's step: nobody may find the bytes of the save before
        print(json.dumps(_measure(peer, f"{place}/step-{asked['turn']}", **asked)), file=answers, flush=True)
    peer.close()


def _measure(peer: Peer, path: str, mode: str, turn: int) -> dict[str, float]:
    begun = time.perf_counter()
    pending = peer.modes[mode](path, turn)
    stall = time.perf_counter() - begun
    if pending is not None:
        _compute()
        at_fence = time.perf_counter()
        pending.fence()
        stall += time.perf_counter() - at_fence
        pending.wait()
    ended = time.perf_counter() - begun
    if not peer.durable:
        _sync_tree(peer.store or path)
    durable = time.perf_counter() - begun
    peer.rest()
    if not peer.store:
        shutil.rmtree(path)
    return {"stall": stall, "ended": ended, "durable": durable}


def _compute() -> None:
    matrix, end = np.ones((256, 256), dtype=np.float32), time.perf_counter() + BETWEEN
    while time.perf_counter() < end:
        matrix @ matrix


def _sync_tree(path: str) -> None:
    """Every file and directory of it, and the directory it is in."""
    for top, _, names in os.walk(path, topdown=False):
        for name in names:
            _fsync(os.path.join(top, name))
        _fsync(top)
    _fsync(os.path.dirname(path))


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
