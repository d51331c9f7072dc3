"""Inside the guest: what a rank does, and what a reader beside the run does. Each is a process on its own machine."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import Any

import distckpt
from distckpt import janitor
from distckpt.durable import Files
from distckpt.errors import DistckptError, SaveError, StepNotFound
from distckpt.manager import CheckpointManager
from distckpt.options import Seams, Timeouts
from distckpt.saving.files import RankFiles
from distckpt.testing import faults
from distckpt.testing.checker import COMMITTED, UNKNOWN, content_of, tree_of
from scripts.proof.uml import golden
from scripts.proof.uml.link import End
from scripts.proof.uml.machines import ROOT, enter
from scripts.proof.uml.plan import KEEP, STALE, Phase, Plan

log = logging.getLogger(__name__)
_LATER = 2.0
_TIMEOUTS = Timeouts(arrive=120.0, progress=120.0, visible=120.0, close=60.0)


class Blind(Files):
    """While ``on``, says that there is always room, so that the disk itself must say that it is full."""

    on = False

    def free(self, path: str) -> int:
        return 1 << 50 if self.on else super().free(path)


class Held:
    """Stops this process at its n-th operation (of ``kinds``) until the guest program lets it go on."""

    def __init__(self, files: faults.FaultyFiles, gate: End, kinds: tuple[str, ...]) -> None:
        self._files, self._gate, self._kinds = files, gate, kinds
        self._since = 0
        self._lock = threading.Lock()

    def at(self, n: int | None) -> None:
        self._since = self._files.count
        self._files.faults[:] = [faults.call(self._hold, n, op=self._kinds)] if n else []

    def _hold(self, operation: faults.Operation) -> None:
        with self._lock:
            self._gate.say(held=operation.op, path=operation.path[-60:])
            self._gate.hear()

    @property
    def operations(self) -> int:
        return sum(operation.op in self._kinds for operation in self._files.log[self._since:])


def _environment(rank: int, plan: Plan, number: int) -> None:
    """A step of a requeued SLURM job: the next start knows that the last one is over, and waits for nobody."""
    os.environ.update({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(number), "SLURM_PROCID": str(rank),
                       "SLURM_RESTART_COUNT": str(plan.boot), "SLURM_STEP_NUM_TASKS": str(golden.WORLD),
                       "MASTER_ADDR": "10.0.0.2", "DISTCKPT_STORE_ADDR": "10.0.0.2"})


def rank(link: End, gate: End, number: int, node: int, plan: Plan, phase: Phase) -> None:
    """All saves of one phase on one rank, as told over ``link``."""
    enter(node)
    _environment(node, plan, number)
    if phase.hurried:
        vars(janitor).update(STILL=0.0, RETRY=0.2)
    blind = Blind()
    files = faults.FaultyFiles(blind)
    held = Held(files, gate, faults.RESENT if phase.fault == "lost" else faults.WRITES)
    first = link.hear()
    assert first is not None
    held.at(first["at"])
    began = time.monotonic()
    manager = CheckpointManager(ROOT, keep_last=KEEP, timeouts=_TIMEOUTS, seams=Seams(files=files), stop_signals=())
    resumed = manager.resume()
    operations = held.operations
    held.at(None)
    link.say(rank=node, resumed=_seen(resumed.checkpoint), operations=operations,
             seconds=round(time.monotonic() - began, 3))
    while (order := link.hear()) is not None and "step" in order:
        if phase.fault == STALE or (phase.fault == "see" and node == 1):
            _pry(order["step"])
        held.at(order["at"])
        blind.on = order["blind"]
        link.say(rank=node, step=order["step"], **_save(manager, held, order["step"], phase.fault),
                 **_look(manager, phase, order, node))
    began = time.monotonic()
    manager.close()
    link.say(rank=node, closed=True, seconds=round(time.monotonic() - began, 3))


def _seen(checkpoint: Any) -> list[Any] | None:
    """(step, content) as this rank's machine reads it now."""
    if checkpoint is None:
        return None
    found = tree_of(checkpoint.path)
    found.pop("commit.json", None)
    return [checkpoint.step, content_of(found)]


def _save(manager: CheckpointManager, held: Held, step: int, fault: str) -> dict[str, Any]:
    began = time.monotonic()
    error = ""
    try:
        with manager.saving(step) as files:
            _write(files, manager, step, fault)
            if fault == STALE and files.rank == 0:
                time.sleep(_LATER)
                _list(files.directory)
        verdict = COMMITTED
    except SaveError as raised:
        verdict, error = raised.outcome, f"{type(raised).__name__}: {raised}"
    except DistckptError as raised:
        verdict, error = UNKNOWN, f"{type(raised).__name__}: {raised}"
    operations = held.operations
    held.at(None)
    return {"verdict": verdict, "error": error[:1500], "operations": operations, "seconds": round(time.monotonic() - began, 3)}


def _write(files: RankFiles, manager: CheckpointManager, step: int, fault: str) -> None:
    """One file of each kind: through the coordinator's writer, by plain calls, and the one that is the same on all ranks.

    On a full disk by plain calls that ignore what ``close`` says, as C++ streams do; on NFS that is where it is told. Under
    ``STALE`` rank 1 lets rank 0 see its file while it is half as long.
    """
    node, careless = files.rank, fault == "full"
    with files.writer("model.bin") as out:
        model = memoryview(golden.bytes_of(step, node, "model.bin"))
        for start in range(0, len(model), 50_000):
            out.write(model[start:start + 50_000])
    for name in ("optim/state.bin", "rng.bin"):
        fd = os.open(files.mine(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        data = golden.bytes_of(step, node, name)
        half = len(data) // 2 if fault == STALE and node == 1 else 0
        if half:
            os.write(fd, data[:half])
            os.fsync(fd)
            time.sleep(2 * _LATER)
        os.write(fd, data[half:])
        try:
            os.close(fd)
        except OSError:
            if not careless:
                raise
    if files.writes(golden.SHARED):
        with open(files.shared(golden.SHARED), "xb") as shared:
            shared.write(golden.bytes_of(step, node, golden.SHARED))


def _pry(step: int) -> None:
    """What user code does that makes NFS remember an absence: ask for names before they are there."""
    os.path.exists(f"{ROOT}/step-{step}")
    os.path.exists(f"{ROOT}/step-{step}/commit.json")
    for folder in (ROOT, f"{ROOT}/.distckpt", f"{ROOT}/.distckpt/staging"):
        for name in os.listdir(folder):
            os.path.isdir(f"{folder}/{name}")


def _list(directory: str) -> None:
    """Every entry and its attributes, as user code does that waits for files: this machine remembers them from here on."""
    for parent, folders, names in os.walk(directory):
        for name in [*folders, *names]:
            os.stat(os.path.join(parent, name))


def _look(manager: CheckpointManager, phase: Phase, order: dict[str, Any], node: int) -> dict[str, Any]:
    """What this machine sees of the save that was just committed; with ``resume``, what the run would go on from."""
    if phase.fault not in ("see", STALE):
        return {}
    there = os.path.isfile(f"{ROOT}/step-{order['step']}/commit.json")
    if not order.get("resume"):
        return {"there": there}
    began = time.monotonic()
    resumed = manager.resume()
    seconds = round(time.monotonic() - began, 3)
    return {"there": there, "looked": seconds, "again": _seen(resumed.checkpoint)}


# -- readers beside the run ------------------------------------------------------------------------------------------


def reader(link: End, gate: End, node: int) -> None:
    """Reads the oldest checkpoint over and over while the run rotates it away, with a lease and without.

    Says what it got: "exact" and "gone" are fine, anything else is a violation.
    """
    enter(node)
    got: dict[str, int] = {}
    wrong: list[str] = []
    while not link.waiting:
        for leased in (False, True):
            try:
                what = _read_oldest(leased)
            except (DistckptError, OSError) as error:
                what = f"reader on node {node}{' with a lease' if leased else ''}: {type(error).__name__}: {error}"
            if what not in ("exact", "gone", "nothing") and not what.startswith("gone "):
                wrong.append(what[:300])
            got[what[:40]] = got.get(what[:40], 0) + 1
    link.say(read=got, wrong=wrong[:5])


def _read_oldest(leased: bool) -> str:
    root = distckpt.open(ROOT)
    newest = root.latest()
    found = root.checkpoints()
    if not found or newest is None:
        return "nothing"
    oldest = found[-1]
    if not leased:
        return _read_slowly(oldest, None)
    try:
        with root.lease(oldest, "L4 reads", ttl=60.0) as lease:
            what = _read_slowly(oldest, lease)
            if what != "exact":
                return f"I5: under a lease {oldest.name} was {what}"
            return what
    except StepNotFound:
        return "gone"


def _read_slowly(checkpoint: Any, lease: Any) -> str:
    """Every file: half of it, a pause with the file open, the other half."""
    want = golden.tree(checkpoint.step)
    for path, data in want.items():
        try:
            with open(os.path.join(checkpoint.path, path), "rb", buffering=0) as source:
                half = source.read(len(data) // 2)
                time.sleep(0.02)
                rest = source.read(len(data))
        except OSError as error:
            return f"gone {error.errno}"
        if half + rest != data:
            return "gone short" if data.startswith(half + rest) else f"I1: {checkpoint.name}/{path} holds other bytes"
    if lease is not None:
        with suppress(StepNotFound):
            lease.check()
    return "exact"
