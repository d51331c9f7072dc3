"""The end of a run that was told to stop: after the commit, exactly one rank has the job started again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from distckpt.errors import ConfigError
from distckpt.launch import slurm
from distckpt.launch.environment import detect

if TYPE_CHECKING:
    from distckpt.manager import CheckpointManager

log = logging.getLogger(__name__)

POLICIES = ("auto", "requeue", "exit")
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
_RUNNING = ("RUNNING", "SIGNALING")


def finish(manager: CheckpointManager, policy: str = "auto", code: int = STOPPED) -> int:
    """Close ``manager`` and have a run that was told to stop go on later; the exit code for ``sys.exit``.

    Collective: every rank, after the training loop, whether it was stopped or is complete. What ``close`` raises is raised, on
    every rank, and nothing is requeued then. 0: the run is complete, or the job is requeued, which rank 0 does, once, when
    every rank knows that the last save is committed. ``code``: the run was stopped, and whoever started it must start it again:
    with ``policy="exit"``, with "auto" outside of a SLURM job, or, on rank 0 alone, when SLURM refuses. A job that SLURM is
    ending already is left alone: it may be cancelled, and SLURM does not tell that from out of time, or requeued by SLURM.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(map(repr, POLICIES))}, not {policy!r}")
    launch = detect()
    if policy == "requeue" and not launch.job_id:
        raise ConfigError("policy='requeue' needs a SLURM job, and SLURM_JOB_ID is not set; use 'auto' or 'exit'")
    manager.close()
    if not manager.stopped:
        return 0
    if policy == "exit" or not launch.job_id:
        return code
    if manager.rank != 0:
        return 0
    try:
        state, restarts = slurm.state(launch)
        if state not in _RUNNING or restarts != launch.restart:
            log.warning("job %s is stopped (%s) and saved; SLURM itself ends it (%s, %d restarts), so it is not requeued",
                        launch.job, manager.stopped, state, restarts)
            return 0
        slurm.requeue(launch)
    except slurm.SlurmError as error:
        log.error("job %s is stopped (%s) and saved, and could not be requeued: %s; submit it again", launch.job, manager.stopped,
                  error)
        return code
    log.info("job %s is stopped (%s), saved and requeued", launch.job, manager.stopped)
    return 0
