"""Storage domains in the simulation: every node has a disk of its own, and what stands on all of them is what there is.

S1 and S10 of DESIGN section 12, and what ``storage="node-local"`` promises besides. The kills walk every operation of the second
committer around a save; power goes on one node only as well. The mutants at the end show that the rules can fail.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from distckpt import owned, recovery
from distckpt.domains import opening, parts, retire
from distckpt.domains.standing import Abroad
from distckpt.durable import Access, Files, Item
from distckpt.errors import ConfigError, NoUsableCheckpoint, ResumeError, StepNotFound
from distckpt.layout import Layout
from distckpt.saving import commit
from distckpt.testing import checker, faults
from distckpt.testing.checker import COMMITTED, UNKNOWN
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.simnodes import Nodes, attempts
from distckpt.testing.simruntime import SimRuntime
from distckpt.testing.simulation import ROOT, Run, Simulation, State, Told, tree_of
from scripts.proof.cases import Case
from scripts.proof.scenarios import bytes_of
from tests.proof.stories import all_well, block, failing, saves, well

LAYOUT = Layout.at(ROOT)


def judged(faults: Iterable[str], scenario: str = "local", world: int = 2, seed: int = 3) -> list[Run]:
    return all_well(Case(scenario, world, seed, (fault,)) for fault in faults)


def save_of(step: int, scenario: str = "local", world: int = 2, rank: int = 1, seed: int = 3) -> range:
    """The operations of ``rank`` from its directory for ``step`` on, to the next one's."""
    trace = Case(scenario, world, seed).run(traced=True).trace
    mine = [line for line in trace if line.split()[1].startswith(f"1.{rank}/") and line.split()[2] in ("file", "store")]
    began = [number for number, line in enumerate(mine, 1) if " mkdir " in line and "/step-" in line]
    return range([*began, len(mine)][step - 1], [*began, len(mine)][step])


# -- S10: who is on one disk -------------------------------------------------------------------------------------------


def test_S10_ranks_that_turn_out_to_share_a_disk_have_one_committer() -> None:
    simulation = Simulation(2, storage="node-local", apart=True)
    run = well(simulation.job(saves(1, 2)))
    assert run.errors == {} and len(run.managers) == 2
    assert all(manager._start.domains is None for manager in run.managers.values())
    assert not [item.name for item in simulation.files.scan(LAYOUT.home()) if item.name.startswith("probe-")]
    well(simulation.restart())


def test_S10_a_probe_is_durable_before_a_rank_says_that_it_is_there() -> None:
    trace = Nodes(2, traced=True).job(saves(1)).trace
    for rank in (0, 1):
        mine = [line for line in trace if line.split()[1].startswith(f"1.{rank}/")]
        written = next(at for at, line in enumerate(mine) if " close " in line and "/probe-" in line)
        told = next(at for at, line in enumerate(mine) if at > written and f"/report/{rank}" in line)
        assert any(" fsync_dir " in line and "/probe-" in line for line in mine[written:told])


def test_S10_a_rank_that_cannot_look_for_probes_ends_the_start_on_all() -> None:
    """An error is no proof that nobody else is on its disk: it must not become a second committer."""
    nodes = Nodes(2, nodes=1)
    fault = faults.fail(errno.EIO, op="scan", path=lambda path: "/probe-" in path, forever=True)
    run = nodes.job(saves(1), file_faults={1: [fault]})
    assert {type(error) for error in run.errors.values()} == {ConfigError} and len(run.errors) == 2
    assert "rank 1 on host-0 cannot read it" in str(run.errors[0])


class Late(Files):
    """One rank's view of a network disk, on which other ranks' probes show up ``seconds`` late."""

    def __init__(self, disk: Files, rank: int, runtime: SimRuntime, seconds: float) -> None:
        self._disk, self._rank, self._runtime, self._seconds = disk, rank, runtime, seconds
        self._since: float | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in ("scan", "_disk", "_rank", "_runtime", "_seconds", "_since"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_disk"), name)

    def scan(self, path: str) -> list[Item]:
        found = self._disk.scan(path)
        if "/probe-" not in path:
            return found
        now = self._runtime.monotonic()
        self._since = now if self._since is None else self._since
        return found if now - self._since >= self._seconds else [item for item in found if item.name == str(self._rank)]


@pytest.mark.parametrize("hidden, seconds", [((1,), 40.0), ((1,), 1e6), ((0, 1), 60.0)])
def test_S10_a_probe_that_shows_up_late_makes_no_second_committer(hidden: tuple[int, ...], seconds: float) -> None:
    """Absence counts only after 90 s of looking, and one sight in either direction joins two ranks."""
    def disk() -> CrashFiles:
        found = CrashFiles("/disk")
        found.network = True
        return found

    def view(files: Files, rank: int, runtime: SimRuntime) -> Files:
        return Late(files, rank, runtime, seconds) if rank in hidden else files

    simulation = Simulation(2, storage="node-local", apart=True, disk=disk)
    run = well(simulation.job(saves(1), files=view))
    assert run.errors == {} and len(run.managers) == 2
    assert all(manager._start.domains is None for manager in run.managers.values())


def test_an_error_that_made_no_difference_is_not_blamed_for_the_seconds_that_a_start_looks_for_probes() -> None:
    """A seed: the reply of a ``mkdir`` is lost, the directory is there, and the job goes well."""
    (run,) = judged(["lost:1@7:EIO"], world=3, seed=1581)
    assert run.errors == {} and run.struck and 2.0 <= run.seconds < 3.0


def test_shared_storage_that_is_not_there_is_named_by_host_and_ranks() -> None:
    run = Nodes(4, nodes=2, storage="shared").job(saves(1))
    assert {type(error) for error in run.errors.values()} == {ConfigError}
    text = str(run.errors[3])
    assert "rank 2 on host-2 does not see what rank 0 wrote there" in text
    assert "Fine on: host-0 (ranks 0-1, on /); on another storage: host-2 (ranks 2-3, on /)" in text
    assert "storage='node-local'" in text


class Open(Files):
    """A disk on which every user may write in the root, once it is there."""

    def __init__(self, disk: Files) -> None:
        self._disk = disk

    def __getattribute__(self, name: str) -> Any:
        own = ("access", "_disk")
        return object.__getattribute__(self, name) if name in own else getattr(object.__getattribute__(self, "_disk"), name)

    def access(self, path: str) -> Access:
        self._disk.scan(path)
        return Access(0, 0, 0o777)


@pytest.mark.parametrize("there", [True, False], ids=["there", "made"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_root_that_is_shared_on_one_node_is_refused_on_all(rank: int, there: bool) -> None:
    """A root that is there is refused before anything is made in it; one that was made just now, before anybody owns it."""
    nodes = Nodes(2)
    for disk in nodes.nodes:
        if there:
            disk.mkdir(ROOT)
    run = nodes.job(saves(1), files=lambda files, me, runtime: Open(files) if me == rank else files)
    assert {type(error) for error in run.errors.values()} == {ConfigError} and len(run.errors) == 2
    assert f"rank {rank} on host-{rank} finds that root {ROOT} is shared: every user may write in it" in str(run.errors[1 - rank])
    made = [path for path in nodes.nodes[rank].snapshot() if path.startswith(f"{ROOT}/")]
    assert made == [] if there else not [path for path in made if "/owner/" in path]
    well(nodes.job(saves(1)))


# -- what cannot be used ------------------------------------------------------------------------------------------------


def emptied(nodes: Nodes, number: int) -> None:
    nodes.nodes[number] = CrashFiles("/disk")


@pytest.mark.parametrize("number", [0, 1])
def test_a_replaced_node_is_named_and_never_a_fresh_start(number: int) -> None:
    nodes = Nodes(2)
    well(nodes.job(saves(1, 2, 3)))
    emptied(nodes, number)
    run = nodes.job(lambda manager, rank: manager.resume())
    for error in run.errors.values():
        assert isinstance(error, NoUsableCheckpoint)
        assert f"host-{number} holds no checkpoint of this run, and host-{1 - number} has 2, the newest of step 3" in str(error)
    assert len(run.errors) == 2

    def over(manager: Told, rank: int) -> Any:
        assert manager.resume(allow_fresh=True).checkpoint is None
        manager.save(3, State(b"again"))
        found = manager.resume().checkpoint
        return (found.step, found.seq) if found is not None else None

    again = nodes.job(over)
    assert again.errors == {} and set(again.values.values()) == {(3, 4)}, "a seq is given once, whichever node remembers it (S11)"


def test_an_explicit_step_that_one_node_lacks_is_not_found() -> None:
    nodes = Nodes(2)
    well(nodes.job(saves(1, 2)))
    emptied(nodes, 1)
    run = nodes.job(lambda manager, rank: manager.resume(step=2))
    assert {type(error) for error in run.errors.values()} == {StepNotFound}


def test_a_checkpoint_that_one_node_lost_is_passed_over_for_an_older_one() -> None:
    nodes = Nodes(2, keep=3)
    well(nodes.job(saves(1, 2, 3)))
    nodes.nodes[1].rename(LAYOUT.final("step-3"), "/disk/lost")
    run = nodes.job(lambda manager, rank: (manager.resume().step, manager.resume().skipped))
    assert run.errors == {}
    for step, skipped in run.values.values():
        assert step == 2 and "it stands on host-0 (rank 0) and not on host-1 (rank 1)" in skipped["step-3"]


def test_a_checkpoint_that_one_node_finds_bad_is_passed_over_by_all() -> None:
    nodes = Nodes(2, keep=3)
    well(nodes.job(saves(1, 2, 3)))
    nodes.nodes[1].overwrite(f"{LAYOUT.final('step-3')}/{State().path(1, 2)}", b"x")
    run = nodes.job(lambda manager, rank: manager.resume(verify="digest").step)
    assert run.errors == {} and set(run.values.values()) == {2}


def test_what_verify_rejected_on_one_node_is_passed_over_by_all() -> None:
    nodes = Nodes(2, keep=3)
    well(nodes.job(saves(1, 2)))
    attempt = attempts(tree_of(nodes.nodes[1]))["step-2"]
    nodes.nodes[1].overwrite(LAYOUT.rejected(attempt), b'{"reason": "a bit flipped"}')
    run = nodes.job(lambda manager, rank: (manager.resume().step, manager.resume().skipped["step-2"]))
    assert run.errors == {} and {step for step, _ in run.values.values()} == {1}
    assert "on host-1 (rank 1) it was rejected: a bit flipped" in run.values[0][1]


def test_a_step_that_is_there_is_skipped_on_every_node_and_nothing_of_it_stays() -> None:
    nodes = Nodes(2)

    def program(manager: Told, rank: int) -> list[bool]:
        seen = [manager.save(1, State(bytes_of(rank, 1)), on_exists="skip").skipped for _ in range(2)]
        return [*seen, block(manager, 1, b"thrown away"), block(manager, 2, b"kept")]

    run = well(nodes.job(program))
    assert set(map(str, run.values.values())) == {"[False, True, True, False]"}
    for disk in nodes.nodes:
        assert not [path for path in disk.snapshot() if "/staging/1/" in path and not path.endswith(".tmp")]


def test_S19_the_store_stays_as_large_as_it_was() -> None:
    few, many = (Nodes(3, nodes=3).job(saves(*range(1, count))) for count in (4, 12))
    assert few.errors == many.errors == {} and few.keys == many.keys


def test_nodes_in_another_order_are_an_error_that_says_where_the_files_are() -> None:
    nodes = Nodes(4)
    well(nodes.job(saves(1, 2)))
    nodes.nodes.reverse()
    run = nodes.job(lambda manager, rank: manager.resume())
    assert {type(error) for error in run.errors.values()} == {ResumeError}
    text = str(run.errors[0])
    assert "rank 0 runs on host-0 and wrote on host-0" in text and "has the files of ranks 2-3" in text


def test_a_probe_that_a_crash_left_goes_at_the_next_start() -> None:
    nodes = Nodes(2)
    well(nodes.job(saves(1)))
    nodes.nodes[1].mkdir(LAYOUT.home("probe-00"))
    nodes.nodes[1].append(LAYOUT.home("probe-00", "1"), b"distckpt")
    well(nodes.job(saves(2)))
    assert not [item.name for disk in nodes.nodes for item in disk.scan(LAYOUT.home()) if item.name.startswith("probe-")]


def test_nodes_of_two_runs_are_refused() -> None:
    one, other = Nodes(2), Nodes(2, seed=9)
    well(one.job(saves(1)))
    well(other.job(saves(1)))
    one.nodes[1] = other.nodes[1]
    run = one.job(saves(2))
    assert {type(error) for error in run.errors.values()} == {ConfigError}
    assert "the nodes' roots are not of one run: 'run-" in str(run.errors[0]) and "on host-1 (rank 1)" in str(run.errors[0])


def test_S7_a_job_killed_in_its_first_save_starts_fresh() -> None:
    """The shares that were prepared and never published leave no trace that would forbid it."""
    trace = Case("local", 2, 3).run(traced=True).trace
    mine = [line for line in trace if line.split()[1].startswith("1.1/") and line.split()[2] in ("file", "store")]
    at = next(number for number, line in enumerate(mine, 1) if "write" in line and "commit.json" in line)
    for later in range(at + 1, at + 8):
        nodes = Nodes(2, seed=3)
        nodes.job(saves(1), [f"kill:1@{later}"])
        well(nodes.restart())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_committer_that_waits_for_an_owner_it_cannot_judge_is_waited_for(rank: int) -> None:
    """Seed 6335 of local-replacing-nfs: a power cut left the record of an owner torn, which is watched for 90 s. Rank 0 was given
    up on after the deadline for coming, though it said all the while what it was at."""
    nodes = Nodes(2)
    well(nodes.job(saves(1)))
    for name in ("json", "released"):
        nodes.nodes[rank].unlink(LAYOUT.owner(1, name))
    nodes.nodes[rank].append(LAYOUT.owner(1), b"{")
    run = well(nodes.job(saves(2)))
    assert run.errors == {} and run.seconds > 90


# -- one node alone ------------------------------------------------------------------------------------------------------


def test_who_opens_one_nodes_root_alone_neither_publishes_nor_sweeps_nor_counts_shares() -> None:
    """``distckpt gc`` on a node between two jobs, above all."""
    nodes = Nodes(2)
    nodes.job(saves(1, 2), **failing(1, "rename", "/step-2"))

    def nothing(manager: Told, rank: int) -> Any:
        assert manager._owned is not None
        return [dict(manager._owned.in_doubt), len(manager._owned.live)]

    alone = Simulation(1, storage="shared")
    alone.files = nodes.nodes[1]
    run = alone.job(nothing)
    doubts, live = run.values[0]
    assert len(doubts) == 1 and "share 2 of 2" in next(iter(doubts.values())) and live == 1
    refused = alone.job(lambda manager, rank: manager.resume())
    assert isinstance(refused.errors[0], NoUsableCheckpoint) and "storage='node-local'" in str(refused.errors[0])
    again = nodes.job(lambda manager, rank: manager.resume().step)
    assert again.errors == {} and set(again.values.values()) == {2}


# -- S1 ----------------------------------------------------------------------------------------------------------------


def test_S1_the_second_committer_is_killed_at_every_operation_of_a_save() -> None:
    """Whatever rank 0 told or rotated by then, what stands in one domain stands in both after the next start."""
    runs = judged(f"kill:1@{at}" for at in save_of(3))
    told = {verdict for run in runs for save in run.saves for rank, verdict in save.told.items() if rank == 0}
    assert {COMMITTED, UNKNOWN} <= told


def test_S1_rank_0_is_killed_at_every_operation_of_a_save() -> None:
    judged(f"kill:0@{at}" for at in save_of(3, rank=0)[::2])


def test_S1_one_node_loses_its_power() -> None:
    judged(f"node:{rank}@{at}" for rank in (0, 1) for at in save_of(3, rank=rank)[rank::4])


def test_S1_with_three_domains_and_with_two_ranks_in_one() -> None:
    judged((f"kill:2@{at}" for at in save_of(3, "local-3", 3, 2)[::4]), "local-3", 3)
    judged((f"{kind}:{rank}@{at}" for kind in ("kill", "node") for rank in (1, 2) for at in range(100, 230, 19)), "local", 3)


@pytest.mark.parametrize("scenario, kinds, stride", [
    ("local", ("stop", "slow", "fail", "lost"), 37), ("local-background", ("kill", "fail", "stop"), 41),
    ("local-replacing", ("kill", "fail"), 29), ("local-replacing-nfs", ("kill", "node"), 37),
    ("local-framework", ("kill", "fail"), 53), ("local-leaving", ("kill",), 41)])
def test_faults_at_many_operations(scenario: str, kinds: tuple[str, ...], stride: int) -> None:
    top = Case(scenario, 2, 5).run().operations
    value = {"slow": ":0.5", "fail": ":EIO", "lost": ":EIO"}
    judged((f"{kind}:{rank}@{at}{value.get(kind, '')}" for kind in kinds for rank in (0, 1)
            for at in range(rank + 2, top[rank], stride)), scenario, seed=5)


def test_the_whole_machine_loses_its_power() -> None:
    judged(f"power@{at}" for at in range(11, Case("local", 2, 3).run().total, 43))


# -- the rules can fail --------------------------------------------------------------------------------------------------


def red(faults: Iterable[str], scenario: str = "local") -> bool:
    return any(Case(scenario, 2, 3, (fault,)).run().violations for fault in faults)


def _by_own_view(monkeypatch: pytest.MonkeyPatch) -> None:
    orig = recovery.recover
    monkeypatch.setattr(recovery, "recover", lambda files, layout, naming, generation, decided=None: orig(
        files, layout, naming, generation,
        None if decided is None else [item.name for item in files.scan(layout.staging(generation))]))


def _never_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    orig = recovery.recover
    monkeypatch.setattr(recovery, "recover", lambda files, layout, naming, generation, decided=None: orig(
        files, layout, naming, generation, None if decided is None else []))


def _without_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.Parts, "_unprepared", lambda self, keys: None)


def _without_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.Parts, "_finish", lambda self, go, keys: None)


def _marker_not_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    from distckpt import marker

    orig = commit.prepare

    def prepare(one: owned.OwnedRoot, found: marker.Marker) -> Any:
        if found.head.part == 0:
            return orig(one, found)
        out = one.files.open(f"{commit.staging_of(one, found)}/commit.json")
        out.write(marker.build(found))
        return out.close()

    monkeypatch.setattr(commit, "prepare", prepare)


def _rotate_on_one_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    orig = retire.carry_out
    monkeypatch.setattr(retire, "carry_out", lambda one, series, policy, plan: orig(one, series, policy, plan) if (
        one.runtime.identity().host == "host-0") else None)


@pytest.mark.parametrize("break_it, fault", [
    (_never_forward, "kill:0"), (_by_own_view, "kill:0"), (_without_prepared, "kill:1"), (_without_done, "kill:1"),
    (_marker_not_durable, "node:1"), (_rotate_on_one_node_only, "slow:1")])
def test_a_broken_order_is_seen(break_it: Callable[[pytest.MonkeyPatch], None], fault: str,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    points = [*save_of(1, rank=int(fault[-1])), *save_of(3, rank=int(fault[-1]))]
    break_it(monkeypatch)
    assert red(f"{fault}@{at}" for at in points)


def test_without_the_intersection_a_lost_share_is_resumed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "partial", lambda domains, holds: ({}, Abroad()))
    nodes = Nodes(2, keep=3)
    well(nodes.job(saves(1, 2, 3)))
    nodes.nodes[1].rename(LAYOUT.final("step-3"), "/disk/lost")
    run = nodes.job(lambda manager, rank: manager.resume().step)
    assert set(run.values.values()) != {2}


def test_the_merged_tree_has_what_every_disk_has() -> None:
    nodes = Nodes(2)
    well(nodes.job(saves(1, 2)))
    assert sorted(checker.standing(nodes.tree())) == ["step-1", "step-2"]
    nodes.nodes[1].rename(LAYOUT.final("step-2"), "/disk/lost")
    assert sorted(checker.standing(nodes.tree())) == ["step-1"]


def test_a_start_that_one_node_cannot_finish_gives_the_root_of_the_other_back() -> None:
    """It was recovered there by then; who tries again in the same process, or elsewhere, must not meet its ghost."""
    nodes = Nodes(2)
    run = nodes.job(saves(1), **failing(1, "rename", "root.json"))
    assert len(run.errors) == 2 and all("cannot be recovered" in str(error) for error in run.errors.values()), run.errors
    assert [LAYOUT.owner(1, "released") in disk.snapshot() for disk in nodes.nodes] == [True, True]
