"""A reader beside a run that rotates (L4 found these on NFS; the schedule needs no NFS)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distckpt import catalog
from distckpt.catalog import RootRecord
from distckpt.durable import REAL
from distckpt.errors import NoUsableCheckpoint, StepNotFound
from distckpt.layout import MARKER, Layout
from distckpt.reader import Root
from distckpt.removal import discard
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import Fault, FaultyFiles, Operation, call
from tests.support import ROOT, RUN, STEP, make_checkpoint


def rotate(disk: CrashFiles, old: int, new: int) -> None:
    """The run goes on by one checkpoint, with ``keep_last=1``."""
    make_checkpoint(disk, new)
    discard(disk, ROOT, f"{ROOT}/step-{old}", MARKER)


def root_with_step_1() -> CrashFiles:
    disk = CrashFiles(f"{ROOT}/.distckpt")
    write_payload(disk, Layout.at(ROOT).record, RootRecord(RUN, STEP).to_bytes(), durable=True)
    make_checkpoint(disk, 1)
    return disk


def rotating(*at: tuple[int, str]) -> tuple[Root, list[int]]:
    """A root with step 1, which goes on by one each time the reader comes to read the given (n-th, name)."""
    disk, steps = root_with_step_1(), [1]

    def go_on(operation: Operation) -> None:
        rotate(disk, steps[-1], steps[-1] + 1)
        steps.append(steps[-1] + 1)

    faults: list[Fault] = [call(go_on, n, op=("read", "stat"), path=name) for n, name in at]
    return Root(ROOT, FaultyFiles(disk, *faults)), steps


@pytest.mark.parametrize("at", [(1, MARKER), (2, MARKER), (1, "model.pt"), (1, "optim.pt")],
                         ids=["its head", "its marker", "its first file", "its last file"])
def test_latest_is_the_newer_one_when_rotation_takes_what_was_listed(at: tuple[int, str]) -> None:
    root, steps = rotating(at)
    newest = root.latest()
    assert steps == [1, 2]
    assert newest is not None
    assert newest.step == 2


def test_latest_follows_a_run_that_rotates_several_times_meanwhile() -> None:
    root, steps = rotating((1, "step-1/model.pt"), (1, "step-2/model.pt"), (1, "step-3/model.pt"))
    newest = root.latest()
    assert steps == [1, 2, 3, 4]
    assert newest is not None
    assert newest.step == 4


@pytest.mark.parametrize("at", [(1, MARKER), (2, MARKER)], ids=["its head", "its marker"])
def test_the_list_is_not_empty_because_rotation_took_what_was_listed(at: tuple[int, str]) -> None:
    root, _ = rotating(at)
    assert [found.step for found in root.checkpoints()] == [2]


def test_what_is_damaged_and_stays_is_told_at_once() -> None:
    disk = root_with_step_1()
    disk.unlink(f"{ROOT}/step-1/model.pt")
    files = FaultyFiles(disk)
    with pytest.raises(NoUsableCheckpoint, match=r"step-1: model\.pt is missing"):
        Root(ROOT, files).latest()
    assert len([o for o in files.reads if o.op == "read" and o.path.endswith(MARKER)]) == 2


def test_a_step_that_rotation_takes_meanwhile_is_not_found() -> None:
    root, _ = rotating((2, MARKER))
    with pytest.raises(StepNotFound, match="step 1 is not a committed checkpoint"):
        root.at(1)


# -- what another NFS client removed or replaced after it was opened here ------------------------------------------------


def stale_once(monkeypatch: pytest.MonkeyPatch, name: str, meanwhile: Callable[[], object], times: int = 1) -> list[str]:
    """The first ``times`` calls of ``os.<name>`` fail as NFS does when the server no longer knows the handle."""
    real: Callable[..., Any] = getattr(os, name)
    seen: list[str] = []

    def stale(*args: Any, **more: Any) -> Any:
        if len(seen) < times:
            seen.append(name)
            meanwhile()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*args, **more)

    monkeypatch.setattr(os, name, stale)
    return seen


def test_a_file_that_was_replaced_while_open_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pointer = tmp_path / "latest"
    pointer.write_bytes(b"step-1")
    seen = stale_once(monkeypatch, "read", lambda: pointer.write_bytes(b"step-2"))
    assert REAL.read(str(pointer), 100) == b"step-2"
    assert seen == ["read"]


def test_a_file_that_was_removed_while_open_is_missing_and_not_unreadable(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    lease = tmp_path / "lease.json"
    lease.write_bytes(b"{}")
    stale_once(monkeypatch, "read", lease.unlink)
    assert catalog.read_json(REAL, str(lease)) is None


def test_a_folder_that_was_removed_while_it_was_listed_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leases").mkdir()
    stale_once(monkeypatch, "scandir", (tmp_path / "leases").rmdir)
    with pytest.raises(FileNotFoundError):
        REAL.scan(str(tmp_path / "leases"))


def test_a_payload_file_that_was_removed_while_it_was_digested_is_missing(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    found = make_checkpoint(str(tmp_path), 1)

    def stale(*args: Any) -> Any:
        (tmp_path / "step-1" / "model.pt").unlink()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(catalog._digest, "of_open", stale)
    model = [entry for entry in found.files if entry.path == "model.pt"]
    (problem,) = catalog.check_files(REAL, str(tmp_path / "step-1"), model, digest=True)
    assert (problem.path, problem.what, problem.certain) == ("model.pt", "is missing", True)
    (tmp_path / "step-1" / "model.pt").write_bytes(b"x" * model[0].size)
    monkeypatch.setattr(Path, "unlink", lambda self: None)
    (problem,) = catalog.check_files(REAL, str(tmp_path / "step-1"), model, digest=True)
    assert problem.what.startswith("cannot be read") and not problem.certain, "a mount that is stale itself proves nothing"


@pytest.mark.parametrize("name", ["read", "scandir", "readv"])
def test_a_mount_that_is_stale_itself_is_an_error_and_not_an_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                     name: str) -> None:
    (tmp_path / "root.json").write_bytes(b"{}")
    look: dict[str, Callable[[], object]] = {
        "read": lambda: catalog.read_json(REAL, str(tmp_path / "root.json")), "scandir": lambda: REAL.scan(str(tmp_path)),
        "readv": lambda: list(REAL.pieces(str(tmp_path / "root.json")))}
    stale_once(monkeypatch, name, lambda: None, times=100)
    with pytest.raises(OSError) as raised:
        look[name]()
    assert raised.value.errno == errno.ESTALE
