"""What the library costs where it does nothing: its import, its command, a ``poll`` in peace: rows 14 and 15 of the issue."""

from __future__ import annotations

import importlib.util
import os
import statistics
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
from scripts.benchmarks import peers
from scripts.benchmarks.report import LATENCY, Row
from scripts.benchmarks.rounds import rotated, scenarios
from scripts.proof.peers.child import environment

_HERE = ("torch.distributed.checkpoint", "safetensors.torch", "accelerate", "deepspeed", "lightning")
_APART = {"torchsnapshot": "torchsnapshot", "orbax": "orbax.checkpoint", "torch_checkpointing": "torch_checkpointing",
          "moonclip": "moonclip", "ravex": "ravex"}
"""What is imported of the peers that have environments of their own."""
_QUICKEST = 3


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
    yield from poll_rows(times, many * len(times), sent)


def poll_rows(times: list[float], polls: int, sent: int) -> Iterator[Row]:
    yield Row("one poll in peace", times, [], note=f"the mean of {polls // len(times)} polls each", case=14, limit=2e-6,
              least=LATENCY)
    yield Row(f"messages of {polls} polls in peace", [float(sent)], [], case=14, limit=0.0, unit="", least=1)


def _seconds(python: str, *code: str) -> float:
    begun = time.perf_counter()
    subprocess.run([python, *code], check=True, capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return time.perf_counter() - begun


def _peers() -> tuple[dict[str, tuple[str, str]], list[Row]]:
    """{peer: (its Python, what is imported)}, and a row for each that is not to be had. Some have environments of their own."""
    found, absent = {}, []
    for module in _HERE:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            found[module] = (sys.executable, module)
        else:
            absent.append(Row(f"beside import {module}", [], [], note=f"did not install: {sys.executable} does not have it"))
    for peer in peers.PEERS:
        if peer.name not in _APART:
            continue
        module, why = _APART[peer.name], environment(peers.HOMES / peer.name, peer.packages)
        try:
            if why:
                raise RuntimeError(why)
            _seconds(peer.python, "-c", f"import {module}")
            found[module] = (peer.python, module)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            absent.append(Row(f"beside import {module}", [], [], note=f"did not install: {' '.join(str(error).split())}"))
    return found, absent


def _import(place: Path, quick: bool) -> Iterator[Row]:
    """Every peer is imported twice, to find the quickest; then those, and ours, have all the rounds."""
    modules, absent = _peers()
    first = {name: min(_seconds(python, "-c", f"import {module}") for _ in range(1 if quick else 2))
             for name, (python, module) in modules.items()}
    quickest = sorted(first, key=first.__getitem__)[:_QUICKEST]
    print("   imports, s: " + ", ".join(f"{name} {took:.1f}" for name, took in first.items()), flush=True)
    programs: dict[str, tuple[str, ...]] = {
        "ours": (sys.executable, "-c", "import distckpt"), "help": (sys.executable, "-m", "distckpt", "--help"),
        "bare": (sys.executable, "-c", "pass"),
        **{name: (modules[name][0], "-c", f"import {modules[name][1]}") for name in quickest}}
    found: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range((2 if quick else LATENCY) + 1):
        for name in rotated(list(programs), turn):
            found[name].append(_seconds(*programs[name]))
    yield from import_rows({name: times[1:] for name, times in found.items()})
    yield from absent


def import_rows(found: dict[str, list[float]]) -> Iterator[Row]:
    yield Row("import distckpt / python alone", found["ours"], found["bare"], case=15, limit=0.15, least=LATENCY)
    yield Row("distckpt --help / python alone", found["help"], found["bare"], case=15, limit=0.15, least=LATENCY)
    others = [name for name in found if name not in ("ours", "help", "bare")]
    quickest = min(others, key=lambda name: statistics.median(found[name]), default=None)
    for name in others:
        first, python = name == quickest, statistics.median(found["bare"]) / statistics.median(found[name])
        yield Row(f"import distckpt / import {name}", found["ours"], found[name], 1 / 15 if first else None,
                  f"{'the quickest of the peers; ' if first else ''}python alone is {python:.2g} of it", case=15, least=LATENCY)
