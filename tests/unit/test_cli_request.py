"""``distckpt request-save``: an operator's wish, from the command to ``todo.reason`` on every rank."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import distckpt
from distckpt import timing
from distckpt.durable import REAL
from distckpt.layout import Layout
from distckpt.ownership import Ownership, owner_now
from distckpt.requests import ask, take
from distckpt.testing.clock import VirtualRuntime
from tests.inprocess import Job, values
from tests.support import Command, record_root


def wishes(root: Path | str) -> list[str]:
    return sorted(os.listdir(os.path.join(root, ".distckpt", "requests")))


def test_it_reaches_every_rank_at_one_step_with_its_reason(command: Command, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_LOOK_FOR_REQUESTS", 0.1)
    job = Job(tmp_path / "root", world=2)

    def loop(manager: distckpt.CheckpointManager) -> tuple[int, distckpt.Todo]:
        for step in range(1, 4000):
            todo = manager.poll(step)
            if step == 3 and manager.rank == 0:
                Path(job.root, ".distckpt", "requests", "by hand").touch()
                ask(REAL, Layout.at(job.root), manager._seams.runtime, "before the\nupgrade")
            if todo.save:
                return step, todo
            time.sleep(0.005 * (manager.rank + 1))
        raise AssertionError("the request was never seen")

    found = values(job.run(loop))
    assert found[0] == found[1] and not found[0][1].stop
    assert found[0][1].reason == "requested by an operator: before the upgrade"
    assert wishes(job.root) == []


def test_it_says_whether_a_live_run_will_see_it(command: Command, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with distckpt.CheckpointManager(root) as manager:
        manager._background.stop(5.0)  # nobody looks, so that what is left there stays
        said = command("request-save", root, "--reason", "quota")
        assert said.code == 0 and said.err == ""
        assert said.out.splitlines()[0] == f"requested a save of {root} (quota)" and f"lives (pid {os.getpid()} on" in said.out
        document = command("request-save", root, "--json").json
        assert document["live"] is True and document["owner"]["pid"] == os.getpid() and document["reason"] == ""
        assert Path(document["request"]).name in wishes(root) and len(wishes(root)) == 2
        assert json.loads(Path(document["request"]).read_text())["pid"] == os.getpid()
        assert take(REAL, Layout.at(root)).count("quota") == 1 and wishes(root) == []


def test_it_is_refused_when_nobody_would_see_it(command: Command, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with distckpt.CheckpointManager(root):
        pass
    said = command("request-save", root)
    assert said.code == 1 and "nobody writes to" in said.err and "the last to do so was pid" in said.err
    assert wishes(root) == []
    assert command("request-save", tmp_path / "nowhere").code == 1
    assert command("request-save").code == 2
    fresh = record_root(str(tmp_path / "fresh"))
    assert command("request-save", fresh.root).code == 1 and wishes(fresh.root) == []


def test_an_owner_on_another_machine_is_said_to_be_unknown(command: Command, tmp_path: Path) -> None:
    layout = record_root(str(tmp_path / "root"))
    there = Ownership.claim(REAL, layout, VirtualRuntime(host="far", pid=7, boot="elsewhere"))
    said = command("request-save", layout.root, "--reason", "x")
    assert said.code == 0 and "(pid 7 on far) still lives cannot be told from this machine" in said.err
    assert owner_now(REAL, layout, VirtualRuntime())[1] is None
    there.release()
    assert command("request-save", layout.root).code == 1


def test_a_request_under_way_and_an_odd_file_harm_nobody(tmp_path: Path) -> None:
    layout = record_root(str(tmp_path / "root"))
    folder = Path(layout.home("requests"))
    (folder / "save-1.json.tmp").write_text("{")
    (folder / "torn.json").write_text("{")
    (folder / "list.json").write_text("[1]")
    (folder / "long.json").write_text(json.dumps({"reason": "x\x1b[31m" + "y" * 9999}))
    found = take(REAL, layout)
    assert found[0] == "" and found[2] == "" and len(found[1]) == 500 and found[1].startswith("x [31myy")
    assert wishes(layout.root) == ["save-1.json.tmp"]
