"""How long this job has after a stop signal, and how to get more, as ``distckpt doctor`` tells it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from distckpt.launch import detect

_UNKNOWN = "tell the manager: CheckpointManager(grace=seconds)"
_LONGER = {"torchrun": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=SECONDS in torchrun's environment",
           "deepspeed": "deepspeed's is fixed: send the signal to the ranks, or start them with torchrun"}
_KILL_WAIT = 30.0


@dataclass(frozen=True)
class Launcher:
    """``name`` says how this process was started. ``grace``: seconds from a stop signal to SIGKILL, None where unknown;
    ``longer``: how to get more."""

    name: str
    grace: float | None
    longer: str


def launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """Local. What a launcher fixes comes first, then SLURM's KillWait, as its controller says."""
    found = detect(environment)
    if found.grace is not None:
        return Launcher(str(found), found.grace, _LONGER.get(found.kind, _UNKNOWN))
    if found.job_id:
        return Launcher(str(found), _kill_wait(),
                        "#SBATCH --signal=USR1@SECONDS gives an earlier signal, KillWait in slurm.conf a later end")
    return Launcher(str(found), None, _UNKNOWN)


def _kill_wait() -> float:
    """SLURM's default where the controller does not say."""
    with suppress(OSError, subprocess.SubprocessError, ValueError, StopIteration):
        said = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=10, check=True).stdout
        return float(next(line.split("=")[1].split()[0] for line in said.splitlines() if line.startswith("KillWait")))
    return _KILL_WAIT
