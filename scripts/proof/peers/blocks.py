"""Power cuts inside a save, on real file systems: a peer saves, uncut, onto a disk that logs its block writes. The disks that a
cut could have left, at any moment until the last save returned, are built from the log, mounted, and shown to the peer's rule.

Replayed, because what an unacknowledged save holds when it is whole can only be known from the same run's end: a peer's bytes
differ from run to run.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.proof import disks
from scripts.proof.blocklog import Epoch, Images, read_log, recorded, states
from scripts.proof.peers.judge import Goldens, Picker, Server, Tally, digest, verdict
from scripts.proof.peers.power import LIMIT, copied
from scripts.proof.peers.programs.common import SAVES
from scripts.proof.peers.recording import read_tree

SYSTEMS = ("ext4", "xfs")
MOST, RECORDINGS, IMAGES = 30, 8, 8
"""Distinct images to judge per file system; runs to build them from, at most; images built from one run, distinct or not."""
START = 600.0
"""Until the first save has returned, on a machine that others use: the start of the program is in it."""


def _others_fsync(place: str) -> None:
    """Another program of that machine makes a file durable: the journal is committed with all names in it, without the data that
    the kernel still holds back. ext4 commits so every 5 seconds by itself."""
    with open(f"{place}/others", "wb") as out:
        os.fsync(out.fileno())


EVENTS: dict[str, Callable[[str], None]] = {"written back": disks.write_back, "others' fsync": _others_fsync}


@dataclass(frozen=True)
class Event:
    """What the kernel happened to do, being asked to, ``wait`` seconds after acknowledgement ``after`` (0: never)."""

    name: str = "nothing"
    after: int = 0
    wait: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} {self.wait:.3f} s after save {self.after}" if self.after else "nothing was asked of the kernel"


@dataclass(frozen=True)
class Recording:
    """One run. ``begun``, ``acks``: how long the log was before its first save, and at each acknowledgement. ``spans``: the
    seconds from one acknowledgement to the next."""

    image: str
    epochs: list[Epoch]
    begun: int
    acks: list[int]
    spans: list[float]
    golden: Goldens

    def acked(self, at: int) -> int:
        """Saves acknowledged when the log was ``at`` long, but never the last: every judged cut falls before it returned."""
        return min(sum(length <= at for length in self.acks), SAVES - 1)


def record(kind: str, saver: Server, picker: Picker, folder: Path, event: Event) -> Recording:
    """RuntimeError when the peer could not save there. What the log holds beyond the last acknowledgement is not read."""
    base, copies = str(folder / "base.img"), folder / "copies"
    copies.mkdir()
    disks.format_image(kind, base, disks.KINDS[kind])
    _empty_root(kind, base, folder)
    with recorded(kind, base, str(folder)) as (log, place):
        begun = log.size
        asked = {"work": f"{place}/work", "copies": str(copies), "mount": "", "log": log.log}
        acks, times = _hear(saver, json.dumps(asked), place, event)
    if len(acks) != SAVES:
        raise RuntimeError(f"{picker.peer.name}: {len(acks)} saves of {SAVES} on {kind}: {saver.complaint()}")
    spans = [end - begin for begin, end in zip(times, times[1:], strict=False)]
    return Recording(base, read_log(log.log, acks[-1]), begun, acks, spans, copied(kind, picker, copies))


def _empty_root(kind: str, base: str, folder: Path) -> None:
    """The root, empty and durable, and a place for temporary files."""
    loop, place = disks.Loop(base), folder / "mnt"
    try:
        place.mkdir()
        disks.mount(loop.path, str(place), kind)
        for name in ("root", "tmp"):
            (place / "work" / name).mkdir(parents=True)
        disks.unmount(str(place))
    finally:
        loop.close()


def _hear(saver: Server, asked: str, place: str, event: Event) -> tuple[list[int], list[float]]:
    """Let it save: the log's length, and the time, at each acknowledgement."""
    acks, times = list[int](), list[float]()
    answer = saver.ask(asked, START)
    while "code" not in answer:
        length = answer["log"]
        assert isinstance(length, int)
        acks.append(length)
        times.append(time.monotonic())
        if len(acks) == event.after:
            saver.quiet(event.wait)  # orders nothing: any moment is one that the kernel may choose
            EVENTS[event.name](place)
        answer = saver.hear(LIMIT)
    if answer["code"]:
        raise RuntimeError(f"its save failed: {saver.complaint()}")
    return acks, times


def replay(kind: str, saver: Server, picker: Picker, scratch: Path, seed: int, most: int = MOST) -> Tally:
    """Cuts until ``most`` distinct images were judged, or RECORDINGS were made. ``disks.isolate`` must have been called before
    ``saver`` began. In the first recording nothing is asked of the kernel; it tells how long a save takes."""
    rng, tally, spans = random.Random(f"{seed} {picker.peer.name} {kind}"), Tally(), list[float]()
    for _ in range(RECORDINGS):
        after = rng.randrange(1, SAVES)
        event = Event(rng.choice(list(EVENTS)), after, rng.random() * spans[after - 1]) if spans else Event()
        with tempfile.TemporaryDirectory(dir=scratch) as here:
            recording = record(kind, saver, picker, Path(here), event)
            spans = recording.spans
            _judge(kind, recording, picker, here, rng, tally, str(event))
        if tally.states >= most:
            break
    return tally


def _judge(kind: str, recording: Recording, picker: Picker, folder: str, rng: random.Random, tally: Tally, event: str) -> None:
    """Some images of a recording; those that differ only where the peer's rule cannot see are one."""
    images, seen, known = Images(kind, recording.image, recording.epochs, folder), set[tuple[bytes, int]](), dict[bytes, int]()
    for state in states(recording.epochs, rng, IMAGES, recording.begun):
        assert state.at <= recording.acks[-1], "a cut after the last acknowledgement tells nothing here"
        tally.generated += 1
        with images.mounted(state) as place:
            root = read_tree(Path(place, "work", "root"))
        shown, acked = {path: data for path, data in root.items() if picker.peer.sees(path)}, recording.acked(state.at)
        key = digest(shown)
        if (key, acked) in seen:
            continue
        seen.add((key, acked))
        tally.states += 1
        if key not in known:
            known[key] = recording.golden.match(picker.pick(shown))
        tally.add(verdict(known[key], acked), f"{state}, {acked} acknowledged; {event}")
