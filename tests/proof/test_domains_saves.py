"""One save on several storage domains, in the simulation: one decision for all of them, what each may keep, and what goes.

How it starts, what can be used and the kills of S1 are in ``test_domains``.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from distckpt import owned
from distckpt.errors import DiskFull, SaveError
from distckpt.layout import Layout
from distckpt.saving import commit
from distckpt.testing import faults
from distckpt.testing.checker import ABORTED, COMMITTED
from distckpt.testing.scheduler import Task
from distckpt.testing.simnodes import Nodes
from distckpt.testing.simulation import ROOT, Simulation, State, Told
from scripts.proof.scenarios import bytes_of
from tests.proof.stories import block, failing, saves, standing, well

LAYOUT = Layout.at(ROOT)


# -- one decision ------------------------------------------------------------------------------------------------------


def noted(simulation: Simulation) -> list[str]:
    """What became of the attempts of the first step, as rank 0 has noted it for people."""
    disk = simulation.nodes[0] if isinstance(simulation, Nodes) else simulation.files
    events = [json.loads(line) for line in disk.read(f"{LAYOUT.home('journal')}/1.jsonl", 1 << 20).splitlines()]
    return [event["event"] for event in events if event["event"] in ("committed", "aborted", "unknown") and event["step"] == 1]


def test_a_directory_that_one_node_cannot_make_ends_the_attempt_for_all_at_once() -> None:
    nodes = Nodes(3)
    run = nodes.job(saves(1, 2), **failing(2, "mkdir", "/step-2"))
    assert {type(error) for error in run.errors.values()} == {SaveError} and run.seconds < 6
    assert [save.told for save in nodes.saves] == [dict.fromkeys(range(3), verdict) for verdict in (COMMITTED, ABORTED)]
    assert "rank 2 on host-2" in str(run.errors[0])
    well(nodes.restart())


@pytest.mark.parametrize("rank, op, part", [(1, "open", "step-2/commit.json"), (0, "open", "step-2/commit.json"),
                                            (0, "rename", "/run/step-2")])
def test_a_domain_that_cannot_commit_ends_it_for_all_and_no_marker_stays(rank: int, op: str, part: str) -> None:
    """S3: what was prepared elsewhere takes its marker back before the abort is told."""
    nodes = Nodes(3, nodes=3)
    run = nodes.job(saves(1, 2), **failing(rank, op, part))
    assert [set(save.told.values()) for save in nodes.saves] == [{COMMITTED}, {ABORTED}] and run.seconds < 6
    assert all(f"rank {rank} on host-{rank}" in str(error) for error in run.errors.values())
    assert standing(nodes) == [["step-1"]] * 3
    assert not [path for disk in nodes.nodes for path in disk.snapshot() if "/staging/" in path and path.endswith("commit.json")]
    well(nodes.restart())


def test_rank_0_that_fails_in_a_way_nobody_thought_of_strands_no_committer(monkeypatch: pytest.MonkeyPatch) -> None:
    orig = commit.publish

    def publish(one: owned.OwnedRoot, *more: Any, **options: Any) -> Any:
        if one.runtime.identity().host == "host-0":
            raise KeyError("a fault of ours")
        return orig(one, *more, **options)

    monkeypatch.setattr(commit, "publish", publish)
    nodes = Nodes(2)
    run = nodes.job(saves(1))
    assert len(run.errors) == 2 and run.seconds < 6
    monkeypatch.undo()
    well(nodes.restart())


def test_a_rank_0_that_goes_on_after_a_fault_nobody_thought_of_keeps_no_committer_waiting(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives and its heart beats: who waited for its turn in that save would wait on, and miss the next one."""
    orig, broken = commit.publish, [True]

    def publish(one: owned.OwnedRoot, *more: Any, **options: Any) -> Any:
        if one.runtime.identity().host == "host-0" and broken:
            broken.clear()
            raise KeyError("a fault of ours")
        return orig(one, *more, **options)

    monkeypatch.setattr(commit, "publish", publish)
    nodes = Nodes(2)

    def program(manager: Told, rank: int) -> None:
        with pytest.raises((KeyError, SaveError)):
            manager.save(1, State(bytes_of(rank, 1)))
        assert rank != 0 or noted(nodes) == ["unknown"]
        manager.save(2, State(bytes_of(rank, 2)))

    run = nodes.job(program)
    assert run.errors == {} and run.seconds < 6
    well(nodes.restart())


def test_S7_a_dead_share_goes_to_trash_without_its_marker() -> None:
    """It could not be taken back when the attempt was aborted; in trash it would pass for a checkpoint that once was."""
    nodes, seen = Nodes(2), list[bool]()

    def look(operation: Any) -> None:
        paths = nodes.nodes[1].snapshot()
        seen.append(any("/.distckpt/staging/" in path and path.endswith("/step-1/commit.json") for path in paths))

    def program(manager: Told, rank: int) -> None:
        with pytest.raises(SaveError):
            manager.save(1, State(bytes_of(rank, 1)))
        manager.save(2, State(bytes_of(rank, 2)))

    run = nodes.job(program, file_faults={
        0: [faults.fail(errno.EIO, op="rename", path=lambda path: path.endswith("/run/step-1"))],
        1: [faults.fail(errno.EIO, op="unlink", path=lambda path: path.endswith("/step-1/commit.json")),
            faults.call(look, op="rename", path=lambda path: "/trash/" in path)]})
    assert run.errors == {} and seen == [False]


def test_S7_what_rank_0_prepared_is_taken_back_before_it_goes_to_trash() -> None:
    nodes, seen = Nodes(2), list[bool]()

    def look(operation: Any) -> None:
        seen.append(any("/staging/" in path and path.endswith("/step-1/commit.json") for path in nodes.nodes[0].snapshot()))

    def program(manager: Told, rank: int) -> None:
        with pytest.raises(SaveError):
            manager.save(1, State(bytes_of(rank, 1)))

    run = nodes.job(program, file_faults={
        0: [faults.call(look, op="rename", path=lambda path: re.search(r"/trash/1/[0-9a-f]{16}$", path) is not None)],
        1: [faults.fail(errno.EIO, op="open", path=lambda path: path.endswith("/step-1/commit.json"))]})
    assert run.errors == {} and seen == [False]


def test_S7_a_dead_share_in_trash_has_no_marker_after_a_power_cut_either() -> None:
    """That it is gone is durable before the share moves: else the first job of a root could not start again."""
    def program(manager: Told, rank: int) -> None:
        with pytest.raises(SaveError):
            manager.save(1, State(bytes_of(rank, 1)))
        manager.save(2, State(bytes_of(rank, 2)))

    def dead_share() -> dict[str, Any]:
        """Of the first save, which rank 0 cannot publish and rank 1 cannot take back."""
        return {"file_faults": {
            0: [faults.fail(errno.EIO, op="rename", path=lambda path: path.endswith("/run/step-1"))],
            1: [faults.fail(errno.EIO, op="unlink", path=lambda path: path.endswith("/step-1/commit.json"))]}}

    trace = Nodes(2, traced=True).job(program, **dead_share()).trace
    mine = [line for line in trace if line.split()[1].startswith("1.1/") and line.split()[2] in ("file", "store")]
    moved = next(number for number, line in enumerate(mine, 1) if re.search(r" rename .*/staging/1/[0-9a-f]{16}$", line.strip()))
    cut = Nodes(2)
    cut.job(program, [f"node:1@{moved + 1}"], **dead_share())
    disks = list(cut.nodes[1].crash_states(200, 1))
    assert any("/trash/" in path for disk in disks for path in disk.snapshot() if path.endswith("/step-1"))
    for disk in disks:
        for path in disk.snapshot():
            assert not ("/.distckpt/trash/" in path and path.endswith("commit.json")), path


@pytest.mark.parametrize("rank", [0, 1])
def test_S21_what_a_rank_writes_is_live_on_its_node_until_the_save_has_ended(rank: int) -> None:
    """Managers of one root in one process share its owner: the begin of one must not sweep what the other writes."""
    nodes, seen = Nodes(2), list[bool]()
    managers: dict[int, Any] = {}

    def owner() -> owned.OwnedRoot:
        start = managers[rank]._start
        found: owned.OwnedRoot = start.owned or start.share
        return found

    def look(operation: Any) -> None:
        staged = [item.name for item in nodes.nodes[rank].scan(LAYOUT.staging(1)) if item.kind == "dir"]
        seen.append(bool(staged) and set(staged) <= owner().live)

    def left(me: int) -> bool:
        """Nobody works on anything here, and nothing is left of it."""
        return me != rank or not owner().live and not [i for i in nodes.nodes[rank].scan(LAYOUT.staging(1)) if i.kind == "dir"]

    def program(manager: Told, me: int) -> None:
        managers[me] = manager
        manager.save(1, State(bytes_of(me, 1)))
        assert left(me)
        with pytest.raises(SaveError):
            manager.save(2, State(bytes_of(me, 2)))
        assert left(me)
        assert block(manager, 1, b"thrown away")
        assert left(me)

    run = nodes.job(program, file_faults={
        rank: [faults.call(look, op="fsync", path=lambda path: path.endswith(".bin")),
               faults.call(look, op="rename", path=lambda path: path.endswith("/run/step-1")),
               faults.fail(errno.EIO, op="write", path=lambda path: "/step-2/data" in path)]})
    assert run.errors == {} and seen == [True, True]


@pytest.mark.parametrize("make", [lambda: Nodes(2), lambda: Simulation(2)], ids=["several domains", "one"])
def test_S21_an_attempt_whose_end_is_unknown_is_live_no_more(make: Callable[[], Simulation]) -> None:
    """Else no begin of this process would ever sweep what it left."""
    saving = list[int]()

    def program(manager: Told, rank: int) -> None:
        saving.append(rank)
        with pytest.raises(SaveError) as caught:
            manager.save(1, State(bytes_of(rank, 1)))
        assert caught.value.outcome == "unknown"
        assert rank != 0 or manager._start.owned is not None and manager._start.owned.live == set()

    fault = faults.fail(errno.EIO, op="fsync_dir", path=lambda path: path == ROOT and bool(saving))
    simulation = make()
    assert simulation.job(program, file_faults={0: [fault]}).errors == {}
    assert noted(simulation) == ["unknown"]


def test_S12_a_node_whose_sync_failed_rotates_nothing_until_its_restart() -> None:
    nodes = Nodes(2, keep=2)
    well(nodes.job(saves(1, 2)))
    fault = faults.fail(errno.EIO, op=("fsync", "fsync_file"), path=lambda path: path.endswith("/run/step-2/commit.json"))
    run = nodes.job(saves(3, 4), file_faults={1: [fault]})
    assert run.errors == {}
    assert standing(nodes) == [["step-3", "step-4"], ["step-1", "step-2", "step-3", "step-4"]]
    well(nodes.restart())


def test_a_node_that_owes_its_share_is_unknown_rotates_nothing_and_is_settled_at_the_next_start() -> None:
    nodes = Nodes(2, keep=1)

    def program(manager: Told, rank: int) -> None:
        manager.save(1, State(bytes_of(rank, 1)))
        with pytest.raises(SaveError) as caught:
            manager.save(2, State(bytes_of(rank, 2)))
        assert caught.value.outcome == "unknown" and "rank 1 on host-1" in str(caught.value)
        mine = manager._start.owned or manager._start.share
        assert mine is not None and mine.live == set(), "nobody works on it any more"
        assert not manager.save(2, State(bytes_of(rank, 2, "again: ")), on_exists="skip").skipped, "it is in doubt"
        manager.save(3, State(bytes_of(rank, 3)))

    run = nodes.job(program, **failing(1, "rename", "/step-2"))
    assert run.errors == {}
    assert standing(nodes) == [["step-1", "step-2", "step-3"]] * 2, "nothing is rotated until the next start"
    well(nodes.restart())


def test_a_share_that_is_owed_is_published_at_the_next_start() -> None:
    nodes = Nodes(2)
    run = nodes.job(saves(1, 2), **failing(1, "rename", "/step-2"))
    assert {getattr(error, "outcome", None) for error in run.errors.values()} == {"unknown"}
    assert standing(nodes) == [["step-1", "step-2"], ["step-1"]]
    again = nodes.job(lambda manager, rank: manager.resume().step)
    assert set(again.values.values()) == {2} and standing(nodes) == [["step-1", "step-2"]] * 2


def test_no_room_on_another_nodes_disk_is_told_before_anybody_writes() -> None:
    """By what its own last share took."""
    nodes = Nodes(3, nodes=3, cuts=0)

    def program(manager: Told, rank: int) -> Any:
        manager.save(1, State(bytes_of(rank, 1)))
        if rank == 2:
            nodes.nodes[2].room = 10
        try:
            manager.save(2, State(bytes_of(rank, 2)))
        except DiskFull as error:
            if rank == 2:
                nodes.nodes[2].room = 1 << 40
            manager.save(3, State(bytes_of(rank, 3)))
            return str(error), error.free, error.needed

    run = nodes.job(program)
    assert not run.errors and len(run.values) == 3, run.errors
    for text, free, needed in run.values.values():
        assert "the disk is too full on rank 2 (host-2)" in text and "10 bytes are free" in text and free == 10 < needed, text
    assert [path for disk in nodes.nodes for path in disk.snapshot() if "step-2" in path] == []
    assert standing(nodes)[0] == standing(nodes)[2]


class _Late:
    """Who rotates and who deletes goes on only when nobody else can."""

    def born(self, task: Task) -> None:
        return None

    def choose(self, ready: list[Task], current: Task | None) -> Task:
        first = [task for task in ready if task.name not in ("afterwards", "janitor")] or ready
        return current if current is not None and current in first else first[0]


@pytest.mark.parametrize("look", ["free", "mkdir"])
def test_another_nodes_share_begins_when_its_own_disk_has_back_what_the_last_rotation_frees(look: str) -> None:
    """Both when it says what room it has, and when it makes its directory: at most one more stands than retention says."""
    nodes = Nodes(2, keep=1, policy=lambda seed: _Late())
    disk, seen = nodes.nodes[1], list[bool]()

    def free(path: str) -> int:
        stand = {part for name in disk.snapshot() for part in ("step-1", "step-2") if f"/{part}" in name}
        seen.append(len(stand) == 2)
        return 10 if len(stand) == 2 else 1 << 40

    def program(manager: Told, rank: int) -> None:
        manager._rotated = lambda: None  # type: ignore[method-assign]  # as the finaliser begins, which is not the caller
        saves(1, 2, 3)(manager, rank)

    if look == "free":
        disk.free = free  # type: ignore[method-assign]
    fault = faults.call(lambda operation: seen.append(LAYOUT.final("step-1") in disk.snapshot()), op="mkdir",
                        path=lambda path: look == "mkdir" and path.endswith("/step-3"))
    run = nodes.job(program, file_faults={1: [fault]})
    assert run.errors == {}, run.errors
    assert seen[-1] is False and (look == "mkdir" or True in seen), "the rotation was not late"
    assert standing(nodes) == [["step-3"]] * 2


# -- rotation ----------------------------------------------------------------------------------------------------------


def test_a_lease_on_one_node_keeps_the_checkpoint_on_all() -> None:
    nodes = Nodes(2, keep=1)

    def program(manager: Told, rank: int) -> None:
        manager.save(1, State(bytes_of(rank, 1)))
        if rank == 1:
            root = manager._reader()
            root.lease(root.latest(), reason="evaluation", ttl=1e6)
        manager.save(2, State(bytes_of(rank, 2)))
        manager.save(3, State(bytes_of(rank, 3)))

    well(nodes.job(program))
    assert standing(nodes) == [["step-1", "step-3"]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_node_could_not_rotate_goes_after_the_next_save(rank: int) -> None:
    nodes = Nodes(2, keep=1)
    fault = faults.fail(errno.EIO, op="rename", path=lambda path: "/trash/1/step-1." in path)

    def program(manager: Told, me: int) -> list[list[str]]:
        seen = []
        for step in (1, 2, 3):
            manager.save(step, State(bytes_of(me, step)))
            seen.append(standing(nodes)[rank])
        return seen

    run = well(nodes.job(program, file_faults={rank: [fault]}))
    assert run.values[rank][1] == ["step-1", "step-2"]
    assert standing(nodes) == [["step-3"]] * 2


def test_what_was_half_rotated_when_a_committer_died_goes_later() -> None:
    nodes = Nodes(2, keep=1)
    well(nodes.job(saves(1, 2)))
    tree = nodes.nodes[1].after_kill()
    well(nodes.job(saves(3)))
    assert standing(nodes) == [["step-3"]] * 2
    # node 1 as it would be had it died before it rotated step-2 away, its share of step-3 published
    for path, data in tree.snapshot().items():
        if path.startswith(LAYOUT.final("step-2")):
            if data is None:
                nodes.nodes[1].mkdir(path)
            else:
                nodes.nodes[1].append(path, data)
    well(nodes.job(saves(4)))
    assert standing(nodes) == [["step-4"]] * 2
