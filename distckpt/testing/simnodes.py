"""The simulation on nodes' own disks, each of which may lose its power alone.

What the checker judges is what stands on all of them: a checkpoint is one whose share stands whole, with one attempt, on
every disk. By its own rule, when a restart has saved once more, every disk has the same checkpoints: no node rolled one
forward, kept one or rotated one by its own view (S1).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from distckpt.testing import checker
from distckpt.testing.checker import Tree
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.simjob import ROOT, Program, Strike
from distckpt.testing.simulation import Run, Simulation, tree_of

_STATES = 24


class Nodes(Simulation):
    """``nodes`` disks for the ranks, in blocks. ``cuts``: how many of the states that a power cut may leave are tried."""

    def __init__(self, world: int = 2, seed: int = 0, faults: Sequence[str | Strike] = (), *, nodes: int = 2,
                 disk: Callable[[], CrashFiles] = lambda: CrashFiles("/disk"), **options: Any) -> None:
        super().__init__(world, seed, faults, disk=disk, **{"storage": "node-local", **options})
        self.nodes = [disk() for _ in range(nodes)]

    def _disks(self, world: int) -> list[CrashFiles]:
        return [self.nodes[rank * len(self.nodes) // world] for rank in range(world)]

    def run(self, program: Program) -> Run:
        run = self.job(program, self.strikes)
        saves, fired = list(self.saves), [self.strikes[number] for number in run.struck]
        dark = set(range(len(self.nodes))) if any(s.kind == "power" for s in fired) else {
            s.rank * len(self.nodes) // self.world for s in fired if s.kind == "node"}
        for disks in self._states(dark):
            self.nodes, self.saves, run.states = disks, list(saves), run.states + 1
            self.restart(run)
        return run

    def _states(self, dark: set[int]) -> list[list[CrashFiles]]:
        """Some of what the disks of the nodes that lost their power may be, with the others as they are."""
        if not dark:
            return [self.nodes]
        draw = random.Random(repr((self.seed, self.strikes)))
        each = [list(disk.crash_states(_STATES, self.seed)) if number in dark else [disk]
                for number, disk in enumerate(self.nodes)]
        return [[draw.choice(states).after_kill() for states in each] for _ in range(self.cuts)]

    def tree(self) -> Tree:
        return merged([tree_of(disk) for disk in self.nodes])

    def _content(self, path: str) -> str:
        name = path.removeprefix(f"{ROOT}/")
        return checker.standing(self.tree()).get(name, (0, f"{name} does not stand on every node"))[1]

    def _settled(self) -> list[str]:
        stand = [attempts(tree_of(disk)) for disk in self.nodes]
        return [f"S1: node {number} has {sorted(have)}, node 0 has {sorted(stand[0])}" for number, have in enumerate(stand)
                if have != stand[0]]


def attempts(tree: Tree) -> dict[str, str]:
    """Name to attempt of every share that stands whole."""
    return {name: json.loads(tree[f"{name}/commit.json"])["head"]["attempt"] for name in checker.standing(tree)}


def merged(trees: Sequence[Tree]) -> dict[str, bytes]:
    """One tree of what stands on every disk, as if it had been written on one; with every disk's staging and trash."""
    found: dict[str, bytes] = {}
    stand = [attempts(tree) for tree in trees]
    for name, attempt in stand[0].items():
        if all(other.get(name) == attempt for other in stand):
            heads = [json.loads(tree[f"{name}/commit.json"])["head"] for tree in trees]
            shares = [tuple(head.get("part", (0, 1))) for head in heads]
            if shares == [(number, len(trees)) for number in range(len(trees))] or len(trees) == 1:
                found.update(_whole(name, heads[0], trees))
    for number, tree in enumerate(trees):
        for path, data in tree.items():
            for kind in ("staging", "trash"):
                if path.startswith(f".distckpt/{kind}/"):
                    found[path.replace(f"/{kind}/", f"/{kind}/{number}-", 1)] = data
    return found


def _whole(name: str, head: dict[str, Any], trees: Sequence[Tree]) -> dict[str, bytes]:
    files = {path: data for tree in trees for path, data in tree.items()
             if path.startswith(f"{name}/") and path != f"{name}/commit.json"}
    rows = [[path[len(name) + 1:], len(data), f"xxh3-128:{xxhash.xxh3_128(data).hexdigest()}", 0] for path, data in files.items()]
    sealed = (b'{"head":' + json.dumps(head).encode() + b',\n"body":' + json.dumps({"files": rows}).encode())
    seal = f'"sha256:{hashlib.sha256(sealed).hexdigest()}"}}\n'.encode()
    return {**files, f"{name}/commit.json": sealed + b',\n"seal":' + seal}
