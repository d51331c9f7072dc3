"""L4: real NFS, two client machines, and power cuts of the whole machine, in User-Mode Linux.

One guest is three machines: a server that exports an ext4 disk over NFSv3 or NFSv4.2, and two clients with a network, a host
name and mounts of their own; rank 0 runs on one and rank 1 on the other, on the real library. Faults strike while a rank is
held at a drawn operation: the server's daemon stops and comes back; the server loses what it had not written and comes back
under live clients; its replies are lost, and what was carried out is asked for again; the disk is full; readers on both clients
hold files that rotation deletes; rank 1 asks for every name before it is there; both clients cache attributes for a minute, and
rank 0 has seen a file of rank 1 while it was half as long; SIGKILL of the whole guest, then a boot on the same disk. The judge is
``distckpt.testing.checker``.

What it cannot show: the guest has one CPU; a write that reached the guest's disk is never lost by the kill (the image is in the
host's page cache), so a missing flush between ext4 and the disk goes unseen (L3 has that); both clients die with the server.

    python -m scripts.proof.l4 --seconds 300 --seed 0 [--version 3] [--lying-server] [--verbose]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.proof import packages
from scripts.proof.layer import Budget, Layer, Result
from scripts.proof.uml.machine import Machine
from scripts.proof.uml.plan import CACHED, CUT, CUT_START, SERVER, STALE, Phase, Plan, disagreement

VERSIONS = ("3", "4.2")
PACKAGES = ("user-mode-linux", "kmod", "nfs-kernel-server", "rpcbind", "nfs-common", "e2fsprogs", "iproute2", "util-linux")
_TOOLS = ("linux.uml", "modprobe", "rpc.nfsd", "rpcbind", "mount.nfs", "exportfs", "mkfs.ext4", "ip", "nsenter")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_TRIES = {"none": 10, "restart": 6, "crash": 6, "lost": 8, "full": 12, "read": 16, "see": 6, STALE: 2}
_CUTS = 5


def _absent() -> list[str]:
    absent = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if not list(Path("/usr/lib/uml/modules").glob("*/kernel/fs/nfsd/nfsd.ko")):
        absent.append("nfsd.ko of User-Mode Linux")
    return absent


def missing() -> str | None:
    """What L4 lacks here. As root it installs the Debian packages first, without starting any daemon of theirs."""
    return packages.lacking(_absent, *PACKAGES)


@dataclass
class Run:
    """One disk and the boots on it. ``strikes``: (fault, operation at which it struck) in order."""

    version: str
    seed: int
    machine: Machine
    verbose: bool = False
    export: str = "sync"
    told: dict[int, dict[int, str]] = field(default_factory=dict)
    next_step: int = 1
    boots: int = 0
    cuts: int = 0
    strikes: list[tuple[str, str]] = field(default_factory=list)
    judged: int = 0
    saves: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)
    looked: list[float] = field(default_factory=list)
    unseen: int = 0
    slowest: float = 0.0
    stale: float = 0.0
    hangs: int = 0
    violations: list[str] = field(default_factory=list)
    _end: bool = False
    _broken: str = ""
    _phases: list[str] = field(default_factory=list)

    def boot(self, phases: list[Phase]) -> None:
        plan = Plan(self.version, self.seed, self.boots, phases, self.next_step, self.told, self.cuts,
                    export=self.export)
        self.boots += 1
        self._end, self._phases, self._broken, before = False, [], "", len(self.strikes)
        said = self.machine.boot(plan, self.hear)
        if not self._end:
            self.violate("the guest ended before its plan: " + " | ".join([self._broken or "it did not say why", *said[-12:]]))
        idle = set(SERVER).intersection(self._phases) - {fault for fault, _ in self.strikes[before:]}
        if idle and not self.hangs:
            self.violate(f"nothing was struck under {', '.join(sorted(idle))}: a fault that never came proves nothing")
        damaged = [text for text in said if "EXT4-fs error" in text]
        if damaged:
            self.violate(f"the server's own file system is damaged, which is no fault of the library's: {damaged[0]}")
        for step, told in self.told.items():
            text = disagreement(step, told)
            if text and text not in " ".join(self.violations):
                self.violate(text)

    @property
    def _fault(self) -> str:
        return self._phases[-1] if self._phases else ""

    def violate(self, text: str) -> None:
        self.violations.append(f"{text} [python -m scripts.proof.l4 --seed {self.seed} --version {self.version}, boot "
                               f"{self.boots - 1}]")

    def hear(self, event: dict[str, Any]) -> None:
        """Take in what the guest says."""
        if self.verbose:
            print(json.dumps(event), flush=True)
        for text in event.get("wrong", ()):
            self.violate(text)
        if "phase" in event:
            self._phases.append(event["phase"])
        elif "begin" in event:
            self.told[event["begin"]] = {}
            self.next_step = event["begin"] + 1
            self.saves[self._fault] = self.saves.get(self._fault, 0) + 1
        elif "verdict" in event:
            self._verdict(event)
        elif "held" in event:
            self.strikes.append((self._fault, event["held"]))
        elif "judged" in event:
            self.judged += 1
        elif "cut" in event:
            self.cuts += 1
            self._end = True
        elif "hung" in event:
            self.hangs += 1
            self.violate(f"I6: {event['hung']}")
            self._end = True
        elif "done" in event:
            self._end = True
        elif "broken" in event:
            self._broken = event["broken"]
        elif "read" in event:
            for what, count in event["read"].items():
                self.reads[what] = self.reads.get(what, 0) + count

    def _verdict(self, event: dict[str, Any]) -> None:
        self.told[event["step"]][event["rank"]] = event["verdict"]
        if event["verdict"] != "committed" and event["rank"] == 0:
            self.refused[self._fault] = self.refused.get(self._fault, 0) + 1
        self.slowest = max(self.slowest, event["seconds"])
        if self._fault == STALE:
            self.stale = max(self.stale, event["seconds"])
        if event["error"] and self._fault == "full" and "disk is" not in event["error"]:
            self.violate(f"I9: a full disk was told as: {event['error'][:300]}")
        if "looked" in event:
            self.looked.append(event["looked"])
        self.unseen += event.get("there") is False

    def result(self, seconds: float) -> Result:
        places = {(fault, operation) for fault, operation in self.strikes}
        saves = ", ".join(f"{count} {fault}" for fault, count in self.saves.items())
        failed = ", ".join(f"{count} {fault}" for fault, count in self.refused.items())
        reads = ", ".join(f"{count} {what}" for what, count in sorted(self.reads.items()))
        covers = (f"NFSv{self.version} seed {self.seed}: saves under {saves}; {len(self.strikes)} strikes held at an operation, "
                  f"{self.cuts} cuts of the machine; saves that ended in an error: {failed or 'none'}; reads: {reads or 'none'}")
        if self.looked:
            covers += (f"; commits that rank 1, which had asked for their names before, did not see at once: {self.unseen}; "
                       f"resume right after one took up to {max(self.looked):.1f} s")
        if self.stale:
            covers += f"; a save under caches of {CACHED} s took up to {self.stale:.1f} s"
        return Result("l4", sum(self.saves.values()), self.judged, len(places), self.violations, self.hangs, self.slowest,
                      round(seconds, 1), covers)


def rounds(budget: Budget, versions: tuple[str, ...], work: Path, verbose: bool, export: str) -> Result:
    """Rounds of all faults on fresh disks, and cuts after them, until the budget is spent. One boot is always made.

    ``longest``: seconds of a boot with all faults (True) and of one that is cut (False), as far as they are known.
    """
    total, number, longest = Result("l4"), 0, {True: 0.0, False: 0.0}
    while number == 0 or budget.left > longest[True]:
        seed = budget.seed + number
        runs = []
        for version in versions if seed % 2 == 0 else versions[::-1]:  # a budget for one boot is not always the same one
            folder = work / f"{seed}-{version}"
            folder.mkdir()
            runs.append(Run(version, seed, Machine(folder), verbose, export))
        boots: list[list[Phase]] = [[Phase(fault, tries) for fault, tries in _TRIES.items()]]
        boots += [[Phase(CUT, 3)] if n % 3 < 2 else [Phase(CUT_START, 2)] for n in range(_CUTS)]
        spent = dict.fromkeys(versions, 0.0)
        for phases in boots:
            whole = len(phases) > 1
            for run in runs:
                if total.runs + sum(sum(r.saves.values()) for r in runs) and budget.left < longest[whole]:
                    continue
                began = time.monotonic()
                run.boot(phases)
                spent[run.version] += time.monotonic() - began
                longest[whole] = max(longest[whole], time.monotonic() - began)
        for run in runs:
            if run.boots:
                total.add(run.result(spent[run.version]))
            shutil.rmtree(run.machine.work)
        number += 1
    return total


def run(budget: Budget, versions: tuple[str, ...] = VERSIONS, verbose: bool = False, export: str = "sync") -> Result:
    """One result; skipped with the reason when this machine cannot boot the guest."""
    lacks = missing()
    if lacks:
        return Result("l4", skipped=lacks)
    work = Path(tempfile.mkdtemp(prefix="distckpt-l4-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        return rounds(budget, versions, work, verbose, export)
    finally:
        shutil.rmtree(work, ignore_errors=True)


LAYER = Layer("l4", "NFS and whole-machine kill in User-Mode Linux", missing, run, quick_seconds=0, full_seconds=3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=LAYER.title)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--version", choices=VERSIONS)
    parser.add_argument("--verbose", action="store_true", help="every event of the guest as it comes")
    parser.add_argument("--lying-server", action="store_true", help="an export that acknowledges before it writes: must end red")
    given = parser.parse_args()
    result = run(Budget(given.seconds, given.seed), (given.version,) if given.version else VERSIONS, given.verbose,
                 "async" if given.lying_server else "sync")
    print(json.dumps(asdict(result), indent=1))
    raise SystemExit(1 if result.violations or result.hangs else 0)


if __name__ == "__main__":
    main()
