"""``distckpt doctor``: what it makes of what ranks saw, and one visit of one process."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import distckpt
from distckpt.cli import doctor
from distckpt.cli.diagnosis import FAIL, OK, WARNING, Line, Seen, Story, diagnose
from distckpt.cli.launcher import launcher
from distckpt.cli.main import parser
from distckpt.cli.output import Output
from distckpt.coordination.bootstrap import _single
from distckpt.coordination.group import Group
from distckpt.durable import REAL
from distckpt.layout import Layout
from distckpt.runtime import SYSTEM
from distckpt.testing import faults
from tests.support import Command, make_checkpoint, record_root, stage_attempt

GOOD = {"mkdir": "ok", "be seen": "ok"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "CROSS_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def seen(world: int = 2, mount: tuple[str, str, str] = ("nfs4", "server:/x", "rw,hard"), story: Story | None = None,
         **more: Any) -> Seen:
    """Two ranks on two hosts, and all is well but for ``more``."""
    facts: dict[str, Any] = {
        "root": "/r", "exists": True, "standing": "/r", "real": "/r", "uid": 7, "network": mount[0].startswith(("nfs", "fuse")),
        "trust": None, "mount": dict(zip(("kind", "source", "options"), mount, strict=True)), "files": 65536, "largest": None,
        "memory": 10 ** 12, "space": {"free": 10 ** 13, "size": 10 ** 14, "inodes": 10 ** 8, "of_inodes": 10 ** 9},
        "shm": {"size": 10 ** 11}}
    of_1 = more.pop("of_1", {})
    tried: dict[str, Any] = {"seen": 0.1, "tried": GOOD}
    found = Seen({rank: f"n{rank}" for rank in range(world)}, "torch", "/r", 120.0, story=story or Story())
    found.facts = {rank: {**facts, **more.pop("facts", {}), **(of_1 if rank else {})} for rank in range(world)}
    found.tried = {rank: dict(tried) for rank in range(world)}
    found.back = dict.fromkeys(range(world), 0.2)
    found.clocks = dict.fromkeys(range(world), 0.0)
    found.saved = {"fixed": 0.05, "rate": 10 ** 9, "bytes": 10 ** 7}
    for name, value in more.items():
        setattr(found, name, value)
    return found


def line(found: Seen, what: str, state: str) -> Line:
    lines = [one for one in diagnose(found) if one.what == what and one.state == state]
    assert len(lines) == 1, diagnose(found)
    return lines[0]


def test_all_is_well() -> None:
    lines = diagnose(seen())
    assert {one.state for one in lines} == {OK}, lines
    assert [one.what for one in lines] == ["ranks", "root", "file system", "owner and mode", "operations", "visibility", "clocks",
                                           "space", "a small save", "live writer", "grace", "open files", "memory"]


@pytest.mark.parametrize("mount, state, word", [
    (("nfs", "s:/x", "rw,hard,acdirmax=600"), WARNING, "600 s"), (("nfs4", "s:/x", "rw,hard,nocto"), WARNING, "nocto"),
    (("nfs4", "s:/x", "rw,soft"), WARNING, "soft"), (("fuse.s3fs", "s3fs", "rw"), FAIL, "renamed"),
    (("fuse", "gcsfuse#b", "rw"), FAIL, "renamed"), (("overlay", "o", "rw"), WARNING, "container"),
    (("tmpfs", "t", "rw"), WARNING, "memory"), (("ext4", "/dev/x", "rw,barrier=0"), WARNING, "barriers"),
])
def test_what_a_mount_means(mount: tuple[str, str, str], state: str, word: str) -> None:
    found = line(seen(1, mount), "file system", state)
    assert word in found.seen and found.fix and "rank 0 on n0" in found.seen


@pytest.mark.parametrize("more, what, state, words", [
    ({"of_1": {"root": "/other"}}, "root", FAIL, ["rank 1 on n1", "/other"]),
    ({"of_1": {"trust": "it belongs to uid 9, and this process is uid 7: chown it"}}, "owner and mode", FAIL,
     ["uid 9", "rank 1 on n1"]),
    ({"of_1": {"uid": 8}}, "owner and mode", WARNING, ["uid 8: rank 1 on n1"]),
    ({"unwritable": OSError(errno.EDQUOT, "Disk quota exceeded")}, "root", FAIL, ["quota exceeded"]),
    ({"tried": {0: {"seen": 0.0, "tried": GOOD}, 1: {"unseen": "No such file", "waited": 120.0}}}, "visibility", FAIL,
     ["rank 1 on n1 does not see what rank 0 on n0 wrote", "120 s"]),
    ({"back": {0: 0.0, 1: None}}, "visibility", FAIL, ["rank 0 on n0 does not see what rank 1 on n1 wrote"]),
    ({"back": {0: 0.0, 1: 70.0}}, "visibility", WARNING, ["70.00 s", "rank 1 on n1"]),
    ({"tried": {0: {"seen": 0.0, "tried": GOOD}, 1: {"seen": 0.0, "tried": {**GOOD, "fsync a directory": "Invalid argument"}}}},
     "operations", FAIL, ["fsync a directory: Invalid argument (rank 1 on n1)"]),
    ({"tried": {r: {"seen": 0.0, "tried": {**GOOD, "hard link": "not there"}} for r in (0, 1)}}, "operations", OK,
     ["without hard link"]),
    ({"clocks": {0: 0.0, 1: -40.0}}, "clocks", WARNING, ["40.0 s", "rank 1 on n1"]),
    ({"of_1": {"space": {"free": 10, "size": 10 ** 9, "inodes": 5, "of_inodes": 0}}}, "space", FAIL, ["10 B", "rank 1 on n1"]),
    ({"of_1": {"space": {"free": 10 ** 12, "size": 10 ** 13, "inodes": 5, "of_inodes": 10 ** 6}}}, "inodes", FAIL, ["5 of"]),
    ({"story": Story(bytes=10 ** 13 + 1)}, "space", FAIL, ["room for 0 more"]),
    ({"story": Story(bytes=6 * 10 ** 12)}, "space", WARNING, ["room for 1 more"]),
    ({"story": Story(bytes=3 * 10 ** 12)}, "memory", WARNING, ["about 1.5 TB"]),
    ({"saved": {"error": "save of step 3 failed"}}, "a small save", FAIL, ["step 3"]),
    ({"story": Story(owner="pid 5 on n9, job slurm:7", owner_lives=True)}, "live writer", FAIL, ["slurm:7"]),
    ({"story": Story(owner="pid 5 on n9", owner_lives=None)}, "live writer", WARNING, ["pid 5 on n9", "90 s"]),
    ({"story": Story(unclear=["x: cannot tell"])}, "leftovers", WARNING, ["cannot tell"]),
    ({"facts": {"files": 256}}, "open files", WARNING, ["256"]),
    ({"of_1": {"largest": 10 ** 9}}, "largest file", WARNING, ["1.0 GB on rank 1 on n1"]),
    ({"of_1": {"shm": {"size": 64 << 20}}}, "/dev/shm", WARNING, ["rank 1 on n1"]),
    ({"mount": ("ext4", "/dev/x", "rw")}, "file system", WARNING, ["several hosts"]),
])
def test_what_is_wrong_is_said_with_the_ranks_and_what_to_do(more: dict[str, Any], what: str, state: str,
                                                             words: list[str]) -> None:
    found = line(seen(**more), what, state)
    assert all(word in found.seen for word in words), found
    assert bool(found.fix) == (state != OK)


def test_the_grace_of_the_launcher_against_the_length_of_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher({}).grace is None
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}
    assert launcher(torchrun).grace == 30.0 and launcher(torchrun).name == "started by torchrun"
    assert launcher({**torchrun, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}).grace == 300.0
    assert launcher({"SLURM_JOB_ID": "12"}).grace is not None and "12" in launcher({"SLURM_JOB_ID": "12"}).name
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    told = line(seen(story=Story(seconds=95.0, takes="a stop takes up to 95.0 s")), "grace", WARNING)
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in told.fix and "; a stop takes up to 95.0 s: a save begun" in told.seen
    assert "95 s" in line(seen(story=Story(bytes=95 * 10 ** 9)), "grace", WARNING).seen, "by the speed of the small save"
    assert line(seen(story=Story(seconds=3.0)), "grace", OK)


# -- one visit -----------------------------------------------------------------------------------------------------------

def files_below(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else b"" for p in path.rglob("*")}


def test_a_root_that_is_not_there_yet_is_not_made(command: Command, tmp_path: Path) -> None:
    said = command("doctor", str(tmp_path / "a" / "run"), "--size", "1")
    assert said.code == 0 and "not there yet" in said.out and "a small save: 1.0 MB" in said.out, said
    assert list(tmp_path.iterdir()) == []


def test_an_existing_root_is_left_as_it_was(command: Command, tmp_path: Path) -> None:
    root = record_root(str(tmp_path))
    make_checkpoint(root.root, 100, 1)
    stage_attempt(REAL, 200, 2, root=root.root)
    before = files_below(tmp_path)
    said = command("doctor", root.root, "--json", "--size", "1")
    assert files_below(tmp_path) == before
    lines = {one["what"]: one for one in said.json["lines"]}
    assert said.code == said.json["code"] == 0
    assert "step-200" in lines["leftovers"]["seen"] and "the next start publishes it" in lines["leftovers"]["seen"]
    assert "room for" in lines["space"]["seen"] and lines["a small save"]["state"] == OK


def test_a_plain_directory_is_left_without_our_own(command: Command, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("theirs")
    assert command("doctor", str(tmp_path), "--size", "1").code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_beside_a_running_job_it_disturbs_nothing(command: Command, tmp_path: Path) -> None:
    with distckpt.CheckpointManager(tmp_path, keep_last=2) as manager:
        said = command("doctor", str(tmp_path), "--size", "1")
        assert said.code == 2 and f"live writer: pid {os.getpid()}" in said.out and "a small save: 1.0 MB" in said.out, said
        with manager.saving(1) as files, files.writer("x") as out:
            out.write(b"x")
    assert command("doctor", str(tmp_path), "--size", "1").code == 0


def test_exit_codes_are_for_job_prologs(command: Command, tmp_path: Path) -> None:
    root = record_root(str(tmp_path))
    os.mkdir(root.home("doctor-killed"))
    assert command("doctor", root.root, "--size", "1").code == 0
    said = command("doctor", root.root, "--size", "1", "--strict")
    assert said.code == 1 and "doctor-killed: the probe of another 'distckpt doctor'" in said.out
    (tmp_path / "file").write_text("")
    said = command("doctor", str(tmp_path / "file" / "run"), "--size", "1")
    assert said.code == 2 and f"{tmp_path}/file is a file, not a directory" in said.out
    assert command("doctor", root.root, "--size", "0").code == 2


def visit(root: str, *found: faults.Fault) -> tuple[int, faults.FaultyFiles]:
    """One process whose disk has these faults."""
    files = faults.FaultyFiles(REAL, *found)
    args = parser().parse_args(["doctor", root, "--size", "1", "--wait", "1"])
    group = Group.connect(_single(SYSTEM), SYSTEM, 10.0, 10.0)
    try:
        return doctor.Doctor(args, group, Output(), files).run(), files
    finally:
        group.close(1.0)


@pytest.mark.parametrize("number, op, text", [
    (errno.EROFS, "mkdir", "root: rank 0 on"), (errno.ENOSPC, "write", "cannot write in"),
    (errno.EIO, "fsync_dir", "cannot write in"), (errno.EACCES, "rename", "operations: rename a directory: Permission denied"),
    (errno.EINVAL, "unlink", "operations: unlink: Invalid argument"),
])
def test_every_operation_that_fails_is_told_and_the_probe_goes(tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int,
                                                               op: str, text: str) -> None:
    layout = Layout.at(tmp_path)
    fault = faults.fail(number, op=op)
    code, _ = visit(layout.root, fault)
    said = capfd.readouterr().out
    assert fault.fired and code == 2 and text in said and "a small save: not tried" in said, said
    assert list(tmp_path.iterdir()) == []


def test_the_probe_goes_when_the_visit_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: doctor.Doctor, where: str) -> Any:
        assert os.path.isdir(where) and threading.current_thread() is threading.main_thread()
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor.Doctor, "_small_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        visit(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
