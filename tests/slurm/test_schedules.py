"""DESIGN's schedules S1, S5, S6 and S10 with real nodes: killed, stopped, taken over, with a disk for all or one for each."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import LIMIT, OVER, RUN, SCRIPT, Cluster
from tests.slurm.steps import HELD
from tests.slurm.test_jobs import TOTAL, folder_of, report, submit

KEEP = 2  # what stands when the node dies is more, or would be


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[None]:
    """Both nodes, again, whatever the test did to one."""
    yield
    for pid in RUN.glob("n*/slurmd.pid"):
        subprocess.run([SCRIPT, "exec", pid.parent.name, "kill", "-CONT", pid.read_text().strip()], check=False, timeout=60)
    subprocess.run([SCRIPT, "up", "2"], check=True, capture_output=True, timeout=120)


def power(command: str, node: str, *more: str) -> None:
    subprocess.run([SCRIPT, command, node, *more], check=True, timeout=60)


def local() -> str:
    """A root on each node's own disk, of no earlier test."""
    return f"/node-local/{uuid.uuid4().hex[:8]}/root"


def on(node: str, root: str) -> Path:
    """``root`` on that node's disk, seen from outside."""
    return RUN / node / "disk" / Path(root).relative_to("/node-local")


def markers(root: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text())["head"] for path in root.glob("step-*/commit.json")}


def contents(root: Path) -> dict[str, bytes]:
    """All files but the owners' beats."""
    found = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".beat"]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def wait(what: str, seen: Callable[[], bool], limit: float = LIMIT) -> None:
    """For what happens after the job: AssertionError when it does not."""
    end = time.monotonic() + limit
    while not seen():
        assert time.monotonic() < end, f"{what}: not seen within {limit:g} s"
        time.sleep(0.1)


def test_s1_a_node_is_killed_between_two_publishes_or_rotations_and_before_its_marker_and_in_a_save_on_shared_storage(
        cluster: Cluster, nodes: None, tmp_path: Path) -> None:
    """Five jobs over both nodes, one of them under torchrun, and one power cut. What rank 0 published on its disk stands on both
    disks after the restart; what it did not stands on none; nothing is rotated on the one before the other has published, and
    where the one has rotated, both have what came after; nobody cleans up. Then another machine comes in the place of one."""
    decided, undecided, turned = local(), local(), local()
    one = {"RETRIES": "3", "GRACE": "10", "KEEP": f"{KEEP}"}
    shared = submit(cluster, folder_of(tmp_path, "shared"), "--ntasks-per-node=1", HOLD="save", **one)
    after = submit(cluster, folder_of(tmp_path, "after"), "--ntasks-per-node=1", HOLD="publish", HOLD_RANK="1", ROOT=decided,
                   STORAGE="node-local", **one)
    before = submit(cluster, folder_of(tmp_path, "before"), "--ntasks-per-node=1", HOLD="marker", HOLD_RANK="1", ROOT=undecided,
                    STORAGE="node-local", **one)
    rotated = submit(cluster, folder_of(tmp_path, "rotated"), "--ntasks-per-node=1", HOLD="rotate", HOLD_RANK="1", ROOT=turned,
                     STORAGE="node-local", **one)
    torchrun = submit(cluster, folder_of(tmp_path, "torchrun"), by="torchrun", HOLD="save", RANKS="1", **one)
    for job in (shared, torchrun):
        job.until("every rank in the middle of a save", job.files("at", 2))
    for job in (after, before, rotated):
        job.until("rank 1 at its gate", job.files("at", 1))
    name = f"step-{HELD + 1}"
    rotated.until("the rotation on rank 0's node", lambda: "step-1" not in markers(on("n1", turned)))
    old = {f"step-{n + 1}" for n in range(HELD)}
    for root, stands in ((decided, [{*old, name}, old]), (turned, [{*old, name} - {"step-1"}, {*old, name}])):
        assert [set(markers(on(node, root))) for node in ("n1", "n2")] == stands, "rank 0 has published, or rotated as well"
    power("kill", "n2")
    for job in (shared, torchrun, after, before, rotated):
        (job.folder / "go").touch()
    for job in (shared, torchrun):
        job.until("the error", lambda job=job: any(  # type: ignore[misc]
            name in job.output() for name in ("RankTimeout", "RankLost")), 60)
        assert "from rank 1 on n2 (pid" in job.output() and "phase 'write'" in job.output()
    for job in (after, before, rotated):
        job.until("the error", lambda job=job: (job.folder / "error-0.rank-0").exists(), 60)  # type: ignore[misc]
    assert "rank 0 had published, so the next start publishes its share as well" in (after.folder / "error-0.rank-0").read_text()
    power("start", "n2")
    for job in (shared, torchrun, after, before, rotated):
        job.over()
    for job in (shared, torchrun):
        assert report(job.folder, int(job.field("Restarts")))["started"] == HELD
    for job, root, expected, generation in ((after, decided, HELD + 1, 1), (before, undecided, HELD, 2),
                                            (rotated, turned, HELD + 1, 1)):
        restarts = int(job.field("Restarts"))
        assert [report(job.folder, restarts, rank)["started"] for rank in (0, 1)] == [expected] * 2
        both = [markers(on(node, root)) for node in ("n1", "n2")]
        assert set(both[0]) == set(both[1]) == {f"step-{TOTAL - n}" for n in range(KEEP)}
        for step in both[0]:
            heads = [found[step] for found in both]
            assert heads[0]["attempt"] == heads[1]["attempt"] and [h["part"] for h in heads] == [[0, 2], [1, 2]]
        assert both[0][name]["generation"] == generation, "the first run's, or written anew"
        assert [list(on(node, root).glob(".distckpt/staging/*/*/step-*")) for node in ("n1", "n2")] == [[], []]

    power("kill", "n2")
    power("start", "n2", "--empty")
    replaced = submit(cluster, folder_of(tmp_path, "replaced"), "--ntasks-per-node=1", ROOT=decided, STORAGE="node-local",
                      KEEP=f"{KEEP}", RETRIES="0", total=TOTAL + 1)
    replaced.over("FAILED")
    for rank in (0, 1):
        error = (replaced.folder / f"error-0.rank-{rank}").read_text()
        assert f"n2 holds no checkpoint of this run, and n1 has {KEEP}, the newest of step {TOTAL}: a node that was repl" in error


def test_s5_zombies_that_wake_after_the_takeover_publish_nothing(cluster: Cluster, nodes: None, tmp_path: Path) -> None:
    """The node does not answer (its slurmd is stopped), so SLURM starts the jobs on the other one; the ranks of the first
    runs were stopped right before the marker, or the publishing rename, and go on when the second runs are through. The marker
    was durable in the latter, so the takeover itself published it."""
    jobs = {hold: submit(cluster, folder_of(tmp_path, hold), "--nodes=1", HOLD=hold, HOLD_RANK="0")
            for hold in ("marker", "publish")}
    pids: list[str] = []
    for job in jobs.values():
        job.until("rank 0 at its gate", job.files("at", 1))
        pids += [(job.folder / f"pid.0.{rank}").read_text() for rank in (0, 1)]
    node, = {job.field("NodeList") for job in jobs.values()}
    power("exec", node, "kill", "-STOP", (RUN / node / "slurmd.pid").read_text().strip(), *pids)
    for job in jobs.values():
        job.until("started on the other node", lambda job=job: job.field("Restarts") == "1")  # type: ignore[misc]
        job.over()
    before = {hold: contents(job.folder / "root") for hold, job in jobs.items()}
    for job in jobs.values():
        assert not list(job.folder.glob("error-0.*"))
        (job.folder / "go").touch()
    power("exec", node, "kill", "-CONT", *pids)
    for hold, job in jobs.items():
        wait("the zombies' end", lambda job=job: len(list(job.folder.glob("error-0.*"))) == 2)  # type: ignore[misc]
        assert job.field("NodeList") != node
        assert report(job.folder, 1)["started"] == (HELD if hold == "marker" else HELD + 1)
        assert markers(job.folder / "root")[f"step-{HELD + 1}"]["generation"] == (2 if hold == "marker" else 1)
        root = contents(job.folder / "root")
        changed = {path for path in {*before[hold], *root} if before[hold].get(path) != root.get(path)}
        assert changed <= {".distckpt/journal/1.jsonl", ".distckpt/owner/1.released"}, "what is the first generation's own"
        error = (job.folder / "error-0.rank-0").read_text()
        assert f"save of step {HELD + 1}" in error and "its outcome is unknown" in error
        assert "this process lost the root to generation 2" in error and f"job slurm:{job.number}" in error


def test_s6_two_jobs_at_once_on_one_root_and_the_one_that_loses_is_told_whose_it_is(cluster: Cluster, tmp_path: Path) -> None:
    """On two nodes: neither can see whether the other's process lives, so the owner's beat decides."""
    jobs = [submit(cluster, folder_of(tmp_path, node), "--nodes=1", f"--nodelist={node}", RETRIES="0", ROOT=f"{tmp_path}/root",
                   START=f"{tmp_path}/start") for node in ("n1", "n2")]
    for job in jobs:
        job.until("every rank before the manager", job.files("ready", 2))
    (tmp_path / "start").touch()
    refused = [job.files("error-0", 2) for job in jobs]
    jobs[0].until("one of them is refused", lambda: any(seen() for seen in refused) or jobs[1].field("JobState") in OVER)
    loser, winner = jobs if refused[0]() else reversed(jobs)
    loser.over("FAILED")
    winner.until("every rank in the middle of a step", winner.files("at", 2))
    for rank in (0, 1):
        error = (loser.folder / f"error-0.rank-{rank}").read_text()
        assert "is in use: its live writer is pid" in error
        assert f"on {winner.field('NodeList')}, job slurm:{winner.number}, since" in error
    (winner.folder / "go").touch()
    winner.over()
    third = submit(cluster, loser.folder, "--nodes=1", f"--nodelist={loser.field('NodeList')}", total=TOTAL + 1,
                   ROOT=f"{tmp_path}/root")
    third.over()
    assert (report(third.folder, 0)["started"], report(third.folder, 0)["ended"]) == (TOTAL, TOTAL + 1)
    assert report(third.folder, 0)["kind"] == "slurm"


def test_s10_which_nodes_see_which_storage_and_a_shared_root_is_one_domain(cluster: Cluster, tmp_path: Path) -> None:
    apart = submit(cluster, folder_of(tmp_path, "apart"), ROOT=local(), RETRIES="0")
    joined = submit(cluster, folder_of(tmp_path, "joined"), ROOT=f"{tmp_path}/root", STORAGE="node-local")
    (joined.folder / "go").touch()
    apart.over("FAILED")
    for rank in range(4):
        error = (apart.folder / f"error-0.rank-{rank}").read_text()
        assert "Fine on: n1 (ranks 0-1, on /node-local); on another storage: n2 (ranks 2-3, on /node-local)." in error
        assert "pass storage='node-local'" in error
    joined.over()
    found = markers(tmp_path / "root")
    assert set(found) == {f"step-{TOTAL - n}" for n in range(3)} and all("part" not in head for head in found.values())
    assert len(list((tmp_path / "root" / f"step-{TOTAL}").glob("state.rank-*"))) == 4
