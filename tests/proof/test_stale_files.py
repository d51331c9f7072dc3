"""Hosts that are shown each other's changes late, with the whole library in the simulation: 90 s take no time here.

Every place where a rank looks at what another host wrote: the nonce of the start, the staging directory, acked files on rank 0,
directories that several ranks make, files that nobody claims, resume, the claim, leases, removal, a reader's ``open``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from distckpt.durable import Files
from distckpt.errors import ConfigError, ResumeError, SaveError
from distckpt.options import Timeouts
from distckpt.saving.files import RankFiles
from distckpt.testing import checker, faults
from distckpt.testing.checker import ABORTED, COMMITTED
from distckpt.testing.simruntime import SimRuntime
from distckpt.testing.simulation import ROOT, Beside, Run, Simulation, State, Told, tree_of
from distckpt.testing.stalefs import Server, StaleFiles
from scripts.proof.scenarios import bytes_of

LATE, NEVER = 90.0, 400.0
TIMES = Timeouts(arrive=300.0, progress=20.0, visible=120.0, close=300.0)


class Hosts:
    """A simulation in which every rank is a host of its own; ``delays`` by rank, which a program may change as it goes."""

    def __init__(self, world: int = 2, seed: int = 0, **delays: Any) -> None:
        self.simulation = Simulation(world, seed, apart=True, timeouts=TIMES, horizon=20_000.0)
        self.server, self.delays = Server(self.simulation.files), delays
        self.clients: dict[int, StaleFiles] = {}

    def view(self, files: Files, rank: int, runtime: SimRuntime) -> Files:
        client = self.clients[rank] = self.server.client(f"host-{rank}", runtime, over=files, **self.delays)
        return client

    def delay(self, rank: int, names: float = 0.0, sizes: float = 0.0, directories_as: str = "absent") -> None:
        self.clients[rank].delay(names, sizes, directories_as)

    def job(self, program: Callable[[Told, int], Any], **more: Any) -> Run:
        run = self.simulation.job(program, files=self.view, **more)
        assert run.violations == [], (run.violations, run.errors, run.stacks)
        return run

    @property
    def told(self) -> list[set[str]]:
        return [set(save.told.values()) for save in self.simulation.saves]

    @property
    def standing(self) -> list[str]:
        return sorted(checker.standing(tree_of(self.simulation.files)))


def one(manager: Told, rank: int) -> None:
    manager.save(1, State(bytes_of(rank, 1)))


@pytest.mark.parametrize("world", [2, 3])
def test_names_and_sizes_that_come_ninety_seconds_late_cost_time_and_nothing_else(world: int) -> None:
    """The nonce, the staging directory, acked files and their sizes, the marker at resume: all are looked for again. A rank that
    looks is no rank that hangs, although it may do so for longer than ``progress``."""
    hosts = Hosts(world, names=LATE, sizes=LATE, nocto=True)

    def program(manager: Told, rank: int) -> Any:
        one(manager, rank)
        return manager.resume().step

    run = hosts.job(program)
    assert not run.errors and hosts.told == [{COMMITTED}] and set(run.values.values()) == {1}
    assert all(client.met for client in hosts.clients.values()) and run.seconds > 3 * LATE


def test_storage_that_stays_unseen_is_refused_at_the_start_with_the_ranks_that_do_not_see_it() -> None:
    run = Hosts(3, names=NEVER).job(one)
    assert {type(error) for error in run.errors.values()} == {ConfigError} and len(run.errors) == 3
    words = ("rank 1 on host-1 does not see what rank 0 wrote there", ROOT, "host-0")
    assert all(word in str(error) for error in run.errors.values() for word in words), run.errors
    assert 120 <= run.seconds < 200


@pytest.mark.parametrize("rank, names, sizes, words", [
    (1, NEVER, 0.0, ["rank 1 on host-1", f"{ROOT}/.distckpt/staging/1/", "/step-1",
                     "not visible on host-1 120 s after rank 0 on host-0"]),
    (0, NEVER, 0.0, ["'data.rank-00001-of-00002.bin' was written by rank 1 on host-1 and is not seen by rank 0 on host-0",
                     "for 120 s"]),
    (0, 0.0, NEVER, ["has 0 bytes for rank 0 on host-0, and rank 1 on host-1 wrote ", "for 120 s"]),
])
def test_what_stays_unseen_ends_in_a_message_with_the_path_and_the_ranks(rank: int, names: float, sizes: float,
                                                                        words: list[str]) -> None:
    hosts = Hosts(2, nocto=True)

    def program(manager: Told, me: int) -> None:
        hosts.delay(rank, names, sizes)
        one(manager, me)

    run = hosts.job(program)
    assert hosts.told == [{ABORTED}] and {type(error) for error in run.errors.values()} == {SaveError}
    for error in run.errors.values():
        assert all(word in str(error) for word in words), error
    assert hosts.standing == []


def test_an_old_size_is_asked_for_anew_where_opening_a_file_does_that() -> None:
    """NFS with its defaults: it would take until the attribute cache expires, which is a minute for each save."""
    hosts = Hosts(2)

    def program(manager: Told, rank: int) -> None:
        hosts.delay(rank, 0.0, NEVER)
        one(manager, rank)

    run = hosts.job(program)
    assert not run.errors and hosts.told == [{COMMITTED}] and run.seconds < 5 and hosts.clients[0].met


@pytest.mark.parametrize("names, seen", [(LATE, "absent"), (LATE, "file"), (NEVER, "absent"), (NEVER, "file")])
def test_a_directory_that_exists_and_is_none_is_looked_at_again(names: float, seen: str) -> None:
    """EEXIST from the server, then "no such file", or a file by its name and "not a directory" below it."""
    hosts = Hosts(3)
    late: list[int] = []

    def program(manager: Told, rank: int) -> None:
        with manager.saving(1) as files:
            hosts.delay(rank, names, 0.0, seen)
            late.append(rank)
            while len(late) < 3:  # one comes first, and the two others are not shown what it made
                manager._seams.runtime.sleep(0.01)
            with files.below("deep/er").writer("data.bin") as out:
                out.write(bytes_of(rank, 1))
            hosts.delay(rank)

    run = hosts.job(program)
    if names == LATE:
        assert not run.errors and hosts.standing == ["step-1"] and run.seconds >= LATE
        return
    assert hosts.standing == [] and {type(error) for error in run.errors.values()} == {SaveError}
    words = ("/deep", "another host made it, and 120 s later this one does not see a directory there", "rank ")
    assert all(word in str(error) for error in run.errors.values() for word in words), run.errors


@pytest.mark.parametrize("writers", [(0, 1, 2), (1, 2), (2,)])
@pytest.mark.parametrize("late", [LATE, NEVER])
def test_files_that_nobody_claims_are_not_left_out_because_rank_0_does_not_see_them_yet(writers: tuple[int, ...],
                                                                                        late: float) -> None:
    """A checkpoint without them would be committed, and whole by its marker."""
    hosts = Hosts(3)
    wrote: list[int] = []
    blind: list[int] = []

    def program(manager: Told, rank: int) -> None:
        with manager.saving(1) as files:
            State(bytes_of(rank, 1)).write(files, None)  # type: ignore[arg-type]
            wrote.append(rank)
            while len(wrote) < 3:  # what is acked, every host has seen
                manager._seams.runtime.sleep(0.01)
            hosts.delay(rank, late if rank == 0 else LATE, LATE)
            blind.append(rank)
            while 0 not in blind:
                manager._seams.runtime.sleep(0.01)
            if rank in writers:
                out = hosts.clients[rank].open(f"{files.path}/framework-{rank}.bin")
                out.write(bytes_of(rank, 1))
                out.close()

    run = hosts.job(program)
    if late == NEVER:
        assert {type(error) for error in run.errors.values()} == {SaveError} and hosts.standing == []
        words = ("framework-", "is not seen by rank 0 on host-0")
        assert all(word in str(error) for error in run.errors.values() for word in words), run.errors
        return
    assert not run.errors and hosts.standing == ["step-1"]
    marker = tree_of(hosts.simulation.files)["step-1/commit.json"].decode()
    for rank in writers:
        assert f"step-1/framework-{rank}.bin" in tree_of(hosts.simulation.files) and f"framework-{rank}.bin" in marker


def test_what_its_own_host_wrote_is_not_waited_for() -> None:
    """A short file of rank 1, on rank 0's host and a network file system: an error at once."""
    simulation = Simulation(2, apart=False, timeouts=TIMES)
    server = Server(simulation.files)

    class Short(State):
        def write(self, files: RankFiles, ranks: Any) -> None:
            super().write(files, ranks)
            if files.rank == 1:
                files.adopt("never.bin", 7, None)
                files._finish_file = lambda relative, claim: faked(files, relative, claim)  # type: ignore[method-assign]

    def faked(files: RankFiles, relative: str, claim: Any) -> Any:
        from distckpt.marker import FileEntry

        return FileEntry(relative, 7, None, files.rank)

    run = simulation.job(lambda manager, rank: manager.save(1, Short(bytes_of(rank, 1))),
                         files=lambda files, rank, runtime: server.client("host-0", runtime))
    assert {type(error) for error in run.errors.values()} == {SaveError} and run.seconds < 5, (run.errors, run.seconds)


def test_resume_looks_again_for_a_commit_that_this_host_is_not_shown() -> None:
    for late, expected in ((LATE, None), (NEVER, ResumeError)):
        hosts = Hosts(2)

        def program(manager: Told, rank: int, late: float = late, hosts: Hosts = hosts) -> Any:
            one(manager, rank)
            with manager.saving(2) as files:
                State(bytes_of(rank, 2)).write(files, None)  # type: ignore[arg-type]
                if rank:
                    hosts.delay(rank, late)
            return manager.resume().step

        run = hosts.job(program)
        if expected is None:
            assert set(run.values.values()) == {2} and not run.errors
        else:
            assert {type(error) for error in run.errors.values()} == {expected}
            assert all("rank 1" in str(e) and "on host-1, and that for 120 s" in str(e) and "step-2" in str(e)
                       for e in run.errors.values()), run.errors


def test_a_file_that_stays_unseen_rejects_only_after_the_deadline_and_all_of_them_share_one() -> None:
    hosts = Hosts(2)

    def program(manager: Told, rank: int) -> Any:
        for step in (1, 2):
            with manager.saving(step) as files:
                for name in ("a.bin", "b.bin", "c.bin"):
                    with files.writer(name) as out:
                        out.write(bytes_of(rank, step))
        if rank == 1:
            for name in ("a", "b", "c"):
                hosts.simulation.files.unlink(f"{ROOT}/step-2/{name}.rank-00001-of-00002.bin")
        return manager.resume().step

    run = hosts.job(program)
    assert set(run.values.values()) == {1} and 120 <= run.seconds < 130, (run.values, run.errors, run.seconds)


@pytest.mark.parametrize("names", [5.0, LATE - 10])
def test_the_next_job_on_another_host_neither_forks_the_run_nor_goes_back(names: float) -> None:
    """Its listings are from before the first job: it claims by what the server says, waits for the newest commit, resumes it."""
    hosts = Hosts(1)

    def first(manager: Told, rank: int) -> None:
        for step in (1, 2, 3):
            manager.save(step, State(bytes_of(rank, step)))

    def next_job(me: Beside) -> Any:
        me.runtime.sleep(300.0)  # the first job is over; what this host knows of it is as old as ``names`` says
        server = hosts.server
        now = me.runtime.monotonic()
        for path, change in server.names.items():
            if path.startswith(ROOT + "/") and not path.endswith(("/latest", "/.distckpt", "root.json")):
                change.when = now - 1.0
        assert isinstance(me.files, StaleFiles)
        me.files.name_delay = names
        with me.manager() as manager:
            step = manager.resume().step
            manager.save(4, State(b"on another host"))
            assert manager._owned is not None
            return step, manager._owned.generation, manager._owned.highest_seq

    run = hosts.job(first, beside={"next": next_job})
    assert run.values[1] == (3, 2, 4), (run.values, run.errors)
    assert hosts.clients[1].met


def test_S22_a_lease_that_shows_up_a_minute_late_is_not_overlooked() -> None:
    hosts = Hosts(1)
    hosts.simulation.options["keep_last"] = 1
    held: list[bool] = []

    def program(manager: Told, rank: int) -> None:
        one(manager, rank)
        held.append(False)
        while not held[0]:
            manager._seams.runtime.sleep(0.5)
        hosts.delay(0, 60.0)
        manager.save(2, State(bytes_of(rank, 2)))
        manager._seams.runtime.sleep(200.0)

    def reader(me: Beside) -> list[Any]:
        while not held:
            me.runtime.sleep(0.5)
        root = me.root()
        found = root.latest()
        assert found is not None
        with root.lease(found, "evaluation", ttl=None) as lease:
            held[0] = True
            me.runtime.sleep(190.0)
            lease.check()
            return root.verify(found)

    run = hosts.job(program, beside={"reader": reader})
    assert run.values[1] == [] and not run.errors, run.errors


@pytest.mark.parametrize("rank, op, part", [
    (1, "scan", "/.distckpt/staging"), (1, "read", "/nonce"), (0, "scan", "/step-1"),
    (0, "stat", "/data.rank-00001-of-00002.bin"), (1, "scan", ROOT), (1, "read", "/step-3/commit.json"),
    (1, "stat", f"{ROOT}/step-3/deep/data.rank-00001"),
])
def test_ESTALE_at_any_look_is_looked_at_again(rank: int, op: str, part: str) -> None:
    """At the n-th look at what another host wrote, n = 1, 2, 3 ... until none is left: all commit, all resume."""

    def program(manager: Told, rank: int) -> Any:
        for step in (1, 2, 3):
            manager.save(step, State(bytes_of(rank, step), "deep"))
        return manager.resume().step

    for at in range(1, 100):
        fault = faults.fail(errno.ESTALE, at, op=op, path=part)
        hosts = Hosts(2)
        run = hosts.job(program, file_faults={rank: [fault]})
        if not fault.fired:
            break
        assert not run.errors and set(run.values.values()) == {3}, (at, run.errors)
        assert hosts.told == [{COMMITTED}] * 3, (at, hosts.told)
    assert at > 1


@pytest.mark.parametrize("op, part", [
    ("scan", "/.distckpt/owner"), ("stat", "/.distckpt/owner/"), ("read", "/.distckpt/owner/"), ("scan", "/.distckpt/staging"),
    ("scan", "/.distckpt/trash"), ("read", "/.distckpt/root.json"), ("scan", ROOT), ("read", "/commit.json"),
    ("stat", "/data.rank-0000")])
def test_ESTALE_that_lasts_delays_a_claim_and_its_recovery(op: str, part: str) -> None:
    """From the n-th look at it on, n = 1, 2, 3 ..., for longer than a few looks at once. The first job was killed with a commit
    that it had not published; the second one publishes that, and saves."""
    for at in range(1, 100):
        hosts = Hosts(2, seed=at)
        killed = faults.die(op="rename", path=lambda path: path == f"{ROOT}/step-2")
        hosts.job(lambda manager, rank: [manager.save(step, State(bytes_of(rank, step))) for step in (1, 2)],
                  file_faults={0: [killed]})
        assert killed.fired
        stale, claimed = faults.fail(errno.ESTALE, at, op=op, forever=True), list[int]()

        def still(path: str, stale: faults.Fault = stale, claimed: list[int] = claimed) -> bool:
            here = path == ROOT if part == ROOT else part in path and "/probe-" not in path
            return here and stale.fired < 15 and not claimed

        def program(manager: Told, rank: int, claimed: list[int] = claimed) -> None:
            claimed.append(rank)
            manager.save(3, State(bytes_of(rank, 3)))

        stale.path = still
        run = hosts.job(program, file_faults={0: [stale]})
        if not stale.fired:
            break
        assert not run.errors and hosts.standing[-2:] == ["step-2", "step-3"], (at, run.errors)
    assert at > 1


def test_ESTALE_for_good_is_no_proof_that_anything_is_gone() -> None:
    hosts = Hosts(2)
    fault = faults.fail(errno.ESTALE, op="stat", path=f"{ROOT}/step-1/data.rank-00001", forever=True)
    run = hosts.job(lambda manager, rank: (one(manager, rank), manager.resume()), file_faults={1: [fault]})
    assert {type(error) for error in run.errors.values()} == {ResumeError}
    assert all("rank 1" in str(e) and "cannot tell whether step-1 is whole: data.rank-00001-of-00002.bin" in str(e)
               and "Stale file handle on host-1, and that for 120 s" in str(e) for e in run.errors.values()), run.errors


@pytest.mark.parametrize("saving", [False, True], ids=["nonce", "staging"])
def test_an_error_that_cannot_pass_is_told_at_once_and_as_what_it_is(saving: bool) -> None:
    armed = [not saving]

    def program(manager: Told, rank: int) -> None:
        armed[0] = True
        manager.save(1, State(bytes_of(rank, 1)))

    fault = faults.fail(errno.EIO, op="scan", path=lambda path: armed[0] and "/staging/1" in path, forever=True)
    run = Hosts().job(program, file_faults={1: [fault]})
    assert {type(error) for error in run.errors.values()} == {SaveError if saving else ConfigError} and run.seconds < LATE / 2
    for error in run.errors.values():
        assert "Input/output error" in str(error) and "rank 1" in str(error) and "not visible" not in str(error)
        assert saving or "cannot read it" in str(error)
