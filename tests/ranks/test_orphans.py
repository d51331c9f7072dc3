"""Programs that end without ``close()``: each ends in time, with an exit code that says what happened, and no abort.

Real main programs that go through the interpreter's own shutdown (tests/zygote.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.zygote import Ended, Zygote

DEADLINE = 20.0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    found = Zygote()
    yield found
    found.close()


HEAD = """
import os, sys, time, logging, threading
import torch, distckpt, torch.distributed as dist
from distckpt.options import Seams, Timeouts
from distckpt.testing.faults import FaultyFiles, call, fail
logging.basicConfig(level=logging.INFO)
rank, world, root = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
if world > 1:
    dist.init_process_group("gloo")
files = FaultyFiles()
state = {"w": torch.ones(1000)}
def slowly(seconds=0.6):
    files.faults.append(call(lambda operation: time.sleep(seconds), op="fsync"))
def full():
    if rank == world - 1:
        files.faults.append(fail(28, op="write", path=".pt"))
manager = distckpt.CheckpointManager(root, seams=Seams(files=files), timeouts=Timeouts(arrive=10, progress=10, close=10))
"""


def _status(root: Path) -> list[tuple[int, str]]:
    return [(a["step"], a["state"]) for a in json.loads((root / ".distckpt/status.json").read_text())["attempts"]]


def _published(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name.startswith("step-"))


def _no_abort(ended: list[Ended]) -> None:
    for one in ended:
        assert one.code >= 0, f"ended by signal {-one.code}:\n{one.text[-4000:]}"
        assert one.seconds < DEADLINE, one.text[-4000:]
        assert "Fatal Python error" not in one.text and "terminate called" not in one.text, one.text[-4000:]


CASES = {
    # name: (what the script does after HEAD, exit code, published, status, what it says)
    "forgets close before any save": ("manager.poll(0)", 0, [], None, "without closing"),
    "forgets close, never polled": ("", 0, [], None, "without closing"),
    "forgets close after a sync save": ("manager.save(1, state)", 0, ["step-1"], [(1, "committed")], "without closing"),
    "forgets close with a save in flight": (
        "slowly()\nmanager.poll(1)\nmanager.save(1, state, background=True)", 0, ["step-1"], [(1, "committed")],
        "without closing"),
    "forgets close after a save that ended": (
        "manager.save(1, state, background=True)\nmanager.wait()\ntime.sleep(0.7)", 0, ["step-1"], [(1, "committed")],
        "without closing"),
    "forgets close, and the save fails": (
        "full()\nmanager.save(1, state, background=True)", 1, [], [(1, "failed")], "its last background save had failed"),
    "dies between saves": (
        "manager.save(1, state, background=True)\nmanager.wait()\nraise KeyError('mine')", 1, ["step-1"], [(1, "committed")],
        "KeyError: 'mine'"),
    "dies between saves, in the block": (
        "with manager:\n    manager.save(1, state, background=True)\n    manager.wait()\n    raise KeyError('mine')", 1,
        ["step-1"], [(1, "committed")], "KeyError: 'mine'"),
    "dies before any save": ("manager.poll(0)\nraise KeyError('mine')", 1, [], None, "KeyError: 'mine'"),
    "dies during a save": (
        "slowly()\nmanager.save(1, state, background=True)\nraise KeyError('mine')", 1, ["step-1"], [(1, "committed")],
        "KeyError: 'mine'"),
    "dies during a save, in the block": (
        "slowly()\nwith manager:\n    manager.save(1, state, background=True)\n    raise KeyError('mine')", 1, ["step-1"],
        [(1, "committed")], "KeyError: 'mine'"),
    "dies during a save that fails": (
        "slowly()\nfull()\nwith manager:\n    manager.save(1, state, background=True)\n    raise KeyError('mine')", 1, [],
        [(1, "failed")], "KeyError: 'mine'"),
    "exits in the loop": (
        "slowly()\nfor step in range(9):\n    manager.poll(step)\n    if step == 3:\n"
        "        manager.save(3, state, background=True)\n    if step == 5:\n        sys.exit(3)", 3, ["step-3"],
        [(3, "committed")], "without closing"),
    "exits with 0 and a save that fails": (
        "slowly()\nfull()\nmanager.save(3, state, background=True)\nsys.exit(0)", 1, [], [(3, "failed")], "had failed"),
    "closes in time": (
        "manager.save(1, state, background=True)\nmanager.close()", 0, ["step-1"], [(1, "committed")], ""),
    "a failed save ends it": (
        "full()\nwith manager:\n    manager.save(1, state, background=True)", 1, [], [(1, "failed")], "DiskFull"),
}


ALONE = ["forgets close before any save", "forgets close with a save in flight", "forgets close, and the save fails",
         "dies between saves", "dies during a save, in the block", "exits in the loop"]


@pytest.mark.parametrize(("case", "world"), [*((case, 2) for case in CASES), *((case, 1) for case in ALONE)])
def test_how_programs_end(case: str, world: int, zygote: Zygote, tmp_path: Path) -> None:
    script, code, published, status, says = CASES[case]
    root = tmp_path / "root"
    ended = zygote.run(tmp_path, world, HEAD + script, root)
    _no_abort(ended)
    assert [one.code for one in ended] == [code] * world, "\n".join(one.text[-3000:] for one in ended)
    assert _published(root) == published and (status is None or _status(root) == status)
    assert all(says in one.text for one in ended), "\n".join(one.text[-3000:] for one in ended)
    if code and "Error" in says:
        assert all("Traceback" in one.text for one in ended)


@pytest.mark.parametrize("bad", [0, 1])
def test_one_rank_dies_while_the_other_trains(bad: int, zygote: Zygote, tmp_path: Path) -> None:
    """The other hears of it at its next call, or at a poll; nobody hangs."""
    script = HEAD + f"""
with manager:
    for step in range(2000):
        manager.poll(step)
        if step == 5:
            manager.save(5, state, background=True)
        if step == 50 and rank == {bad}:
            raise KeyError("mine")
        time.sleep(0.002)
    manager.save(9999, state)
"""
    ended = zygote.run(tmp_path, 2, script, tmp_path / "root")
    _no_abort(ended)
    assert [one.code for one in ended] == [1, 1]
    other = ended[1 - bad].text
    assert "KeyError: 'mine'" in ended[bad].text and ("CoordinatorLost" if bad == 0 else "RankLost") in other, other[-3000:]
    assert _published(tmp_path / "root") == ["step-5"]


def test_a_disk_that_hangs_does_not_keep_the_process(zygote: Zygote, tmp_path: Path) -> None:
    """``close`` gives up after its deadline, and the interpreter does not wait for the thread that hangs."""
    script = HEAD.replace("close=10", "close=1") + """
slowly(3600)
manager.save(1, state, background=True)
manager.close()
"""
    ended = zygote.run(tmp_path, 1, script, tmp_path / "root")
    _no_abort(ended)
    assert ended[0].code == 1 and "has not ended within 1 s" in ended[0].text and "leaving without it" in ended[0].text
    assert _published(tmp_path / "root") == []


ROTATES = HEAD.replace("CheckpointManager(root, ", "CheckpointManager(root, keep_last=1, ").replace("close=10", "close=4") + """
main = threading.main_thread()
def rotating(operation):
    started.set()
    main.join()
    hold()
started = threading.Event()
def hold(): pass
files.faults.append(call(rotating, op="rename", path=lambda path: "/trash/1/step-1." in path))
manager.save(1, state)
manager.save(2, state)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_the_rotation_may_end_when_the_program_has_ended_and_keeps_it_for_its_deadline_only(
        hangs: bool, zygote: Zygote, tmp_path: Path) -> None:
    script = ROTATES.replace("def hold(): pass", "def hold(): time.sleep(3600)") if hangs else ROTATES
    ended = zygote.run(tmp_path, 1, script + "started.wait()\n", tmp_path / "root")
    _no_abort(ended)
    assert ended[0].code == 0 and "without closing" in ended[0].text, ended[0].text[-3000:]
    assert _published(tmp_path / "root") == (["step-1", "step-2"] if hangs else ["step-2"])
    assert hangs == ("the rotation has not ended within" in ended[0].text), ended[0].text[-3000:]


def test_a_disk_that_hangs_does_not_keep_an_orphan(zygote: Zygote, tmp_path: Path) -> None:
    script = HEAD.replace("close=10", "close=1") + """
slowly(3600)
manager.save(1, state, background=True)
while not any(operation.op == "write" for operation in files.log):
    time.sleep(0.01)
"""
    ended = zygote.run(tmp_path, 1, script, tmp_path / "root")
    _no_abort(ended)
    assert ended[0].code == 1 and "leaving without it" in ended[0].text
    assert _published(tmp_path / "root") == []


def test_a_thread_may_train_on_after_the_main_thread(zygote: Zygote, tmp_path: Path) -> None:
    """The interpreter waits for it, so its manager is no orphan."""
    body = HEAD.partition("manager = ")
    script = body[0] + """
def train():
    manager = """ + body[2].strip() + """
    for step in range(100):
        manager.poll(step)
        if step % 30 == 0:
            manager.save(step, state, background=True)
        time.sleep(0.02)
    manager.close()
threading.Thread(target=train).start()
"""
    ended = zygote.run(tmp_path, 1, script, tmp_path / "root")
    _no_abort(ended)
    assert ended[0].code == 0 and "without closing" not in ended[0].text, ended[0].text[-3000:]
    assert _published(tmp_path / "root") == ["step-0", "step-30", "step-60", "step-90"]


def test_a_thread_that_nobody_waits_for_does_not_keep_the_process(zygote: Zygote, tmp_path: Path) -> None:
    body = HEAD.partition("manager = ")
    script = body[0] + """
opened = threading.Event()
def train():
    manager = """ + body[2].strip() + """
    manager.save(1, state, background=True)
    opened.set()
    while True:
        manager.poll(1)
        time.sleep(0.02)
threading.Thread(target=train, daemon=True).start()
opened.wait()
"""
    ended = zygote.run(tmp_path, 1, script, tmp_path / "root")
    _no_abort(ended)
    assert ended[0].code == 0 and "without closing" in ended[0].text, ended[0].text[-3000:]
    assert _published(tmp_path / "root") == ["step-1"]


def test_a_forked_child_never_acts_for_its_parent(zygote: Zygote, tmp_path: Path) -> None:
    script = HEAD + """
slowly(0.5)
manager.poll(0)
manager.save(1, state, background=True)
pid = os.fork()
if pid == 0:
    manager.close()
    try:
        manager.save(2, state)
    except distckpt.ConfigError:
        sys.exit(5)
    sys.exit(6)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
manager.close()
"""
    ended = zygote.run(tmp_path, 1, script, tmp_path / "root")
    _no_abort(ended)
    assert ended[0].code == 0, ended[0].text[-3000:]
    assert _published(tmp_path / "root") == ["step-1"]
