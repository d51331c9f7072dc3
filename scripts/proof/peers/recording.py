"""A peer's run, recorded: the disk after each thing it did, and how often it asked for durability."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from distckpt.testing import trace
from distckpt.testing.crashdisk import Node
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.replay import Mark, Names, Resize, Run, Step, Sync, Write, compile_run
from distckpt.testing.trace import Call, TraceError
from scripts.proof.peers.known import Peer

Tree = dict[str, bytes | None]
LIMIT = 240.0


class Journal(CrashFiles):
    """An fsync of anything makes every earlier change of a name durable, as ext4's journal does. More than POSIX asks."""

    def _sync_data(self, node: Node, path: str) -> None:
        super()._sync_data(node, path)
        self._commit()

    def _sync_entries(self, directory: int) -> None:
        self._commit()

    def _commit(self) -> None:
        for node in self.nodes.values():
            node.kept_entries = dict(node.entries)
        self.pending = []


@dataclass(frozen=True)
class Point:
    """The disk after ``step``, when ``acked`` saves had been acknowledged."""

    disk: CrashFiles
    acked: int
    step: Step


@dataclass(frozen=True)
class Recording:
    """``root``: where the peer saved to, on the model's disk as on the real one."""

    run: Run
    root: str

    @property
    def saves(self) -> int:
        return sum(isinstance(step, Mark) for step in self.run.steps)

    def points(self, journal: bool = False) -> Iterator[Point]:
        """After each step until the last acknowledgement: a cut later than that tells nothing. One disk, which moves on."""
        disk, acked, saves = Journal(self.run.base) if journal else CrashFiles(self.run.base), 0, self.saves
        for step in self.run.steps:
            step.apply(disk)
            acked += isinstance(step, Mark)
            yield Point(disk, acked, step)
            if acked == saves:
                return

    def fsyncs(self) -> tuple[int, int, int]:
        """How many of files, how many of those while the file's bytes were still to be written, and how many of directories."""
        kinds = {number: node.kind for number, node in self.run.end().nodes.items()}
        steps = self.run.steps
        files = [place for place, step in enumerate(steps) if isinstance(step, Sync) and kinds[step.node] == "file"]
        folders = sum(isinstance(step, Sync) and kinds[step.node] == "dir" for step in steps)
        early = sum(isinstance(_next(steps, place), Write) for place in files)
        return len(files), early, folders - 1  # one is ours: the empty root was durable

    def without_fsyncs(self, kind: str) -> Recording:
        """The same run, had it not asked for the durability of any ``kind``: "file" or "dir". Owner records are spared: over a
        torn one the next start waits for a minute and a half, to be sure that nobody lives there."""
        spared = {step.made[0] for step in self.run.steps if isinstance(step, Names) and step.made and "/owner/" in step.path}
        kinds = {number: node.kind for number, node in self.run.end().nodes.items()}
        steps = [step for place, step in enumerate(self.run.steps)
                 if place < 3 or not (isinstance(step, Sync) and kinds[step.node] == kind and step.node not in spared)]
        return Recording(replace(self.run, steps=steps), self.root)


def _next(steps: list[Step], place: int) -> Step | None:
    """What was done next to the bytes of the file that the step there is about."""
    here = steps[place]
    assert isinstance(here, Sync)
    return next((step for step in steps[place + 1:] if isinstance(step, (Write, Resize, Sync)) and step.node == here.node), None)


def record(peer: Peer, work: Path, out: Path) -> Recording:
    """Run ``peer`` under strace. TraceError when it fails, or when the replay does not end with what is really there."""
    for name in ("root", "tmp"):
        (work / name).mkdir(parents=True)
    done = trace.capture(peer.command("run", str(work)), out, limit=LIMIT, cwd=work, env=peer.environment)
    if done.returncode:
        raise TraceError(f"{peer.name} ended with {done.returncode}: {done.stderr[-3000:]}")
    run = compile_run([*_before(work), *_visible(trace.read(out, work), work)], str(work))
    found = Recording(run, f"{work}/root")
    if not found.saves:
        raise TraceError(f"{peer.name} acknowledged nothing")
    ours, real = tree_of(run.end(), str(work)), read_tree(work)
    if ours != real:
        wrong = sorted(path for path in real.keys() | ours.keys() if real.get(path) != ours.get(path))
        raise TraceError(f"{peer.name}: the replay ends otherwise than the run did: {wrong[:5]}")
    return found


def _before(work: Path) -> list[Call]:
    """What was there and durable when the run began: the directories for the checkpoints and for temporary files."""
    root, tmp = (Call("mkdir", 0, line, line, f"{work}/{name}") for line, name in ((-3, "root"), (-2, "tmp")))
    return [root, tmp, Call("fsync", 0, -1, -1, str(work))]


def _visible(calls: list[Call], work: Path) -> Iterator[Call]:
    """A copy inside the kernel from a file elsewhere, as the write that it amounts to. DeepSpeed puts its own scripts beside
    the checkpoints this way."""
    for call in calls:
        source = call.other
        if call.call == "sendfile" and call.path.startswith(f"{work}/") and source.startswith("/") \
                and not source.startswith(f"{work}/"):
            start = call.flags.split("[", 1)[1].split("]", 1)[0]
            data = Path(source).read_bytes()[int(start):int(start) + call.result]
            text = "".join(f"\\x{byte:02x}" for byte in data)
            yield replace(call, call="write", other="", flags=f'"{text}"')
        else:
            yield call


def tree_of(disk: CrashFiles, folder: str) -> Tree:
    """{path below ``folder``: bytes, or None for a directory}."""
    return {path[len(folder) + 1:]: data for path, data in disk.snapshot().items() if path.startswith(f"{folder}/")}


def read_tree(folder: Path) -> Tree:
    """What ``folder`` really holds, as ``tree_of`` has it."""
    found: Tree = {}
    for here, folders, files in os.walk(folder):
        below = os.path.relpath(here, folder)
        for name in [*folders, *files]:
            path = Path(here, name)
            found[os.path.normpath(f"{below}/{name}")] = path.read_bytes() if path.is_file() else None
    return found


def write_tree(folder: Path, tree: Tree) -> None:
    """Make ``folder`` with what ``tree`` says."""
    folder.mkdir(parents=True)
    for path, data in sorted(tree.items()):
        if data is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).write_bytes(data)


