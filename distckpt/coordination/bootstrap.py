"""Which rank this is, of how many, and where rank 0's store is: four front doors to one coordination path.

An initialised torch process group, an mpi4py communicator, SLURM's environment, or a single process. What the
environment says must not contradict what is found: a training job that believes it is four single processes would
write four "whole" checkpoints into one root, so that is an error here, not a guess.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distckpt.coordination.store import Client, ClientSource, Sentry, sockets_to
from distckpt.errors import ConfigError, CoordinationError
from distckpt.launch.environment import STORE, Launch, detect
from distckpt.runtime import Runtime

ADDRESS_VARIABLE = "DISTCKPT_STORE_ADDR"
PORT_VARIABLE = "DISTCKPT_STORE_PORT"
_CONNECT = timedelta(seconds=120)
_FIRST_PAUSE, _LONGEST_PAUSE, _LEAVING = 0.002, 0.25, 5.0
log = logging.getLogger(__name__)
_counts: dict[str, int] = {}


@dataclass
class Bootstrap:
    """The answer. ``source`` makes one client per thread; ``new_gloo`` makes a process group for DCP whose
    collectives end after so many seconds (None: cannot). ``met`` is called when all ranks have met, or will not."""

    kind: str
    rank: int
    world: int
    source: ClientSource
    server: Any = None
    new_gloo: Callable[[float], Any] | None = None
    met: Callable[[], None] = lambda: None


def find(group: Any, runtime: Runtime) -> Bootstrap:
    """The front door for ``group`` (None: look for one). Collective: every rank."""
    if group is not None and hasattr(group, "Get_rank") and hasattr(group, "Bcast"):
        return _from_mpi(group, runtime)
    if isinstance(group, dist.ProcessGroup):
        return _from_torch(group, runtime)
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives those that it leaves out
        raise _outsider()
    if group is not None:
        raise ConfigError(f"group must be None, a torch ProcessGroup or an mpi4py Comm, not {type(group).__name__}")
    if dist.is_available() and dist.is_initialized():
        _check_world("the initialised torch process group", dist.get_world_size())
        return _from_torch(None, runtime)
    comm = _mpi_world()
    if comm is not None:
        _check_world("the MPI world", comm.Get_size())
        return _from_mpi(comm, runtime)
    launch = detect()
    if _slurm_step(launch):
        return _from_slurm(launch, runtime)
    _check_world("this process, which has no process group", 1)
    return _single(runtime)


def alone() -> bool:
    """Whether this is a single process, as ``find`` sees it: no process group, no MPI world, no SLURM step of several."""
    return not (dist.is_available() and dist.is_initialized()) and _mpi_world() is None and not _slurm_step(detect())


def _slurm_step(launch: Launch) -> bool:
    return launch.kind == "srun" and launch.world > 1


_REMEDIES = {"mpiexec": "import mpi4py first, or pass group=MPI.COMM_WORLD",
             "srun": "initialise the process group first, or run one task"}


def _check_world(found: str, world: int) -> None:
    """Compare with what the launcher promised."""
    launch = detect()
    if launch.variable is not None and launch.world != world:
        remedy = _REMEDIES.get(launch.kind, "call torch.distributed.init_process_group (or deepspeed.initialize) before "
                                            "CheckpointManager")
        raise ConfigError(f"{found} has {world} rank(s), but the environment says {launch.variable}={launch.world}: {remedy}, or "
                          "pass group= to say which ranks write this root, or unset the variable")


# -- single ----------------------------------------------------------------------------------------------------------


def _single(runtime: Runtime) -> Bootstrap:
    raw: Any = dist.HashStore()  # type: ignore[attr-defined]
    prefix = f"distckpt/{runtime.token(8)}/"
    return Bootstrap("single", 0, 1, lambda: Client(raw, prefix))


# -- a store of our own ----------------------------------------------------------------------------------------------


def _serve(address: str, port: int) -> Any:
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, None, True, timeout=_CONNECT, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise CoordinationError(f"rank 0 cannot serve its store on {address}:{port}: {error}; set {ADDRESS_VARIABLE} to an "
                                "address of this machine that the other ranks can reach") from error


def _source(address: str, port: int, token: str, runtime: Runtime) -> ClientSource:
    def connect() -> Client:
        try:
            raw, descriptors = sockets_to(port, lambda: dist.TCPStore(  # type: ignore[attr-defined]
                address, port, None, False, timeout=_CONNECT, wait_for_workers=False))
        except (dist.DistError, RuntimeError) as error:
            raise CoordinationError(f"cannot reach rank 0's store at {address}:{port}: {error}; set {ADDRESS_VARIABLE} on rank "
                                    "0 to an address that all ranks can reach") from error
        place = f"{address}:{port}"
        return Client(raw, f"distckpt/{token}/", f" at {place}", Sentry(descriptors, runtime, place))

    return connect


def _own_address(towards: str | None) -> str:
    """The address of this machine that peers reach: of the interface that leads to ``towards``.

    A host may know its own name by a loopback address alone (Debian writes 127.0.1.1 into /etc/hosts); its peers know it by
    another, so they are told the name.
    """
    chosen = os.environ.get(ADDRESS_VARIABLE)
    if chosen:
        return chosen
    target = towards or socket.gethostname()
    try:
        resolved = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(resolved[0], socket.SOCK_DGRAM) as probe:
            probe.connect(resolved[4])
            mine = str(probe.getsockname()[0])
            return target if mine == "::1" or mine.startswith("127.") else mine
    except OSError:
        return target


def _publish(rank: int, world: int, towards: str | None, runtime: Runtime, tell: Callable[[str], object],
             hear: Callable[[], str]) -> tuple[ClientSource, Any]:
    """Rank 0 serves a store and tells where it is; the others hear."""
    if world == 1:
        single = _single(runtime)
        return single.source, None
    if rank == 0:
        address = _own_address(towards)
        server = _serve(address, 0)
        token = runtime.token(8)
        tell(f"{address} {server.port} {token}")
        return _source(address, server.port, token, runtime), server
    address, port, token = hear().split(" ")
    return _source(address, int(port), token, runtime), None


# -- torch -----------------------------------------------------------------------------------------------------------


def _ask(exchange: Any, key: str, rank: int, runtime: Runtime) -> str:
    """What rank 0 answers this very process.

    torchrun (2.13) gives all generations of its ranks one store, and what an earlier rank 0 wrote there leads to a store that is
    gone, or to a zombie's. So who asks draws a name for the answer.
    """
    name = runtime.token(8)
    exchange.set(f"{key}/asks/{rank}", name)
    return str(exchange.get(f"{key}/answer/{name}").decode())


class _Answering:
    """Rank 0's thread, until ``end``. A question of an earlier generation is answered too, and nobody hears that."""

    def __init__(self, exchange: Any, key: str, world: int, text: str, runtime: Runtime) -> None:
        self._exchange, self._key, self._world, self._text = exchange, key, world, text
        self._ended = runtime.event()
        self._thread = runtime.thread("bootstrap", self._run)

    def end(self) -> None:
        self._ended.set()
        self._thread.join(_LEAVING)

    def _run(self) -> None:
        answered: dict[int, str] = {}
        pause = _FIRST_PAUSE
        try:
            while not self._ended.is_set():
                new = [rank for rank in range(1, self._world) if self._answer(rank, answered)]
                pause = _FIRST_PAUSE if new else min(2 * pause, _LONGEST_PAUSE)
                self._ended.wait(pause)
        except (dist.DistError, RuntimeError) as error:  # the program ends; who has not heard says that it cannot reach the store
            log.debug("the place of rank 0's store is told to nobody any more: %s", error)

    def _answer(self, rank: int, answered: dict[int, str]) -> bool:
        asks = f"{self._key}/asks/{rank}"
        if not self._exchange.check([asks]):
            return False
        name = self._exchange.get(asks).decode()
        if answered.get(rank) == name:
            return False
        self._exchange.set(f"{self._key}/answer/{name}", self._text)
        answered[rank] = name
        return True


def _outsider() -> ConfigError:
    return ConfigError("this process is not a member of the group that was passed: make the manager on its members only")


def _from_torch(group: dist.ProcessGroup | None, runtime: Runtime) -> Bootstrap:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise _outsider()
    members = dist.get_process_group_ranks(group) if group is not None else list(range(world))
    line = ",".join(map(str, members))
    number = _counts.get(line, 0)
    _counts[line] = number + 1
    key = f"distckpt/bootstrap/{line}/{number}"
    exchange = dist.distributed_c10d._get_default_store()
    answering: list[_Answering] = []
    source, server = _publish(rank, world, os.environ.get("MASTER_ADDR") or getattr(exchange, "host", None), runtime,
                              lambda text: answering.append(_Answering(exchange, key, world, text, runtime)),
                              lambda: _ask(exchange, key, rank, runtime))

    def new_gloo(seconds: float) -> Any:
        # Local synchronisation only where others do not take part: torch then names the group by how many groups this process
        # is in, which may differ between the members; otherwise it counts all that were made, alike everywhere.
        return dist.new_group(ranks=members, timeout=timedelta(seconds=seconds), backend="gloo",
                              use_local_synchronization=len(members) < dist.get_world_size())

    return Bootstrap("torch", rank, world, source, server, new_gloo, answering[0].end if answering else lambda: None)


# -- MPI -------------------------------------------------------------------------------------------------------------


def _mpi_world() -> Any:
    """MPI's world when this is an MPI program of several ranks, else None. Never starts MPI in a program without it."""
    if "mpi4py.MPI" not in sys.modules:
        return None
    mpi = sys.modules["mpi4py.MPI"]
    if not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1:
        return None
    return mpi.COMM_WORLD


def _from_mpi(comm: Any, runtime: Runtime) -> Bootstrap:
    rank, world = comm.Get_rank(), comm.Get_size()
    size = 256
    hosts = bytearray(size * world)
    mine = socket.gethostname().encode()[:size].ljust(size, b"\0")
    comm.Allgather([mine, size], [hosts, size])
    same = all(hosts[i:i + size] == mine for i in range(0, len(hosts), size))

    def broadcast(text: str) -> str:
        buffer = bytearray(text.encode().ljust(1024, b"\0"))
        comm.Bcast(buffer, root=0)
        return buffer.rstrip(b"\0").decode()

    source, server = _publish(rank, world, "127.0.0.1" if same else None, runtime, broadcast,
                              lambda: broadcast(""))
    return Bootstrap("mpi", rank, world, source, server)


# -- SLURM -----------------------------------------------------------------------------------------------------------


_slurm_stores: dict[tuple[str, int], Any] = {}


def _from_slurm(launch: Launch, runtime: Runtime) -> Bootstrap:
    rank, world = launch.rank, launch.world
    if not 0 <= rank < world:
        raise ConfigError(f"SLURM_PROCID={os.environ.get('SLURM_PROCID')!r} is not a rank of SLURM_STEP_NUM_TASKS={world}")
    host = launch.host or "localhost"
    here = os.environ.get("SLURMD_NODENAME")
    told = launch.address or os.environ.get(ADDRESS_VARIABLE)
    if rank == 0 and here and launch.nodelist and host != here and not told:
        raise ConfigError(f"rank 0 runs on {here}, and the other ranks look for it on {host}, the first of {launch.nodelist}: "
                          f"the tasks are not in the order of the nodes. Set MASTER_ADDR={here} for every rank")
    said = os.environ.get(PORT_VARIABLE, "")
    port = int(said) if said.isdecimal() else launch.port(STORE)
    number = _counts.get("slurm", 0)
    _counts["slurm"] = number + 1
    address = _own_address(host) if rank == 0 else os.environ.get(ADDRESS_VARIABLE, host)
    place = (address, port)
    server = None
    if rank == 0:
        server = _slurm_stores.get(place) or _serve(address, port)
        _slurm_stores[place] = server
    token = f"slurm-{launch.job_id}-{launch.step or 0}-{launch.restart}-{number}"
    source = _source(address, port, token, runtime)
    return Bootstrap("slurm", rank, world, source, server)
