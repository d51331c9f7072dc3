"""Is what a peer resumes from after a cut what it had acknowledged?"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from distckpt.testing.replay import Names, Step
from scripts.proof.peers.child import Child
from scripts.proof.peers.known import Peer
from scripts.proof.peers.recording import Point, Recording, Tree, read_tree, tree_of, write_tree

MODES = ("kill", "ordered", "weak")
Content = tuple[str, Tree]


class Server(Child):
    """A program of a peer, in one of its modes."""

    def __init__(self, peer: Peer, mode: str, log: Path) -> None:
        super().__init__(f"{peer.name} {mode}", peer.command(mode), peer.environment, log)


@dataclass
class Picker:
    """What ``peer`` resumes from: its own rule, asked in its own environment, on a directory made for that."""

    peer: Peer
    server: Server
    scratch: Path
    number: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def pick(self, tree: Tree) -> Content | None:
        """The chosen path below the root with what it holds, or None for nothing."""
        self.number += 1
        folder = self.scratch / f"state-{self.number}"
        write_tree(folder, tree)
        try:
            return self.look(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def look(self, root: Path) -> Content | None:
        answer = self.server.ask(str(root))
        if answer["error"]:
            kind = str(answer["error"]).split(":")[0]
            self.errors[kind] = self.errors.get(kind, 0) + 1
        if answer["path"] is None:
            return None
        chosen = os.path.normpath(str(answer["path"]))
        name = os.path.relpath(chosen, root)
        if "\0" in chosen or name.startswith(".."):  # a pointer file made of zeros, say
            return name, {}
        if os.path.isdir(chosen):
            return name, {p: d for p, d in read_tree(Path(chosen)).items() if self.peer.reads(p)}
        return name, {"": Path(chosen).read_bytes()} if os.path.isfile(chosen) else {}


@dataclass
class Goldens:
    """What the peer itself would have resumed from at each acknowledgement, nothing being lost."""

    peer: Peer
    of: dict[int, Content]

    def match(self, found: Content | None) -> int:
        """The newest acknowledged save that ``found`` is, bit for bit; 0 when it is none, -1 when it is something else."""
        if found is None:
            return 0
        path, tree = found
        for number, (golden_path, golden) in sorted(self.of.items(), reverse=True):
            if golden_path == path and all(
                    tree[name] == data if name in tree else data is None or not self.peer.needs(name)
                    for name, data in golden.items()):
                return number
        return -1


def goldens(peer: Peer, recording: Recording, picker: Picker) -> Goldens:
    """RuntimeError when a save is not what the peer resumes from right after it: then the program or the rule is wrong."""
    found: dict[int, Content] = {}
    seen = 0
    for point in recording.points():
        if point.acked != seen:
            seen = point.acked
            content = picker.pick(tree_of(point.disk, recording.root))
            if content is None or not content[1]:
                raise RuntimeError(f"{peer.name}: nothing to resume from after save {seen}")
            if content in found.values():
                raise RuntimeError(f"{peer.name}: save {seen} is the same as an earlier one")
            found[seen] = content
    return Goldens(peer, found)


@dataclass
class Tally:
    """Distinct states of one mode, and the bad ones among them by what is wrong."""

    generated: int = 0
    states: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> int:
        return sum(self.bad.values())

    def add(self, wrong: str, example: str) -> None:
        """One state: ``wrong`` as ``verdict`` has it."""
        if wrong:
            self.bad[wrong] = self.bad.get(wrong, 0) + 1
            self.examples.setdefault(wrong, example)


@dataclass
class Judge:
    """All crash states of a recording, each distinct one shown to the peer's rule once. ``after``: cuts after such steps only."""

    peer: Peer
    recording: Recording
    picker: Picker
    golden: Goldens
    limit: int
    seed: int = 0
    known: dict[bytes, int] = field(default_factory=dict)
    after: type[Step] = Step

    def run(self) -> dict[str, Tally]:
        return {mode: self.mode(mode) for mode in MODES}

    def _trees(self, mode: str) -> Iterator[tuple[int, Point, Tree]]:
        """(number of the step, the disk after it, what a cut there may leave of the root)."""
        for number, point in enumerate(self.recording.points(journal=mode == "ordered")):
            if not isinstance(point.step, self.after):
                continue
            if mode == "kill":
                yield number, point, tree_of(point.disk, self.recording.root)
                continue
            for state in point.disk.crash_states(self.limit, self.seed + number, ordered=mode == "ordered"):
                yield number, point, tree_of(state, self.recording.root)

    def mode(self, mode: str) -> Tally:
        tally, seen = Tally(), set[tuple[bytes, int]]()
        for number, point, tree in self._trees(mode):
            tally.generated += 1
            shown = {path: data for path, data in tree.items() if self.peer.sees(path)}
            key = digest(shown)
            if (key, point.acked) in seen:
                continue
            seen.add((key, point.acked))
            tally.states += 1
            if key not in self.known:
                self.known[key] = self.golden.match(self.picker.pick(shown))
            tally.add(verdict(self.known[key], point.acked),
                      f"after step {number} {describe(point.step)}, {point.acked} acknowledged")
        return tally


def verdict(picked: int, acked: int) -> str:
    """What is wrong when ``picked`` (see ``Goldens.match``) is resumed from after ``acked`` acknowledged saves, or nothing."""
    if picked < 0:
        return "damaged one picked"
    if picked >= acked:
        return ""
    return "older one picked" if picked else "nothing left"


def describe(step: Step) -> str:
    return f"({type(step).__name__} {os.path.basename(step.path) if isinstance(step, Names) else ''})".replace(" )", ")")


def digest(tree: Tree) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for path, data in sorted(tree.items()):
        found.update(f"{path}\0{-1 if data is None else len(data)}\0".encode(errors="surrogateescape"))
        found.update(data or b"")
    return found.digest()
