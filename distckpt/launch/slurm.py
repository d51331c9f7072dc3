"""What only SLURM's controller can say or do, through SLURM's own commands."""

from __future__ import annotations

import logging
import os
import subprocess

from distckpt.launch.environment import Launch, detect

log = logging.getLogger(__name__)

_PATIENCE = 20.0


class SlurmError(Exception):
    """A command of SLURM did not work: which, and what it said. Never leaves this package."""


def _ask(*command: str) -> str:
    """The first line of what it says: a heterogeneous job has one for each component, its leader's first."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False,
                              env={**os.environ, "SLURM_TIME_FORMAT": "%s"})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise SlurmError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip().partition("\n")[0]


def state(launch: Launch) -> tuple[str, int]:
    """SLURM's word for what the job is now, and how often it was started again.

    Cancelled, out of time and requeued jobs are all COMPLETING while anything of them still runs.
    """
    text = _ask("scontrol", "show", "job", "--oneliner", launch.target)
    fields = dict(item.partition("=")[::2] for item in text.split(" "))
    restarts = fields.get("Restarts", "")
    return fields.get("JobState", ""), int(restarts) if restarts.isdecimal() else 0


def requeue(launch: Launch) -> None:
    """Have the job started again. SLURM ends what runs of it: TERM now, KILL after KillWait."""
    _ask("scontrol", "requeue", launch.target)


def end_as_set() -> float | None:
    """When SLURM ends this job, in seconds since the epoch, by SLURM_JOB_END_TIME, which it sets since 23.02."""
    return _time(os.environ.get("SLURM_JOB_END_TIME", ""))


def end_as_told() -> float | None:
    """The same by the controller; None outside of a job, where there is no limit, or when it does not say."""
    launch = detect()
    if not launch.job_id:
        return None
    try:
        return _time(_ask("squeue", "--noheader", f"--jobs={launch.target}", "--format=%e"))
    except SlurmError as error:
        log.info("when this job ends is unknown (%s): export SLURM_JOB_END_TIME in the job script, or have a stop signal sent "
                 "early enough (sbatch --signal)", error)
        return None


def _time(text: str) -> float | None:
    return float(text) if text.isdecimal() and text.isascii() and int(text) > 0 else None
