"""A training program under the power cut: whatever it had been told is saved must be on every disk that the cut may leave.

    python scripts/examples/power_cut.py FOLDER python train.py FOLDER/run

The program saves to FOLDER/run (FOLDER is new), and calls ``distckpt.testing.trace.mark("SAVED 100")`` when its save of step 100
is over.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import distckpt
from distckpt.testing import trace
from distckpt.testing.replay import Mark, Run, compile_run

FEW = 4


def record(folder: Path, *command: str) -> Run:
    """What ``command`` did in ``folder``, system call by system call."""
    folder.mkdir()
    out = folder.with_suffix(".trace")
    done = trace.capture(command, out, cwd=folder)
    if done.returncode:
        raise SystemExit(f"the program ended with {done.returncode}: {done.stderr}")
    return compile_run(trace.read(out, folder), str(folder))


def cut(run: Run, root: str, said: str = "SAVED") -> tuple[int, list[str]]:
    """How many disks there were, ``FEW`` after each step, and those on which less stands than had been said."""
    disk, saved, disks, wrong = run.disk.after_kill(), 0, 0, []
    for number, step in enumerate(run.steps):
        step.apply(disk)
        if isinstance(step, Mark) and step.text.startswith(f"{said} "):
            saved = int(step.text.split()[1])
        for state in disk.crash_states(FEW, number):
            disks += 1
            with tempfile.TemporaryDirectory() as scratch:
                state.put(root, f"{scratch}/run")
                whole = [found.step for found in distckpt.open(f"{scratch}/run").checkpoints()]
            if max(whole, default=0) < saved:
                wrong.append(f"after line {step.line} of the trace: {saved} was saved, and {whole} can be opened")
    return disks, wrong


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    print(cut(record(Path(sys.argv[1]).absolute(), *sys.argv[2:]), f"{Path(sys.argv[1]).absolute()}/run"))
