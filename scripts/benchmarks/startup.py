"""What the library costs where it does nothing: its import, its command, a ``poll`` in peace: rows 14 and 15 of the issue."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

import distckpt
from distckpt.coordination.bootstrap import Bootstrap
from distckpt.coordination.store import Client
from distckpt.options import Seams
from scripts.benchmarks.report import Row
from scripts.benchmarks.rounds import scenarios

_PEERS = ("torch.distributed.checkpoint", "safetensors.torch", "accelerate", "deepspeed", "lightning", "torchsnapshot",
          "orbax.checkpoint")


def run(place: Path, quick: bool, only: str) -> Iterator[Row]:
    yield from scenarios(place, quick, only, {"poll": _poll, "import": _import})


class _Counted:
    """A store that counts the messages."""

    def __init__(self, raw: Any) -> None:
        self._raw, self.messages = raw, 0

    def __getattr__(self, name: str) -> Any:
        self.messages += 1
        return getattr(self._raw, name)


def _poll(place: Path, quick: bool) -> Iterator[Row]:
    store = _Counted(dist.HashStore())  # type: ignore[attr-defined]
    seams = Seams(bootstrap=Bootstrap("counted", 0, 1, lambda: Client(store, "poll/")))
    many, times = 10_000, []
    with distckpt.CheckpointManager(place / "root", keep_last=1, save_every=1 << 40, seams=seams) as manager:
        manager.poll(1)
        time.sleep(1.5)  # what the start sends is sent by then
        before = store.messages
        for _ in range(10 if quick else 50):
            begun = time.perf_counter()
            for step in range(2, 2 + many):
                manager.poll(step)
            times.append((time.perf_counter() - begun) / many)
        sent = store.messages - before
    yield Row("one poll in peace", times, [], note=f"{sent} messages in {many * len(times)} polls, none wanted",
              case=14, limit=2e-6)


def _seconds(*code: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *code], check=True, capture_output=True)
    return time.perf_counter() - begun


def _import(place: Path, quick: bool) -> Iterator[Row]:
    turns = 3 if quick else 9
    peers = [name for name in _PEERS if importlib.util.find_spec(name.partition(".")[0])]
    ours, shown, bare = [], [], []
    theirs: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(turns + 1):
        ours.append(_seconds("-c", "import distckpt"))
        shown.append(_seconds("-m", "distckpt", "--help"))
        bare.append(_seconds("-c", "pass"))
        for name in peers:
            theirs[name].append(_seconds("-c", f"import {name}"))
    yield Row("import distckpt / python alone", ours[1:], bare[1:], case=15, limit=0.15)
    yield Row("distckpt --help / python alone", shown[1:], bare[1:], case=15, limit=0.15)
    quickest = min(peers, key=lambda name: min(theirs[name]))
    for name in peers:
        yield Row(f"import distckpt / import {name}", ours[1:], theirs[name][1:], 1 / 15 if name == quickest else None,
                  "the quickest of the peers here" if name == quickest else "", case=15)
