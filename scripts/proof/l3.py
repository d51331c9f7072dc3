"""Layer L3: power cuts, replayed block writes and full disks, on real file systems.

``python -m scripts.proof.l3 shutdown|replay|full [--seconds S] [--seed N] [--most N] [--mutant NAME] [--log FILE]`` runs one of
the three by hand; it ends with 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from scripts.proof import disks, layer
from scripts.proof.l3_full import fills
from scripts.proof.l3_program import ALL_MUTANTS
from scripts.proof.l3_replay import replays
from scripts.proof.l3_shutdown import cuts
from scripts.proof.layer import Budget, Layer, Result
from tests.crash.forks import zygote

ALL = 1 << 30
SLACK = 150.0
"""Seconds that the last life and the clean-up may take beyond the budget."""

Sweep = Callable[[float, int, str, int, str], Result]
SWEEPS: dict[str, Sweep] = {"shutdown": cuts, "replay": replays, "full": fills}


def run(name: str, seconds: float, seed: int = 0, most: int = ALL, mutant: str = "") -> Result:
    """One of ``SWEEPS`` in a zygote, with a folder of its own in memory."""
    folder = tempfile.mkdtemp(prefix="distckpt-l3-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        found = zygote(_sweep, name, os.getpid(), seconds, seed, folder, most, mutant, timeout=seconds + SLACK)
        assert isinstance(found, Result)
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(name: str, owner: int, seconds: float, seed: int, folder: str, most: int, mutant: str) -> Result:
    _end_with(owner, folder)
    return SWEEPS[name](seconds, seed, folder, most, mutant)


def _end_with(owner: int, folder: str) -> None:
    """Should ``owner`` be killed, this process goes as well, and with it the mounts; then the folder."""
    me = os.getpid()
    if os.fork():
        return
    handles = [os.pidfd_open(owner), os.pidfd_open(me)]
    if handles[0] in select.select(handles, [], [])[0]:
        os.kill(me, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _layer(name: str, title: str, needs: tuple[str, ...], quick: float, full: float) -> Layer:
    def work(budget: Budget) -> Result:
        return run(name, budget.left, budget.seed)
    return Layer(f"l3-{name}", title, lambda: disks.missing(*needs, install=True), work, quick, full)


_MAKERS = ("mkfs.ext4", "mkfs.xfs", "mkfs.btrfs")
LAYERS = [
    _layer("shutdown", "power cuts on real ext4 and XFS", _MAKERS[:2], 15, 900),
    _layer("replay", "block writes replayed on ext4, XFS and Btrfs", ("/dev/fuse", *_MAKERS), 15, 600),
    _layer("full", "full and tiny disks, ext4 and tmpfs", _MAKERS[:1], 10, 300),
]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("sweep", choices=SWEEPS)
    options.add_argument("--seconds", type=float, default=15)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--most", type=int, default=ALL)
    options.add_argument("--mutant", choices=ALL_MUTANTS, default="")
    options.add_argument("--log", type=Path)
    chosen = options.parse_args()
    result = run(chosen.sweep, chosen.seconds, chosen.seed, chosen.most, chosen.mutant)
    if chosen.log:
        layer.append(chosen.log, [result])
    print(json.dumps(asdict(result), indent=1))
    sys.exit(1 if result.violations or result.hangs else 0)


if __name__ == "__main__":
    main()
