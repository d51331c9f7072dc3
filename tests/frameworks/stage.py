"""Ranks forked from a process that has a framework loaded: a stage for each framework, kept for all tests of a file.

The stage is a process of its own (pytest's has threads) that imports the modules once; every run forks real ranks from it,
with gloo and the variables that launchers set.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

LIMIT = 60.0
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0", "TOKENIZERS_PARALLELISM": "false",
               "HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true", "CUDA_VISIBLE_DEVICES": ""}
EXTENSIONS = os.path.expanduser("~/.cache/distckpt-torch-extensions")
"""Where DeepSpeed builds what it compiles, unless TORCH_EXTENSIONS_DIR says another place."""


class Stage:
    """``Stage("deepspeed")`` has that module loaded, besides torch and distckpt."""

    def __init__(self, *modules: str, env: dict[str, str] | None = None) -> None:
        environment = {**os.environ, **ENVIRONMENT, **(env or {})}
        environment.setdefault("TORCH_EXTENSIONS_DIR", EXTENSIONS)
        self._process = subprocess.Popen([sys.executable, "-m", "tests.frameworks.stage", *modules], env=environment,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, world: int, target: Callable[..., Any], *args: Any, limit: float = LIMIT, init: bool = True) -> list[Any]:
        """How ``target(rank, world, *args)`` ended on each rank: ``distckpt.testing.forks.Ended``. AssertionError with the
        stacks of a rank that did not end within ``limit`` seconds, and how others failed that it may have waited for. ``init``:
        make a gloo process group first."""
        assert self._process.stdin is not None and self._process.stdout is not None
        _send(self._process.stdin, (world, target, args, limit, init))
        ends: list[Any] = _receive(self._process.stdout)
        stuck = [rank for rank, end in enumerate(ends) if end.hung]
        failed = "\n".join(f"rank {rank}: {end}" for rank, end in enumerate(ends) if not end.ok)
        assert not stuck, f"ranks {stuck} still ran after {limit:g} s; the stacks, and other ranks that failed:\n{failed}"
        return ends

    def values(self, world: int, target: Callable[..., Any], *args: Any, limit: float = LIMIT, init: bool = True) -> list[Any]:
        """What every rank returned; AssertionError with the log of one that did not."""
        ends = self.run(world, target, *args, limit=limit, init=init)
        for rank, end in enumerate(ends):
            assert end.ok, f"rank {rank}: {end}"
        return [end.value for end in ends]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def staged(*modules: str) -> Any:
    """The fixture ``stage`` of a module of tests: one Stage with ``modules`` loaded, for all of them."""
    import pytest

    @pytest.fixture(scope="module", name="stage")
    def stage() -> Iterator[Stage]:
        found = Stage(*modules)
        yield found
        found.close()

    return stage


def _send(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError("the stage has died; what it said is on stderr")
    return pickle.loads(pipe.read(struct.unpack("<Q", head)[0]))


def _rank(place: Any, target: Callable[..., Any], args: tuple[Any, ...], init: bool) -> Any:
    import logging

    import torch

    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(place.rank), LOCAL_RANK=str(place.rank), WORLD_SIZE=str(place.world),
                      LOCAL_WORLD_SIZE=str(place.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(place.port))
    if init:
        place.gloo()
    return target(place.rank, place.world, *args)


def main() -> None:
    import time

    import torch
    import torch.distributed.checkpoint

    import distckpt.manager
    import distckpt.payloads.train_state  # noqa: F401
    from distckpt.testing import forks

    for name in sys.argv[1:]:
        importlib.import_module(name)
    torch.set_num_threads(1)
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    while True:
        try:
            world, target, args, limit, init = _receive(orders)
        except EOFError:
            return
        deadline = time.monotonic() + limit
        ranks = forks.start(world, _rank, target, args, init, limit=limit)
        _send(answers, [rank.end(deadline) for rank in ranks])


if __name__ == "__main__":
    main()
