"""Who this process is, and how it was started: read from the environment alone. Pure, no torch.

The one reader of what launchers set. Order of trust: RANK and WORLD_SIZE (torchrun, deepspeed, or set by hand), then MPI's, then
srun's. An mpiexec under SLURM starts its helpers with srun, one per node, and its ranks inherit the helpers' SLURM_PROCID and
SLURM_STEP_NUM_TASKS: where MPI's numbers are there and differ from SLURM's, SLURM's are not this process's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from distckpt.errors import ConfigError
from distckpt.launch.nodelist import expand, first

RENDEZVOUS, STORE = 0, 1
_FIRST_PORT = 12_000  # the ports from here to 32,000 are not handed out to outgoing connections by default
_JOBS, _STEPS = 2_500, 4
_TORCHRUN_GRACE = 30.0
_DEEPSPEED_GRACE = 30.0


@dataclass(frozen=True)
class Launch:
    """The answer. ``kind``: "torchrun", "deepspeed", "environment" (RANK set by hand), "mpiexec", "srun" or "single".

    ``rank`` and ``local_rank`` are -1, and ``local_world`` 0, where the launcher does not say. ``variable``: what promises the
    world. ``job``: the scheduler's, with its ``step``; None outside of one. ``target``: the name that scontrol and squeue know it
    by, which for a task of a job array is not its number: the last task's number is the whole array's. ``restart`` counts its
    requeues, ``elastic`` the restarts by torchrun within one. ``grace``: seconds from the stop signal to the kill, where the
    launcher fixes them.
    """

    kind: str
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    variable: str | None = None
    job: str | None = None
    job_id: int = 0
    target: str = ""
    step: str | None = None
    restart: int = 0
    elastic: int = 0
    address: str | None = None
    master_port: int | None = None
    nodelist: str | None = None
    grace: float | None = None

    @property
    def host(self) -> str | None:
        """Where rank 0 runs: MASTER_ADDR, else the first of SLURM's nodes; None when neither is said. ConfigError for a list that
        is none."""
        return self.address or (first(self.nodelist) if self.nodelist else None)

    def port(self, purpose: int) -> int:
        """A port for this step of this job, which every rank knows without a word. Jobs whose numbers differ by less than
        2,500 have different ones, tasks of a job array among them, and so have steps of one job that differ by less than 4."""
        step = int(self.step) if self.step is not None and self.step.isdigit() else 0
        return _FIRST_PORT + self.job_id % _JOBS * 2 * _STEPS + step % _STEPS * 2 + purpose

    def export(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set what torch and DeepSpeed read (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), for
        ranks that srun or mpiexec started. What is set already stays. Local; ConfigError where nothing says who this rank is."""
        if self.rank < 0:
            raise ConfigError(f"{self.kind} does not say which of {self.world} ranks this process is; set RANK")
        host = self.host or ("127.0.0.1" if self.world == self.local_world else None)
        if host is None or (self.job_id == 0 and self.master_port is None and self.world > 1):
            raise ConfigError(f"nothing in the environment that {self.kind} gives says where rank 0 of {self.world} listens; set "
                              "MASTER_ADDR and MASTER_PORT")
        port = self.master_port if self.master_port is not None else self.port(RENDEZVOUS) if self.world > 1 else 0
        values = {"RANK": self.rank, "WORLD_SIZE": self.world, "MASTER_ADDR": host, "MASTER_PORT": port}
        if self.local_rank >= 0:
            values.update(LOCAL_RANK=self.local_rank)
        if self.local_world > 0:
            values.update(LOCAL_WORLD_SIZE=self.local_world)
        for name, value in values.items():
            environ.setdefault(name, str(value))

    def __str__(self) -> str:
        parts = [{"single": "started by no launcher", "environment": "ranks set in the environment"}.get(
            self.kind, f"started by {self.kind}")]
        if self.job is not None:
            parts.append(f"job {self.job}, requeued {self.restart} times")
        if self.elastic:
            parts.append(f"restarted {self.elastic} times by torchrun")
        return ", ".join(parts)


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """How this process was started. Local; what makes no sense counts as not said."""
    found = Launch("single", address=environ.get("MASTER_ADDR") or None, master_port=_number(environ, "MASTER_PORT"),
                   nodelist=_nodes(environ),
                   elastic=_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0)
    number = _number(environ, "SLURM_JOB_ID") or 0
    if number:  # an id of 0 or none is not a job (S6)
        task, whole = environ.get("SLURM_ARRAY_TASK_ID"), environ.get("SLURM_ARRAY_JOB_ID")
        found = replace(found, job=f"slurm:{number}" + (f"[{task}]" if task else ""), job_id=number,
                        target=f"{whole}_{task}" if whole and task else str(number),
                        step=environ.get("SLURM_STEP_ID") or None, restart=_number(environ, "SLURM_RESTART_COUNT") or 0)
    world = _number(environ, "WORLD_SIZE") or 0
    if world > 0:
        kind = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "deepspeed" if "CROSS_SIZE" in environ else "environment"
        local = _number(environ, "LOCAL_WORLD_SIZE") or _number(environ, "LOCAL_SIZE") or 0
        return replace(found, kind=kind, rank=_rank(environ, "RANK"), world=world, local_rank=_rank(environ, "LOCAL_RANK"),
                       local_world=local, variable="WORLD_SIZE", grace=_grace(kind, environ))
    tasks, procid = _number(environ, "SLURM_STEP_NUM_TASKS") or 0, _rank(environ, "SLURM_PROCID")
    for size, rank, local_rank, local_size in (
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
            ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")):
        world = _number(environ, size) or 0
        if world > 0 and (world, _rank(environ, rank)) != (tasks, procid):
            return replace(found, kind="mpiexec", rank=_rank(environ, rank), world=world, variable=size,
                           local_rank=_rank(environ, local_rank), local_world=_number(environ, local_size) or 0)
    if tasks > 0:
        return replace(found, kind="srun", rank=procid, world=tasks, variable="SLURM_STEP_NUM_TASKS",
                       local_rank=_rank(environ, "SLURM_LOCALID"), local_world=_tasks_here(environ))
    return found


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and text.isascii() else None


def _rank(environ: Mapping[str, str], name: str) -> int:
    found = _number(environ, name)
    return -1 if found is None else found


def _nodes(environ: Mapping[str, str]) -> str | None:
    """The nodes of this step, that of rank 0 first. SLURM sorts them by name; where a step spans the components of a
    heterogeneous job, rank 0 is in the first of these, wherever that stands in the alphabet."""
    found = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or None
    leading = environ.get("SLURM_JOB_NODELIST_HET_GROUP_0")
    if found is None or not leading:
        return found
    try:
        return leading if first(leading) in set(expand(found)) else found
    except ConfigError:
        return found


def _tasks_here(environ: Mapping[str, str]) -> int:
    """How many tasks of the step run on this node: ``SLURM_STEP_TASKS_PER_NODE=2(x3),1`` in the order of the list of nodes, which
    in a heterogeneous job is not that of SLURM_NODEID; 0 when unknown."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = part.partition("(x")
        times = times.removesuffix(")") or "1"
        if not (count.isdecimal() and times.isdecimal()):
            return 0
        counts += [int(count)] * min(int(times), 1 << 20)
    node = _rank(environ, "SLURM_NODEID")
    try:
        names = list(expand(environ.get("SLURM_STEP_NODELIST", "")))
        node = names.index(environ.get("SLURMD_NODENAME", ""))
    except (ConfigError, ValueError):
        pass  # a plain step counts its nodes in that order as well
    return counts[node] if 0 <= node < len(counts) else 0


def _grace(kind: str, environ: Mapping[str, str]) -> float | None:
    """What the launcher waits between the stop signal and the kill. torchrun's ``--shutdown-timeout`` reaches no worker, and the
    variable that stands for it does; deepspeed's is fixed."""
    if kind == "torchrun":
        said = _number(environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        return _TORCHRUN_GRACE if said is None else float(said)
    return _DEEPSPEED_GRACE if kind == "deepspeed" else None
