"""Peers side by side: a row each, and the table in Markdown."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from distckpt.testing.replay import Mark
from distckpt.testing.trace import TraceError
from scripts.proof import disks
from scripts.proof.peers import blocks, power
from scripts.proof.peers.judge import MODES, Judge, Picker, Server, Tally, goldens
from scripts.proof.peers.known import HERE, PEERS, Peer, install
from scripts.proof.peers.recording import record

STATES = 16
CUTS = 3
OUT, STORE = HERE / "table.md", HERE / "table.jsonl"
NAMES = {"file": "files", "dir": "directories", "marker": "markers"}
MUTANT = "the marker is not synced"
PARTS = MODEL, WITHIN, LAST = "killed, ordered and weak", "inside a save", "after the last"
INSIDE = {f"inside {system}": system for system in blocks.SYSTEMS}


@dataclass
class Row:
    """What was measured for one peer. ``failed``: why nothing was. ``dates``: when each of PARTS was measured."""

    peer: Peer
    version: str = ""
    failed: str = ""
    fsyncs: tuple[int, int, int] = (0, 0, 0)
    tallies: dict[str, Tally] = field(default_factory=dict)
    controls: dict[str, dict[str, Tally]] = field(default_factory=dict)
    real: dict[str, str] = field(default_factory=dict)
    cuts: int = 0
    wrong_cuts: int = 0
    seconds: float = 0.0
    dates: dict[str, str] = field(default_factory=dict)


def measure(peer: Peer, scratch: Path, states: int = STATES, cuts: int = CUTS, seed: int = 0, images: int = blocks.MOST) -> Row:
    """The row of ``peer``. Anything that keeps it from being measured is in ``failed``."""
    begun, row = time.monotonic(), Row(peer)
    try:
        if peer.home is not None:
            why = install(peer.home)
            if why:
                raise RuntimeError(why)
        row.version = peer.version()
        _measure(row, scratch, states, cuts, seed, images)
    except (RuntimeError, TraceError, OSError, subprocess.SubprocessError) as error:
        row.failed = f"{type(error).__name__}: {str(error).strip()[-300:]}"
    row.seconds = time.monotonic() - begun
    return row


def _measure(row: Row, scratch: Path, states: int, cuts: int, seed: int, images: int) -> None:
    peer = row.peer
    with Server(peer, "pick", scratch / "pick.log") as server:
        picker = Picker(peer, server, scratch / "states")
        if states:
            _modelled(row, picker, scratch, states, seed)
        if cuts and power.missing() is None:
            with Server(peer, "cuts", scratch / "cuts.log") as saver:
                for system in power.SYSTEMS:
                    row.real[system] = _cuts(row, system, saver, picker, scratch, cuts)
            row.dates[LAST] = _today()
        if images:
            _inside(row, picker, scratch, seed, images)
            row.dates[WITHIN] = _today()


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def _modelled(row: Row, picker: Picker, scratch: Path, states: int, seed: int) -> None:
    recording = record(row.peer, scratch / "run", scratch / "trace")
    golden = goldens(row.peer, recording, picker)
    judge = Judge(row.peer, recording, picker, golden, states, seed)
    row.fsyncs, row.tallies, row.dates[MODEL] = recording.fsyncs(), judge.run(), _today()
    for kind in ("file", "dir") if row.peer.ours else ():
        blind = Judge(row.peer, recording.without_fsyncs(kind), picker, golden, 64, seed, judge.known, Mark)
        row.controls[kind] = {"weak": blind.mode("weak")}


def _inside(row: Row, picker: Picker, scratch: Path, seed: int, images: int) -> None:
    lacking = disks.missing("/dev/fuse", *(f"mkfs.{system}" for system in blocks.SYSTEMS), install=True)
    if lacking:
        row.real.update(dict.fromkeys(INSIDE, f"not measured: {lacking}"))
        return
    disks.isolate()  # the servers that save must begin after it: they have to see the mounts
    left = list(INSIDE.items())
    while left:
        with Server(row.peer, "cuts", scratch / "inside.log") as saver:
            while left:
                mode, system = left.pop(0)
                try:
                    row.tallies[mode] = blocks.replay(system, saver, picker, scratch, seed, images)
                except (RuntimeError, OSError) as error:
                    if row.peer.ours:
                        raise
                    row.real[mode] = f"not measured: {error}"
                    break  # it may be at that save still: another is asked for the rest
    if row.peer.ours:
        forgets = replace(row.peer, env={**row.peer.env, "PEER_MUTANT": MUTANT})
        with Server(forgets, "cuts", scratch / "forgets.log") as saver:
            row.controls["marker"] = {mode: blocks.replay(system, saver, picker, scratch, seed, images)
                                      for mode, system in INSIDE.items()}


def _cuts(row: Row, system: str, saver: Server, picker: Picker, scratch: Path, cuts: int) -> str:
    seen: Counter[str] = Counter()
    wrong = 0
    for _ in range(cuts):
        try:
            what, files = power.cut(row.peer, system, saver, picker, scratch)
        except (RuntimeError, OSError) as error:
            if row.peer.ours:
                raise
            return f"not measured: {error}"
        row.cuts += 1
        wrong += bool(what)
        seen[f"{what or 'newest picked'}; {files}"] += 1
    row.wrong_cuts += wrong
    return f"{wrong}/{cuts}: " + " / ".join(seen)


def rows(only: str = "", states: int = STATES, cuts: int = CUTS, seed: int = 0, images: int = blocks.MOST) -> Iterator[Row]:
    """One row after the other, of the peers whose names contain ``only``."""
    for peer in PEERS:
        if only in peer.name:
            scratch = Path(tempfile.mkdtemp(prefix="peers-", dir="/dev/shm"))
            try:
                yield measure(peer, scratch, states, cuts, seed, images)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)


def keep(row: Row) -> None:
    """Add ``row`` to the measured ones; a later one of the same peer stands for it. Parts that were left out this time are those
    of the row before, if it is of the same version."""
    before = next((old for old in kept() if old.peer is row.peer and old.version == row.version and not row.failed), None)
    if before is not None:
        row = _over(before, row)
    with STORE.open("a", encoding="utf-8") as out:
        out.write(json.dumps({**asdict(row), "peer": row.peer.name}) + "\n")


def _over(before: Row, row: Row) -> Row:
    model, last = (row if part in row.dates else before for part in (MODEL, LAST))
    again = set(INSIDE) if WITHIN in row.dates else set()
    tallies = {mode: tally for mode, tally in before.tallies.items() if mode not in again} | row.tallies
    real = {mode: said for mode, said in before.real.items() if mode not in again} | row.real
    return replace(row, fsyncs=model.fsyncs, tallies=tallies, controls=before.controls | row.controls, real=real, cuts=last.cuts,
                   wrong_cuts=last.wrong_cuts, dates=before.dates | row.dates)


def kept() -> list[Row]:
    """The newest row of each peer that was ever kept, in the order of PEERS."""
    found: dict[str, Row] = {}
    for text in STORE.read_text(encoding="utf-8").splitlines() if STORE.exists() else []:
        said = json.loads(text)
        peer = next((peer for peer in PEERS if peer.name == said["peer"]), None)
        if peer is not None:
            tallies = {mode: Tally(**tally) for mode, tally in said["tallies"].items()}
            controls = {kind: {mode: Tally(**tally) for mode, tally in modes.items()} for kind, modes in said["controls"].items()}
            found[peer.name] = Row(**{**said, "peer": peer, "fsyncs": tuple(said["fsyncs"]), "tallies": tallies,
                                      "controls": controls})
    return [found[peer.name] for peer in PEERS if peer.name in found]


def _cell(tally: Tally) -> str:
    what = f"{tally.wrong}/{tally.states}"
    return f"**{what}**" if tally.wrong else what


def line(row: Row) -> str:
    """One line of the table."""
    if row.failed:
        said = f"| {row.peer.name} | {row.version or '?'} | did not run: {row.failed} ".replace("\n", " ")
        return said + "| " * (len(COLUMNS) - 3) + "|"
    files, early, folders = row.fsyncs
    fsyncs = f"{files} file{f' ({early} of them before the bytes were written)' if early else ''}, {folders} dir"
    counted = [_cell(row.tallies[mode]) if mode in row.tallies else row.real.get(mode, "not run") for mode in (*MODES, *INSIDE)]
    real = [row.real.get(system, "not run") for system in power.SYSTEMS]
    return f"| {row.peer.name} | {row.version} | {fsyncs} | " + " | ".join(
        [*counted, *real]) + " |"


COLUMNS = ("peer", "version", "fsyncs seen", "kill: bad/states", "ordered: bad/states", "weak: bad/states",
           "inside a save, ext4: bad/images", "inside a save, XFS: bad/images", "after the last, ext4: bad/cuts",
           "after the last, XFS: bad/cuts")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"

NOTES = """How to read it

- Each peer saves four times into a fresh, durable, empty root. A save is acknowledged when the peer's own save call has
  returned on every rank. A state is bad when the peer's own rule for resuming picks something that is not byte for byte what
  it was at its acknowledgement, or picks an older one (or nothing) although a newer one was acknowledged before the cut.
- kill: the process dies, nothing is lost. ordered: as ext4 and XFS journal, names survive as a prefix, and an fsync of
  anything makes all earlier names durable; bytes that were not fsynced are all there, gone, zeros or half there. weak: what
  POSIX promises and no more, any subset of the names that were not fsynced.
- inside a save: real ext4 and XFS. The peer saves, uncut, onto a disk that logs its block writes and flushes; disks that a cut
  could have left are built from the log (all that was flushed; of what was written after it any part, as of a disk with a
  cache), mounted, and shown to the peer's rule. Whole is what the same run had when the save returned. At most {recordings}
  runs, {images} images of each, until {most} distinct ones were judged; images of one run are told apart by what the peer's rule
  can see and by how many saves had been acknowledged. The cut falls before the last save returned.
- after the last: real ext4 and XFS, shut down (ioctl) right after the last save returned; the number of files is that of the
  newest acknowledged save. That asks whether what was acknowledged is there, and no more.
- States are distinct ones, told apart by what the peer's rule can see. They are sampled (at most {states} per step and mode),
  so shares of bad states are not probabilities. Cuts after the last acknowledgement are left out.

In fairness

- A peer that never fsyncs has written hardly anything when such a run ends. So in each run but the first of "inside a save" the
  kernel does once, at a random moment (seeded) after the first, second or third acknowledgement, what it may do at any moment:
  write all back (syncfs), or commit the journal, and with it all names, but not the bytes that it still holds back, because
  another program fsyncs a file of its own (ext4 commits every 5 s by itself, and did in a run of DeepSpeed "one slow"). The
  harness asks for it, not the peer.
- The runs end within the kernel's write-back interval (5 to 30 seconds). "Nothing left" means that the last seconds of saves
  are lost in a power cut, not that checkpoints of an hour ago are. In these runs there are no older ones.
- Not every peer promises durability, and some promise nothing about resuming. torch DCP and torch_checkpointing have no rule:
  for DCP it is TorchTitan's (highest step with a .metadata), for torch_checkpointing the highest step, since its rename is its
  commit.
- HF Trainer's and Accelerate's bad kill states are "the newest directory is picked while it is incomplete", or half deleted,
  while an intact older one may be there for somebody who looks. Whether the load then fails or goes on was not examined.
- What a peer does not read when it resumes does not count: HF's training_args.bin; Orbax's commit_success.txt (it stands
  beside local files too), _CHECKPOINT_METADATA and the per-process databases that it has merged. Orbax's _METADATA may be
  missing, but not be empty or zeros (found by restoring with each file gone, empty and zeros, Orbax 0.12.8). DeepSpeed's two
  recovery scripts do not count either.
- Orbax: TensorStore fsyncs array files and their directories. In an ext4 cut that was looked into, the arrays of all saves were
  there; lost were the rename to the newest step's final name (it stood under its temporary name, and was not picked) and the
  bytes of _METADATA of the save before it. With an empty _METADATA its restore raises, so "damaged" stands there.
- Temporary files are put on the same file system, which is the better case for Lightning. The empty root was made durable.
- DeepSpeed "one slow": the writes of the last rank are delayed by 1 s each.
- torch_checkpointing is run with use_direct_io=False: with its default its save of this small state failed with EINVAL on
  both ext4 and XFS.
- All saves are synchronous. Newer versions may fsync more: this says what these versions did in these runs.
"""


def document(found: list[Row], states: int) -> str:
    """The table with what is needed to read it."""
    days = {part: sorted({row.dates[part] for row in found if part in row.dates}) for part in PARTS}
    when = "; ".join(f"{part}: {', '.join(of)}" for part, of in days.items() if of)
    parts = [f"# Peers under the same power cut\n\nMade by `python -m scripts.proof.peers --write` ({when}).\n", HEAD]
    parts += [line(row) for row in found]
    parts.append("\nWhat was wrong, by mode (distinct states), and the first of each:\n")
    for row in found:
        for mode, tally in row.tallies.items():
            for what, count in sorted(tally.bad.items()):
                parts.append(f"- {row.peer.name}, {mode}: {count} × {what}; first {tally.examples[what]}")
    controls = [f"- {row.peer.name} without its fsyncs of {NAMES[kind]}: {', '.join(f'{m} {_cell(t)}' for m, t in modes.items())}"
                for row in found for kind, modes in row.controls.items()]
    if controls:
        parts.append("\nControl: the same with fsyncs left out (weak: cut right after each acknowledgement). It must be bad, or "
                     "the test sees nothing:\n")
        parts += controls
    return "\n".join(parts) + "\n\n" + NOTES.format(
        states=states, most=blocks.MOST, recordings=blocks.RECORDINGS, images=blocks.IMAGES)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.proof.peers", description=__doc__)
    parser.add_argument("--only", default="", help="peers whose name contains this")
    parser.add_argument("--states", type=int, default=STATES, help="crash states per step and mode, at most; 0: none")
    parser.add_argument("--cuts", type=int, default=CUTS, help="power cuts per file system after the last save; 0: none")
    parser.add_argument("--images", type=int, default=blocks.MOST, help="disks cut inside a save, per file system; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"keep the rows in {STORE.name}, and write {OUT.name} from all kept")
    chosen = parser.parse_args()
    found = []
    for row in rows(chosen.only, chosen.states, chosen.cuts, chosen.seed, chosen.images):
        found.append(row)
        print(f"{line(row)} {row.seconds:.0f} s", file=sys.stderr, flush=True)
        if chosen.write:
            keep(row)
            OUT.write_text(document(kept(), chosen.states or STATES), encoding="utf-8")
    if not chosen.write:
        print(document(found, chosen.states))
