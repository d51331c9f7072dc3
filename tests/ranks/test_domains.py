"""``storage="node-local"`` on real ranks: two nodes, each with a mount namespace in which the root is its own directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt.durable import REAL
from distckpt.errors import ConfigError, NoUsableCheckpoint, RankDisagreement, ResumeError
from distckpt.options import Seams, Timeouts
from distckpt.payloads.dcp import DCP
from distckpt.testing import faults
from distckpt.testing.faults import FaultyFiles
from scripts.proof.disks import isolate, mount
from tests.harness import Outcome, run, values

pytestmark = pytest.mark.root_only

_BIND = 4096
QUICK = Timeouts(arrive=30, progress=30, visible=0.5, close=30)


@pytest.fixture(autouse=True)
def needs_mounts() -> None:
    if os.geteuid() != 0:
        pytest.skip("a mount namespace of its own for every node needs root")


def on_node(home: str, node: int) -> str:
    """From now on this process is on that node: it has the node's name, and the node's own disk under the root."""
    own, root = Path(home, f"node-{node}"), Path(home, "root")
    own.mkdir(exist_ok=True)
    root.mkdir(exist_ok=True)
    os.environ["DISTCKPT_HOST"] = f"node-{node}"
    isolate()
    mount(str(own), str(root), "none", flags=_BIND)
    return str(root / "run")


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((500,), float(step)), "rank": rank}


def manager_on(home: str, node: int, seams: Seams | None = None, **options: Any) -> distckpt.CheckpointManager:
    return distckpt.CheckpointManager(on_node(home, node), storage="node-local", timeouts=QUICK, seams=seams, **options)


def _everything(rank: int, world: int, home: str) -> Any:
    with manager_on(home, rank * 2 // world, keep_last=2) as manager:
        assert manager.restore(state_of(rank, 0)) is None
        for step in (1, 2):
            manager.save(step, state_of(rank, step), metrics={"rank": rank})
        manager.save(3, state_of(rank, 3), background=True)
        manager.wait()
        with manager.saving(4) as files:
            for name, mine in (("part.bin", True), ("vocab.json", False)):
                if mine or files.writes(name):
                    Path(files.mine(name) if mine else files.shared(name)).write_text(f"{name} of step 4")
            Path(files.path, f"unclaimed-{rank}").write_text("a framework's")
        with pytest.raises(ConfigError, match="storage='node-local': this state is saved by a framework's collectives"):
            manager.save(5, DCP(torch.nn.Linear(2, 2)))
        with pytest.raises(ConfigError, match="storage='node-local': this state is saved by a framework's collectives"):
            manager.save(5, DCP(torch.nn.Linear(2, 2)), background=True)
            manager.wait()
        found = manager.resume().checkpoint
        assert found is not None
        there = sorted(os.listdir(found.path)), Path(found.shared("vocab.json")).read_text(), found.metrics
        manager.save(6, state_of(rank, 6), metrics={"loss": 1.0})
        fresh = state_of(-1, 0)
        assert manager.restore(fresh) == 6
        return there, fresh["rank"], float(fresh["w"][0]), manager.all_steps(), (Path(manager.root) / "latest").read_text()


def test_two_nodes_from_start_to_end(tmp_path: Path) -> None:
    for rank, (there, own, weight, steps, latest) in enumerate(values(run(4, _everything, str(tmp_path)))):
        ranks = (0, 1) if rank < 2 else (2, 3)
        assert there[0] == sorted(["commit.json", "vocab.json", *(f"part.rank-{r:05d}-of-00004.bin" for r in ranks),
                                   *(f"unclaimed-{r}" for r in ranks)])
        assert (own, weight, steps, latest) == (rank, 6.0, [4, 6], "step-6\n")
    for node in (0, 1):
        root = distckpt.open(tmp_path / f"node-{node}" / "run")
        found = root.latest()
        assert found is not None and root.verify(found) == []
        assert (found.marker.head.part, found.marker.head.of) == (node, 2)
        assert found.marker.domains == (("node-0", (0, 1)), ("node-1", (2, 3))) and found.metrics == {"loss": 1.0}


def _killed(rank: int, world: int, home: str, who: int, op: str, part: str, after: bool) -> None:
    files = FaultyFiles(REAL, faults.kill(op=op, path=lambda path: part in path, after=after)) if rank == who else REAL
    with manager_on(home, rank, Seams(files=files), keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(rank, step))


def _resumed(rank: int, world: int, home: str) -> Any:
    state = state_of(-1, 0)
    with manager_on(home, rank, keep_last=1) as manager:
        step = manager.restore(state)
        manager.save(9, state_of(rank, 9))
        manager.wait()
        return step, state["rank"], float(state["w"][0]), sorted(os.listdir(manager.root))


@pytest.mark.parametrize("who, op, part, after, step", [
    (1, "mkdir", "/step-2", False, 1), (1, "open", "/step-2/commit.json", True, 1), (1, "rename", "/step-2", False, 2),
    (1, "rename", "/trash/1/step-1.", False, 2), (0, "rename", "/step-2", False, 1), (0, "rename", "/step-2", True, 2)])
def test_S1_a_committer_is_killed_at_a_gate(who: int, op: str, part: str, after: bool, step: int, tmp_path: Path) -> None:
    """Before rank 0 has published, the save never was; from then on it stands on both nodes after the next start."""
    ended = run(2, _killed, str(tmp_path), who, op, part, after)
    assert ended[who].exitcode == -9 and (ended[1 - who].error is not None or "trash" in part)
    for rank, (found, own, weight, there) in enumerate(values(run(2, _resumed, str(tmp_path)))):
        assert (found, own, weight) == (step, rank, float(step))
        assert there == [".distckpt", "latest", "step-9"]


def _moved(rank: int, world: int, home: str) -> None:
    with manager_on(home, 1 - rank) as manager:
        manager.resume()


def _shared(rank: int, world: int, home: str) -> None:
    distckpt.CheckpointManager(on_node(home, rank), timeouts=QUICK)


def _replaced(rank: int, world: int, home: str) -> None:
    with manager_on(home, 2 * rank) as manager:
        manager.resume()


def _disagree(rank: int, world: int, home: str) -> None:
    manager_on(home, rank, keep_last=rank + 1)


def errors(ended: list[Outcome], kind: type[BaseException]) -> str:
    for outcome in ended:
        assert isinstance(outcome.error, kind), outcome
    assert len({str(outcome.error) for outcome in ended}) == 1
    return str(ended[0].error)


def test_nodes_that_are_not_those_of_the_save(tmp_path: Path) -> None:
    """In another order, with a new one among them, and without the word: each is an error that says which node has what."""
    home = str(tmp_path)
    values(run(2, _resumed, home))
    text = errors(run(2, _moved, home), ResumeError)
    assert "rank 0 runs on node-1 and wrote on node-0; node-1 has the files of rank 1" in text
    text = errors(run(2, _replaced, home), NoUsableCheckpoint)
    assert "node-2 holds no checkpoint of this run, and node-0 has 1, the newest of step 9" in text
    assert "the manager's options" in errors(run(2, _disagree, home), RankDisagreement)
    text = errors(run(2, _shared, home), ConfigError)
    assert "rank 1 on node-1 does not see what rank 0 wrote there" in text and "storage='node-local'" in text
    assert "Fine on: node-0 (rank 0, on " in text and "on another storage: node-1 (rank 1, on " in text


def _one_fails(rank: int, world: int, home: str) -> str:
    with manager_on(home, rank) as manager:
        with pytest.raises(distckpt.SaveError) as told, manager.saving(1) as files:
            path = files.shared("vocab.json")
            Path(path).write_text("of this node")
            if rank == 1:
                raise OSError(errno.EIO, "Input/output error", path)
        return str(told.value)


def test_a_file_that_each_node_has_and_that_fails_on_one_is_not_said_to_be_of_two_writers(tmp_path: Path) -> None:
    for text in values(run(2, _one_fails, str(tmp_path))):
        assert "failed on rank 1" in text and "vocab.json" in text and "both wrote" not in text, text
