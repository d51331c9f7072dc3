"""NFS, with no NFS needed: a reply that is lost, so that the client asks again, and an absence that a client remembers.

L4 found both on a real server. A server that was started again remembers no reply: the second ``mkdir`` says that the directory
exists, the second ``rename`` that there is nothing to rename. Each operation of a run in turn has that answer; none may fail.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from distckpt import leases
from distckpt.durable import Files, Item, Output, Stat
from distckpt.layout import Layout
from distckpt.ordered import move, replace
from distckpt.testing.clock import VirtualRuntime
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.faults import FaultyFiles, fail, resend
from tests.onerank import Blob, Machine, close, standing, unclean
from tests.support import ROOT, attempt_id, crash_disk, make_checkpoint, open_owned, stage_attempt

LAYOUT = Layout.at(ROOT)


def nfs_disk() -> CrashFiles:
    disk = crash_disk()
    disk.exchange_supported = False
    return disk


def a_run(files: Files) -> None:
    """A start, saves with rotation, a replace, an end; then a second start that finds the first."""
    machine = Machine()
    for boot in range(2):
        manager = machine.boot(files)
        for step in (1, 2, 3):
            text = f"{boot}/{step}"
            manager.save(10 * boot + step, Blob(text), meta={"text": text})
        manager.save(10 * boot + 3, Blob(f"{boot}/again"), meta={"text": f"{boot}/again"}, on_exists="replace")
        assert manager.resume().step == 10 * boot + 3
        close(manager)


def test_no_lost_reply_makes_a_start_a_save_a_rotation_or_an_end_fail() -> None:
    for n in range(1, 400):
        disk = nfs_disk()
        files = FaultyFiles(disk, resend(n))
        a_run(files)
        assert standing(disk, LAYOUT) == {"step-12": "1/2", "step-13": "1/again"}, (n, files.log[-1:])
        assert unclean(disk, LAYOUT) == [], n
        if not files.fired:
            assert n > 60
            return
    raise AssertionError("it never ended")


def test_no_lost_reply_makes_recovery_fail() -> None:
    for n in range(1, 100):
        disk = nfs_disk()
        one = VirtualRuntime(pid=1)
        open_owned(disk, one)
        one.die()
        make_checkpoint(disk, 1, 1)
        stage_attempt(disk, 1, 2)  # a replace under way
        stage_attempt(disk, 2, 3)
        disk.mkdir(LAYOUT.staging(1, attempt_id(9)))
        files = FaultyFiles(disk, resend(n))
        assert open_owned(files, VirtualRuntime(pid=2)).highest_seq == 3, n
        heads = {e.name: e.head.seq for e in open_owned(disk, VirtualRuntime(pid=3)).entries() if e.head is not None}
        assert heads == {"step-1": 2, "step-2": 3}, n
        if not files.fired:
            assert n > 10
            return
    raise AssertionError("it never ended")


def test_a_rename_that_found_nothing_and_did_nothing_is_an_error() -> None:
    disk = crash_disk()
    with pytest.raises(FileNotFoundError):
        move(disk, "/disk/a", "/disk/b")


def test_a_replace_whose_temporary_was_taken_away_is_an_error() -> None:
    disk = crash_disk()
    replace(disk, "/disk/latest", b"step-1", "/disk/tmp")
    files = FaultyFiles(disk, fail(errno.ENOENT, op="rename"))
    with pytest.raises(FileNotFoundError):
        replace(files, "/disk/latest", b"step-2", "/disk/tmp")
    assert disk.read("/disk/latest", 100) == b"step-1"


# -- an absence that is remembered ---------------------------------------------------------------------------------------


class Client(Files):
    """One NFS client of ``disk``. A name that was looked up and absent stays absent here until its directory is listed."""

    def __init__(self, disk: CrashFiles) -> None:
        self.disk = disk
        self._absent: set[str] = set()

    def _look(self, path: str, run: Any) -> Any:
        here = path
        while here != "/":
            if here in self._absent:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            here = os.path.dirname(here)
        try:
            return run()
        except FileNotFoundError:
            gone = path
            while not self.disk.is_dir(os.path.dirname(gone)):
                gone = os.path.dirname(gone)
            self._absent.add(gone)
            raise

    def scan(self, path: str) -> list[Item]:
        found: list[Item] = self._look(path, lambda: self.disk.scan(path))
        self._absent = {absent for absent in self._absent if os.path.dirname(absent) != path}
        return found

    def stat(self, path: str) -> Stat:
        found: Stat = self._look(path, lambda: self.disk.stat(path))
        return found

    def read(self, path: str, limit: int) -> bytes:
        found: bytes = self._look(path, lambda: self.disk.read(path, limit))
        return found

    def open(self, path: str) -> Output:
        return self.disk.open(path)

    def mkdir(self, path: str) -> None:
        self.disk.mkdir(path)
        self._absent.discard(path)

    def overwrite(self, path: str, data: bytes) -> None:
        self.disk.overwrite(path, data)

    def fsync_dir(self, path: str) -> None:
        self.disk.fsync_dir(path)

    def unlink(self, path: str) -> None:
        self.disk.unlink(path)

    def rmdir(self, path: str) -> None:
        self.disk.rmdir(path)


def test_S22_the_rotator_sees_a_lease_though_it_had_looked_for_one_before() -> None:
    disk = CrashFiles(f"{ROOT}/.distckpt/leases")
    made = make_checkpoint(disk, 1)
    rotator, reader = Client(disk), Client(disk)
    watch = leases.Watch(rotator, LAYOUT, VirtualRuntime())
    assert watch.holders(made.head.attempt) == []
    leases.take(reader, LAYOUT, VirtualRuntime(), "step-1", made.head.attempt, "evaluation", 600.0)
    assert watch.holders(made.head.attempt)
