"""The demo's story: one run without interruption, the same run killed three times inside a save, the comparison, and a disk
that fills up behind the training.

Plays the scheduler: it starts torchrun, sees it end, looks at what stands in the root, and starts it again.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distckpt
from distckpt import journal
from distckpt.durable import REAL
from distckpt.layout import MARKER, Layout

HERE = Path(__file__).resolve().parent
STAMP = "distckpt-demo"
RANKS, STEPS, EVERY, KEEP = 2, 60, 10, 2
DOOMS = ("1:write:20", "0:fsync:30", "1:ack:50")
POINTS = {"write": "as it opens its first file ({}) to write", "fsync": "at the fsync of its part of the model ({})",
          "ack": "right after its ack ({} durable)"}
PRIVATE = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")
LIFE_LIMIT = 300.0


class Failed(Exception):
    """The demo does not show what it promises; ``log`` is the output to look at."""

    def __init__(self, text: str, log: Path | None = None) -> None:
        super().__init__(text)
        self.log = log


@dataclass
class Run:
    """One of the two runs: its root, and where its ranks leave losses, final weights and logs."""

    root: Path
    out: Path

    def live(self, life: int, doom: str = "", before: str = "", after: str = "") -> tuple[int, Path]:
        """One life of the job, as a scheduler would start it: (exit code, its log). With ``before`` (shell) it runs on mounts of
        its own, which vanish with it; ``after`` is run at its end."""
        log = self.out / f"life-{life}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
                   "--max-restarts=0", str(HERE / "train.py"), f"--root={self.root}", f"--out={self.out}", f"--steps={STEPS}",
                   f"--save-every={EVERY}", f"--keep-last={KEEP}", f"--life={life}", f"--doom={doom}"]
        if before:
            command = [*PRIVATE, "sh", "-c", f"{before} && {{ {shlex.join(command)}; code=$?; {after}; exit $code; }}"]
        with open(log, "w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True,
                                       env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
            try:
                return process.wait(LIFE_LIMIT), log
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise Failed(f"life {life} did not end within {LIFE_LIMIT:.0f} s", log) from None
                raise

    def losses(self) -> dict[int, list[float]]:
        """Every loss of every step, in the order in which the lives computed them."""
        found: dict[int, list[float]] = defaultdict(list)
        for line in (self.out / "losses.jsonl").read_text().splitlines():
            record = json.loads(line)
            found[record["step"]].append(record["loss"])
        return found


def say(text: str = "") -> None:
    print(text, flush=True)


def prepare(work: Path) -> None:
    """An empty directory; only one that an earlier demo made is removed."""
    if work.exists() and any(work.iterdir()):
        if not (work / STAMP).exists():
            raise Failed(f"{work} is there and was not made by this demo: name another directory")
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    (work / STAMP).touch()


def new_run(work: Path, name: str) -> Run:
    out = work / "logs" / name
    out.mkdir(parents=True)
    return Run(work / name, out)


# -- what stands in the root -------------------------------------------------------------------------------------------


def verified(root: Path) -> list[str]:
    """Names of the committed checkpoints, oldest first, every byte of which was read and is what was committed."""
    reader = distckpt.open(root)
    found = reader.checkpoints()
    for checkpoint in found:
        problems = reader.verify(checkpoint, digest=True)
        if problems:
            raise Failed(f"{checkpoint.name} is damaged: {problems[0].path} {problems[0].what}")
    return [checkpoint.name for checkpoint in reversed(found)]


def unfinished(root: Path) -> list[str]:
    """What a dead save left behind, in words."""
    found = []
    for place in sorted((root / ".distckpt" / "staging").glob("*/*/step-*")):
        files = [path for path in place.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        marker = "committed, not yet published" if (place / MARKER).exists() else "no marker, so it is no checkpoint"
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        found.append(f"{place.name} ({count}, {size / 1e6:.1f} MB, {marker})")
    return found


def restart_story(root: Path, after: int) -> tuple[str, int, int]:
    """(what the last start did before its first step, the step it went on from, how many events there are now)."""
    events = journal.read(REAL, Layout.at(root))
    claimed = next(e for e in events[after:] if e["event"] == "claimed")
    resumed = next((e for e in events[after:] if e["event"] == "resumed"), None)
    parts = []
    if claimed["published"]:
        parts.append(f"recovery publishes {', '.join(claimed['published'])}")
    if claimed["swept"] > len(claimed["published"]):
        parts.append("recovery sweeps the unfinished save away")
    parts.append(f"both ranks resume from {resumed['name']}" if resumed else "there is no checkpoint yet: a fresh start")
    return "; ".join(parts), resumed["step"] if resumed else 0, len(events)


def survivors_error(log: Path, dead: int) -> str | None:
    """The error that the other rank raised, if it came to that before torchrun stopped it."""
    for line in log.read_text(errors="replace").splitlines():
        rank, _, text = line.partition(": ")
        if rank == f"[rank{1 - dead}]" and text.startswith("distckpt.errors."):
            return text.removeprefix("distckpt.errors.").partition(":")[0]
    return None


# -- the chapters ------------------------------------------------------------------------------------------------------


def reference(run: Run) -> None:
    began = time.monotonic()
    code, log = run.live(1)
    if code != 0:
        raise Failed(f"the uninterrupted run ended with {code}", log)
    losses = [values[-1] for _, values in sorted(run.losses().items())]
    say(f"1. Without interruption ({time.monotonic() - began:.0f} s)")
    say(f"   {len(losses)} steps; loss {losses[0]:.2f} at the first, {sum(losses[-10:]) / 10:.2f} over the last ten")


def interrupted(run: Run) -> None:
    began = time.monotonic()
    say()
    say("2. The same run, one rank killed (SIGKILL) inside a background save, three times")
    events, last, allowed = 0, 0, {0}
    for life, doom in enumerate((*DOOMS, ""), 1):
        words = run.out / "last-words.json"
        words.unlink(missing_ok=True)
        code, log = run.live(life, doom)
        what, step, events = restart_story(run.root, events)
        say(f"   life {life}: {what}" + (f"; {again} steps are done again" if (again := last - step) > 0 else ""))
        if step not in allowed:
            raise Failed(f"resumed from step {step}, not from one of {sorted(allowed)}", log)
        if not doom:
            if code != 0:
                raise Failed(f"the last life ended with {code}", log)
            break
        if not words.exists() or code == 0:
            raise Failed(f"rank and point {doom} were never reached (exit code {code})", log)
        death = json.loads(words.read_text())
        last = max(run.losses())
        at = death["step"]
        # Before its ack a rank has promised nothing and the save is off; after it, rank 0 may have committed already.
        allowed = {at - EVERY, at} if death["point"] == "ack" else {at - EVERY}
        survivor = survivors_error(log, death["rank"])
        say(f"           saving step {at}: rank {death['rank']} is killed {POINTS[death['point']].format(death['where'])}; "
            f"rank {1 - death['rank']} {'raises ' + survivor if survivor else 'is stopped by torchrun'}")
        names = verified(run.root)
        say(f"           in the root now: {', '.join(names)}, every byte verified"
            + (f" (rank 0 had every ack, so step-{at} is committed)" if f"step-{at}" in names else ""))
        for leftover in unfinished(run.root):
            say(f"           in staging: {leftover}")
    say(f"           reaches step {STEPS} ({time.monotonic() - began:.0f} s for the four lives)")


def compare(first: Run, second: Run) -> None:
    import torch

    say()
    say("3. Compared with the uninterrupted run")
    wanted, got = first.losses(), second.losses()
    repeated = sum(len(values) - 1 for values in got.values())
    differ = [step for step, values in sorted(got.items()) if any(value != wanted[step][0] for value in values)]
    if sorted(wanted) != list(range(1, STEPS + 1)) or sorted(got) != sorted(wanted) or differ:
        raise Failed(f"losses differ at steps {differ or sorted(set(wanted) ^ set(got))}")
    if not repeated:
        raise Failed("no step was done again, so nothing was shown")
    say(f"   losses: {len(got)} steps, equal as floats; {repeated} of them were computed again after a crash, to the same value")
    ours, theirs = (torch.load(run.out / "final.pt", weights_only=True) for run in (first, second))
    for part in ("model", "optimizer"):
        count, size = same(ours[part], theirs[part], part)
        say(f"   {part}: {count} tensors of {size} numbers, bit-identical (torch.equal)")
    for rank in range(RANKS):
        one, other = (torch.load(run.out / f"final-own-{rank}.pt", weights_only=True) for run in (first, second))
        same(one, other, f"rank {rank}")
    say("   each rank's random state, data position and schedule: identical")


def same(one: Any, other: Any, where: str) -> tuple[int, int]:
    """(tensors, numbers in them) of two equal states; Failed at the first difference."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise Failed(f"{where} differs from the uninterrupted run")
        return 1, one.numel()
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        counts = [same(one[key], other[key], f"{where}.{key}") for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        counts = [same(a, b, f"{where}[{index}]") for index, (a, b) in enumerate(zip(one, other, strict=True))]
    elif type(one) is type(other) and one == other:
        counts = []
    else:
        raise Failed(f"{where} differs from the uninterrupted run")
    return sum(c for c, _ in counts), sum(n for _, n in counts)


def full_disk(run: Run, size: int) -> None:
    """A disk with room for a checkpoint of ``size`` bytes and a half, so that the second save fails behind the training."""
    began = time.monotonic()
    say()
    say("4. A background save that fails: the disk is full")
    found, room = run.out / "verify.json", size * 3 // 2
    verify = [str(Path(sys.executable).with_name("distckpt")), "verify", "--digest", "--json", str(run.root)]
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "none", str(run.root)]
    run.root.mkdir()
    if subprocess.run([*PRIVATE, *mount], capture_output=True, check=False).returncode == 0:
        say(f"   the root is on a disk of {room / 1e6:.0f} MB (a tmpfs), where a second checkpoint does not fit")
        code, log = run.live(1, before=shlex.join(mount), after=f"{shlex.join(verify)} > {shlex.quote(str(found))}")
    else:
        say("   no small disk can be mounted here, so every fsync of rank 1 in the second save is made to say ENOSPC")
        code, log = run.live(1, doom=f"1:full:{2 * EVERY}")
        found.write_text(subprocess.run(verify, capture_output=True, text=True, check=False).stdout)
    notes = [run.out / f"raised-{rank}.json" for rank in range(RANKS)]
    raised = [json.loads(note.read_text()) if note.exists() else None for note in notes]
    if code == 0 or raised[0] is None or raised[0]["error"] != "DiskFull" or any(other != raised[0] for other in raised):
        raise Failed(f"exit code {code}, raised {raised}: both ranks were to raise DiskFull at one step", log)
    say(f"   step {2 * EVERY} is copied and training goes on; at poll({raised[0]['step']}) both ranks raise the same DiskFull:")
    say(f"   {raised[0]['text']}")
    good = [line["name"] for line in json.loads(found.read_text())["checkpoints"] if line["status"] == "ok"]
    if good != [f"step-{EVERY}"]:
        raise Failed(f"{good} stand and are whole, not step-{EVERY} alone", log)
    say(f"   in the root: {good[0]}, every byte verified ({time.monotonic() - began:.0f} s)")


def main() -> int:
    work, began = Path(sys.argv[1]).resolve(), time.monotonic()
    try:
        prepare(work)
        say(f"A small GPT learns the sources of Python's standard library, byte by byte: {RANKS} ranks, FSDP2, AdamW, dropout;")
        say(f"{STEPS} steps, a checkpoint every {EVERY}, keep_last={KEEP}. Checkpoints and logs are in {work}")
        say()
        first, second = new_run(work, "reference"), new_run(work, "interrupted")
        reference(first)
        interrupted(second)
        compare(first, second)
        full_disk(new_run(work, "full"), distckpt.open(second.root).checkpoints()[0].size)
    except Failed as error:
        say(f"\nFAILED: {error}")
        if error.log is not None:
            say(f"the end of {error.log}:\n" + "\n".join(error.log.read_text(errors="replace").splitlines()[-60:]))
        return 1
    command = Path(sys.executable).with_name("distckpt")
    say(f"   ({time.monotonic() - began:.0f} s in all)")
    say()
    say("The root is left for you to look at:")
    for arguments in ("ls", "show", "verify --digest"):
        say(f"   {command} {arguments} {second.root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
