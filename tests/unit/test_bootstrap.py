"""Which rank this is, of how many: found without guessing, and an error where the environment contradicts itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from distckpt.coordination import bootstrap, store
from distckpt.coordination.bootstrap import alone, find
from distckpt.coordination.store import Client
from distckpt.errors import ConfigError, CoordinationError, CoordinatorLost
from distckpt.runtime import SYSTEM
from tests.inprocess import await_

LAUNCHERS = ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID",
             "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMI_RANK",
             "SLURMD_NODENAME", "MASTER_ADDR", "MASTER_PORT", "DISTCKPT_STORE_ADDR", "DISTCKPT_STORE_PORT")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, and counters as in a new process."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(bootstrap, "_counts", {})
    monkeypatch.setattr(bootstrap, "_slurm_stores", {})
    yield


def test_a_bare_process_is_alone_and_has_a_store_of_its_own() -> None:
    assert alone()
    one, other = find(None, SYSTEM), find(None, SYSTEM)
    assert (one.kind, one.rank, one.world, one.new_gloo) == ("single", 0, 1, None)
    one.source().set("k", {"v": 1})
    assert one.source().get(["k"]) == [{"v": 1}] and not other.source().has("k")


def test_S5_the_place_of_an_earlier_generations_store_is_heard_by_nobody() -> None:
    """torchrun gives all its generations one store: what the first one wrote there stands, and its rank 0 may still live."""
    exchange: Any = dist.HashStore()  # type: ignore[attr-defined]
    heard: dict[str, str] = {}

    def ask(who: str, rank: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: heard.update({who: bootstrap._ask(exchange, "k", rank, SYSTEM)}), daemon=True)
        thread.start()
        return thread

    first = bootstrap._Answering(exchange, "k", 3, "first", SYSTEM)
    for rank in (1, 2):
        ask(f"first {rank}", rank).join(10)
    first.end()
    early = ask("second 1", 1)
    await_(lambda: exchange.get("k/asks/1") != b"" and early.is_alive())
    early.join(0.2)
    assert early.is_alive() and heard == {"first 1": "first", "first 2": "first"}, "it waits for its own rank 0"
    second = bootstrap._Answering(exchange, "k", 3, "second", SYSTEM)
    early.join(10)
    ask("second 2", 2).join(10)
    second.end()
    assert heard == {"first 1": "first", "first 2": "first", "second 1": "second", "second 2": "second"}
    assert not second._thread.is_alive()


@pytest.mark.parametrize(("variable", "remedy"), [
    ("WORLD_SIZE", "init_process_group"), ("SLURM_STEP_NUM_TASKS", None), ("OMPI_COMM_WORLD_SIZE", "group=MPI.COMM_WORLD"),
    ("PMI_SIZE", "import mpi4py first"),
])
def test_one_process_where_a_launcher_promised_several_is_an_error(variable: str, remedy: str | None,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes that each believe to be alone would write four whole checkpoints into one root."""
    monkeypatch.setenv(variable, "4")
    if remedy is None:  # srun is a front door of its own; with WORLD_SIZE=1 beside it, it is a contradiction
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert find(None, SYSTEM).kind == "single"
        return
    with pytest.raises(ConfigError) as caught:
        find(None, SYSTEM)
    text = str(caught.value)
    assert f"{variable}=4" in text and "has 1 rank(s)" in text and remedy in text and "unset the variable" in text
    monkeypatch.setenv(variable, "1")
    assert find(None, SYSTEM).kind == "single"
    monkeypatch.setenv(variable, "many")
    assert find(None, SYSTEM).kind == "single"


@pytest.mark.parametrize("procid", ["3", "-1", "", "x"])
def test_a_slurm_step_whose_numbers_make_no_sense_is_an_error(procid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    monkeypatch.setenv("SLURM_PROCID", procid)
    with pytest.raises(ConfigError, match=r"SLURM_PROCID='.*' is not a rank of SLURM_STEP_NUM_TASKS=3"):
        find(None, SYSTEM)
    assert not alone()


@pytest.mark.parametrize("group", ["world", 3, object()])
def test_a_group_that_is_none_is_refused(group: Any) -> None:
    with pytest.raises(ConfigError, match="a torch ProcessGroup or an mpi4py Comm, not"):
        find(group, SYSTEM)


class Comm:
    """A communicator of threads, with the three calls that are used."""

    def __init__(self, rank: int, world: int, shared: Any) -> None:
        self.rank, self.world, self.shared = rank, world, shared

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.world

    def Allgather(self, send: Any, receive: Any) -> None:
        self.shared["parts"][self.rank] = bytes(send[0])
        self.shared["barrier"].wait()
        receive[0][:] = b"".join(self.shared["parts"][r] for r in range(self.world))

    def Bcast(self, buffer: Any, root: int) -> None:
        if self.rank == root:
            self.shared["text"] = bytes(buffer)
        self.shared["barrier"].wait()
        buffer[:] = self.shared["text"]


def comms(world: int) -> list[Comm]:
    shared = {"parts": {}, "barrier": threading.Barrier(world), "text": b""}
    return [Comm(rank, world, shared) for rank in range(world)]


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "b", "b"]])
def test_an_mpi_communicator_is_a_front_door_on_one_host_and_several(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    local = threading.local()
    name = bootstrap.socket.gethostname()
    monkeypatch.setattr(bootstrap.socket, "gethostname", lambda: name if not hasattr(local, "host") else local.host)
    if len(set(hosts)) > 1:
        monkeypatch.setenv("DISTCKPT_STORE_ADDR", "127.0.0.1")
    found: dict[int, Any] = {}

    def one(comm: Comm) -> None:
        local.host = hosts[comm.rank]
        found[comm.rank] = find(comm, SYSTEM)

    threads = [threading.Thread(target=one, args=(comm,)) for comm in comms(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {r: (b.kind, b.rank, b.world, b.new_gloo) for r, b in found.items()} == {r: ("mpi", r, 3, None) for r in range(3)}
    found[2].source().set("from", {"rank": 2})
    assert found[1].source().get(["from"]) == [{"rank": 2}]


def test_mpi_is_found_only_where_the_program_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = ModuleType("mpi4py.MPI")
    mpi.COMM_WORLD = Comm(0, 2, {})  # type: ignore[attr-defined]
    mpi.Is_initialized, mpi.Is_finalized = lambda: True, lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setenv("PMI_SIZE", "3")
    assert not alone()
    with pytest.raises(ConfigError, match=r"the MPI world has 2 rank\(s\), but the environment says PMI_SIZE=3"):
        find(None, SYSTEM)
    mpi.Is_finalized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.delenv("PMI_SIZE")
    assert alone() and find(None, SYSTEM).kind == "single"


def test_the_helpers_numbers_of_an_mpiexec_under_slurm_are_no_front_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of hydra on two nodes inherit srun's numbers of its two helpers: there would be two ranks 0 of a world of 2."""
    for name, value in {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "PMI_SIZE": "4", "PMI_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"the environment says PMI_SIZE=4: import mpi4py first"):
        find(None, SYSTEM)
    assert alone()


def test_the_address_of_the_store_may_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCKPT_STORE_ADDR", "10.1.2.3")
    assert bootstrap._own_address("anything") == "10.1.2.3"
    monkeypatch.delenv("DISTCKPT_STORE_ADDR")
    assert bootstrap._own_address("127.0.0.1") == "127.0.0.1"
    assert bootstrap._own_address("no-such-host.invalid") == "no-such-host.invalid"


def test_a_loopback_address_of_its_own_name_is_told_to_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes 127.0.1.1 for a host's own name into its /etc/hosts; the other nodes know it by another address."""
    look = bootstrap.socket.getaddrinfo
    monkeypatch.setattr(bootstrap.socket, "getaddrinfo", lambda name, *rest, **more: look("127.0.1.1", *rest, **more))
    monkeypatch.setattr(bootstrap.socket, "gethostname", lambda: "n1")
    assert bootstrap._own_address("n1") == "n1" and bootstrap._own_address(None) == "n1"


def served() -> tuple[Any, Client]:
    server = bootstrap._serve("127.0.0.1", 0)
    return server, bootstrap._source("127.0.0.1", server.port, "t", SYSTEM)()


def test_a_store_that_is_gone_is_the_coordinator_lost_in_every_call() -> None:
    server, client = served()
    client.set("a", {})
    assert client.has("a") and client.wait(["a"], 1.0) and client.key_count() >= 1
    patient = bootstrap._source("127.0.0.1", server.port, "t", SYSTEM)()
    ended: list[Any] = []

    def wait() -> None:
        try:
            patient.wait(["never"], None)
        except CoordinatorLost as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    del server
    for ask in (lambda: client.claim("a", {}), lambda: client.set("a", {}), lambda: client.get(["a"]), lambda: client.has("a"),
                lambda: client.wait(["b"], 1.0), lambda: client.delete(["a"])):
        with pytest.raises(CoordinatorLost, match=r"the store of rank 0 at 127\.0\.0\.1:\d+ is gone"):
            ask()
    thread.join(10)
    assert len(ended) == 1


def test_a_store_that_cannot_be_reached_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_CONNECT", timedelta(seconds=1))
    server = bootstrap._serve("127.0.0.1", 0)
    port = server.port
    del server
    with pytest.raises(CoordinationError, match=f"cannot reach rank 0's store at 127.0.0.1:{port}.*DISTCKPT_STORE_ADDR"):
        bootstrap._source("127.0.0.1", port, "t", SYSTEM)()


def test_every_client_knows_its_own_socket_and_the_sentry_can_cut_it() -> None:
    """TCPStore gives no way to bound a call: the socket under it is shut down."""
    server, client = served()
    assert client._sentry is not None
    first = client._sentry._descriptors
    second = bootstrap._source("127.0.0.1", server.port, "t", SYSTEM)()
    assert second._sentry is not None
    elsewhere, third = served()
    assert len(first) == 1 and len(second._sentry._descriptors) == 1 and first != second._sentry._descriptors
    client._sentry.enter(-1.0)
    await_(lambda: client._sentry is not None and not client._sentry._descriptors)
    client._sentry.leave()
    with pytest.raises(CoordinatorLost):
        client.has("a")
    with pytest.raises(CoordinatorLost):
        second.has("a")
    assert not third.has("a") and elsewhere is not None, "the line to another store was cut as well"


def test_a_call_within_its_limit_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SILENCE", 0.5)
    server, client = served()
    assert not client.wait(["never"], 2.5), "the server may take as long as it was given"
    assert not client.has("never") and server is not None


def test_a_torch_group_of_one_rank_needs_no_server() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        found = find(None, SYSTEM)
        assert (found.kind, found.rank, found.world, found.server) == ("torch", 0, 1, None) and not alone()
        assert find(dist.group.WORLD, SYSTEM).kind == "torch"
    finally:
        dist.destroy_process_group()


def test_rank_0_where_nobody_looks_for_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun --distribution=arbitrary: the others would look for its store on another node for two minutes."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0",
                        "SLURMD_NODENAME": "n2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"rank 0 runs on n2, .* on n1, the first of n\[1-2\].*Set MASTER_ADDR=n2"):
        find(None, SYSTEM)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert find(None, SYSTEM).kind == "slurm"
