"""How this process was started, and how long it has after a stop signal, as ``distckpt doctor`` tells it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """``grace``: seconds from a stop signal to SIGKILL, None where unknown; ``longer``: how to get more."""

    name: str
    grace: float | None
    longer: str


def launcher(environment: Mapping[str, str] | None = None) -> Launcher:
    """How this process was started, and how long it has after a stop signal."""
    env = os.environ if environment is None else environment
    unknown = "tell the manager: CheckpointManager(grace=seconds)"
    if "TORCHELASTIC_RUN_ID" in env:
        text = env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
        restarts = f"restart {env.get('TORCHELASTIC_RESTART_COUNT', '0')} of {env.get('TORCHELASTIC_MAX_RESTARTS', '0')}"
        grace = float(text) if text.replace(".", "", 1).isdigit() else 30.0
        return Launcher(f"torchrun ({restarts}){_inside_slurm(env)}", grace, "torchrun --shutdown-timeout SECONDS")
    if env.get("SLURM_JOB_ID", "").isdigit():
        return Launcher(f"SLURM job {env['SLURM_JOB_ID']}", _kill_wait(),
                        "#SBATCH --signal=USR1@SECONDS gives an earlier signal, KillWait in slurm.conf a later end")
    if "CROSS_RANK" in env and "CROSS_SIZE" in env:
        return Launcher("deepspeed", None, unknown)
    if "OMPI_COMM_WORLD_SIZE" in env or "PMI_SIZE" in env:
        return Launcher("mpiexec", None, unknown)
    return Launcher("no launcher", None, unknown)


def _inside_slurm(env: Mapping[str, str]) -> str:
    return f" in SLURM job {env['SLURM_JOB_ID']}" if env.get("SLURM_JOB_ID", "").isdigit() else ""


def _kill_wait() -> float:
    """SLURM's seconds between TERM and KILL, as the controller says; its default where it does not."""
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        said = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=10, check=True).stdout
        return float(next(line.split("=")[1].split()[0] for line in said.splitlines() if line.startswith("KillWait")))
    return 30.0
