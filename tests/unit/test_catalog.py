"""One gate for everybody: what is a checkpoint, and what is only named like one."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from distckpt import catalog, marker
from distckpt.catalog import Entry, RootRecord, check_file, check_files, read_marker, read_pointer, read_record, scan
from distckpt.durable import REAL
from distckpt.errors import MarkerError
from distckpt.layout import MARKER, Layout, Naming
from distckpt.marker import FileEntry
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, call, fail
from tests.support import ROOT, STEP, attempt_id, crash_disk, make_checkpoint

LAYOUT = Layout.at(ROOT)


def test_a_file_that_another_client_removed_while_it_was_open_is_missing_and_one_that_stays_is_in_doubt(disk: CrashFiles) -> None:
    entry = make_checkpoint(disk, 1, payload={"model.pt": b"weights"}).files[0]
    stale = fail(errno.ESTALE, op="read", path="model.pt")
    found = check_file(FaultyFiles(disk, stale), LAYOUT.final("step-1"), entry, digest=True)
    assert found is not None and not found.certain and found.passing
    gone = FaultyFiles(disk, call(lambda o: disk.unlink(o.path), op="read", path="model.pt"), replace(stale, seen=0, fired=0))
    found = check_file(gone, LAYOUT.final("step-1"), entry, digest=True)
    assert gone.fired and found is not None and found.certain and found.what == "is missing"


def test_a_digest_that_this_version_does_not_know_proves_nothing(disk: CrashFiles) -> None:
    entry = make_checkpoint(disk, 1, payload={"model.pt": b"weights"}).files[0]
    found = check_file(disk, LAYOUT.final("step-1"), entry._replace(digest="blake9:00"), digest=True)
    assert found is not None and not found.certain and "'blake9', which this version does not know" in found.what


def test_a_record_that_is_seen_late_is_read_to_its_limit_too() -> None:
    asked: list[int] = []

    class Late(CrashFiles):
        def read(self, path: str, limit: int) -> bytes:
            asked.append(limit)
            if len(asked) == 1:
                raise FileNotFoundError(errno.ENOENT, "as this client remembers", path)
            return super().read(path, limit)

    late = Late("/disk")
    write_payload(late, LAYOUT.record, RootRecord("run", STEP).to_bytes())
    assert read_record(late, LAYOUT) == RootRecord("run", STEP) and asked == [1 << 20] * 2


@pytest.fixture
def disk() -> CrashFiles:
    found = crash_disk()
    found.mkdir(ROOT)
    return found


def problems(disk: CrashFiles, naming: Naming = STEP) -> dict[str, str | None]:
    return {e.name: e.problem for e in scan(disk, LAYOUT, naming)}


def test_a_listing_is_newest_commit_first_whatever_the_step(disk: CrashFiles) -> None:
    for step, seq in ((100, 1), (5000, 2), (300, 3), (7, 0), (9, 0)):
        make_checkpoint(disk, step, seq, attempt=attempt_id(1000 + step))
    write_payload(disk, f"{ROOT}/step-6000/model.pt", b"")
    found = scan(disk, LAYOUT, STEP)
    assert [e.name for e in found] == ["step-300", "step-5000", "step-100", "step-9", "step-7", "step-6000"]
    assert [e.committed for e in found] == [True] * 5 + [False]


def test_what_is_not_named_like_a_checkpoint_is_not_seen(disk: CrashFiles) -> None:
    for name in ("latest", "notes", "step-1.tmp", "step-1-rolling-tmp", "xstep-1", ".distckpt/staging/1/a/step-1", "steps"):
        write_payload(disk, f"{ROOT}/{name}/{MARKER}" if name != "latest" else f"{ROOT}/latest", b"x")
    assert problems(disk) == {}


def test_each_broken_entry_says_what_is_wrong_with_it(disk: CrashFiles) -> None:
    write_payload(disk, f"{ROOT}/step-1/pytorch_model.bin", b"x")
    write_payload(disk, f"{ROOT}/step-2", b"a file")
    disk.symlink(f"{ROOT}/step-3")
    write_payload(disk, f"{ROOT}/step-4/{MARKER}", b"{}")
    disk.mkdir(f"{ROOT}/step-5")
    disk.mkdir(f"{ROOT}/step-6")
    disk.mkdir(f"{ROOT}/step-6/{MARKER}")
    found = problems(disk)
    assert found.pop("step-1") == "it has files but no commit.json: never committed, or not written by distckpt"
    assert found.pop("step-2") == "it is a file, not a directory"
    assert found.pop("step-3") == "it is a symlink, not a directory"
    assert "does not begin with a head" in (found.pop("step-4") or "")
    assert "cannot be read" in (found.pop("step-6") or "")
    assert found == {}  # an empty directory is no checkpoint, and no broken one (S13)


def test_S13_an_empty_directory_is_no_entry_at_all(disk: CrashFiles) -> None:
    disk.mkdir(f"{ROOT}/step-5")
    assert scan(disk, LAYOUT, STEP) == []


@pytest.mark.parametrize(("name", "said"), [
    ("step-2", "belongs to 'step-1', not 'step-2' (a renamed or padded copy)"), ("step-01", "a renamed or padded copy"),
    ("step-00000001", "a renamed or padded copy"), ("step-1-rolling", "a renamed or padded copy")])
def test_S24_a_copy_under_another_name_or_padding_is_not_that_checkpoint(disk: CrashFiles, name: str, said: str) -> None:
    make_checkpoint(disk, 1, 5)
    make_checkpoint(disk, 1, 5, directory=f"{ROOT}/{name}")
    found = {e.name: e for e in scan(disk, LAYOUT, STEP)}
    assert found["step-1"].committed
    assert not found[name].committed and said in (found[name].problem or "")


@pytest.mark.parametrize("identity", [{"name": "step-1", "step": 2}, {"name": "step-1", "series": "rolling"}])
def test_S24_name_step_and_series_of_a_marker_agree_with_the_directory(disk: CrashFiles, identity: dict[str, object]) -> None:
    step = int(identity.pop("step", 1))  # type: ignore[call-overload]
    make_checkpoint(disk, step, 5, directory=f"{ROOT}/step-1", **identity)
    (entry,) = scan(disk, LAYOUT, STEP)
    assert not entry.committed and "its marker says step" in (entry.problem or "")


def test_a_name_that_only_begins_like_a_series_is_never_taken(disk: CrashFiles) -> None:
    naming = Naming.parse("checkpoint-{step}")
    make_checkpoint(disk, 200, 1, series="rolling", naming=naming)
    make_checkpoint(disk, 200, 2, directory=f"{ROOT}/checkpoint-200-rolling-tmp", name="checkpoint-200-rolling-tmp",
                    series="rolling")
    (entry,) = scan(disk, LAYOUT, naming)
    assert (entry.name, entry.series, entry.step, entry.committed) == ("checkpoint-200-rolling", "rolling", 200, True)


def test_S7_a_root_that_cannot_be_listed_raises(disk: CrashFiles) -> None:
    with pytest.raises(OSError):
        scan(FaultyFiles(disk, fail(errno.EIO, op="scan", path=ROOT)), LAYOUT, STEP)


def test_an_unreadable_marker_is_a_problem_of_its_entry_and_not_of_the_listing(disk: CrashFiles) -> None:
    make_checkpoint(disk, 1)
    make_checkpoint(disk, 2)
    files = FaultyFiles(disk, fail(errno.EACCES, op="read", path="step-2"))
    found = {e.name: e.problem for e in scan(files, LAYOUT, STEP)}
    assert found["step-1"] is None and "cannot be read: Permission denied" in (found["step-2"] or "")


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_regular_of_its_size_and_of_its_bytes(tmp_path: Path) -> None:
    found = make_checkpoint(str(tmp_path), 1)
    directory = str(tmp_path / "step-1")
    assert check_files(REAL, directory, found.files, digest=True) == []
    path = tmp_path / "step-1" / "model.pt"
    data = path.read_bytes()

    def what(digest: bool = False) -> list[tuple[str, str, bool]]:
        return [(p.path, p.what, p.certain) for p in check_files(REAL, directory, found.files, digest)]

    path.write_bytes(data[:-1])
    assert what() == [("model.pt", f"has {len(data) - 1} bytes, the marker says {len(data)}", True)]
    path.write_bytes(b"X" + data[1:])
    assert what() == [] and "has digest" in what(digest=True)[0][1] and what(digest=True)[0][2]
    path.unlink()
    assert what() == [("model.pt", "is missing", True)]
    os.symlink(tmp_path / "step-1" / "sub" / "optim.pt", path)
    assert what() == [("model.pt", "is a link, not a regular file", True)]
    path.unlink()
    path.mkdir()
    assert what() == [("model.pt", "is a dir, not a regular file", True)]


def test_S23_cannot_tell_is_told_from_bad(disk: CrashFiles) -> None:
    found = make_checkpoint(disk, 1)
    entry = found.files[0]
    for number, certain in ((errno.EIO, False), (errno.ESTALE, False), (errno.EACCES, False), (errno.ENOENT, True),
                            (errno.ENOTDIR, True)):
        files = FaultyFiles(disk, fail(number, op="stat", path=entry.path))
        problem = check_file(files, LAYOUT.final("step-1"), entry)
        assert problem is not None and problem.certain is certain, number
    problem = check_file(disk, LAYOUT.final("step-1"), FileEntry(entry.path, entry.size, None, 0), digest=True)
    assert problem is not None and not problem.certain


def test_strangers_are_files_that_the_manifest_does_not_name(disk: CrashFiles) -> None:
    found = make_checkpoint(disk, 1)
    write_payload(disk, LAYOUT.final("step-1") + "/sub/extra.bin", b"")
    disk.symlink(LAYOUT.final("step-1") + "/link")
    assert catalog.strangers(disk, LAYOUT.final("step-1"), [f.path for f in found.files]) == ["link", "sub/extra.bin"]


def test_a_marker_is_read_whole_and_sealed(disk: CrashFiles) -> None:
    found = make_checkpoint(disk, 1)
    assert read_marker(disk, LAYOUT.final("step-1")) == found
    path = LAYOUT.final("step-1") + "/" + MARKER
    data = disk.read(path, 1 << 20)
    disk.unlink(path)
    write_payload(disk, path, data.replace(b'"world":1', b'"world":2'))
    assert scan(disk, LAYOUT, STEP)[0].committed  # a head orders, it never counts (S15)
    with pytest.raises(MarkerError, match="seal does not match"):
        read_marker(disk, LAYOUT.final("step-1"))


# -- the records of the root -------------------------------------------------------------------------------------------


def test_root_json_reads_back_and_its_absence_is_told_from_damage(disk: CrashFiles) -> None:
    assert read_record(disk, LAYOUT) is None
    record = RootRecord("run-a", Naming.parse("ckpt-{step:08d}"))
    write_payload(disk, LAYOUT.record, record.to_bytes())
    assert read_record(disk, LAYOUT) == record


@pytest.mark.parametrize(("data", "said"), [
    (b"", "not readable"), (b"{", "not readable"), (b"[]", "not readable"), (b'{"format": 1}', "not readable"),
    (b'{"format": 1, "run": "r", "naming": "no-step"}', "not readable"),
    (b'{"format": "x", "run": "r", "naming": "s-{step}"}', "not readable"),
    (b'{"format": 2, "run": "r", "naming": "s-{step}"}', "upgrade distckpt")])
def test_S7_an_unreadable_root_json_raises_and_says_what_to_do(disk: CrashFiles, data: bytes, said: str) -> None:
    write_payload(disk, LAYOUT.record, data)
    with pytest.raises(MarkerError, match=said):
        read_record(disk, LAYOUT)
    with pytest.raises(OSError):
        read_record(FaultyFiles(disk, fail(errno.EIO, op="read")), LAYOUT)


def test_the_pointer_is_a_convenience(disk: CrashFiles, tmp_path: Path) -> None:
    assert read_pointer(disk, LAYOUT) is None
    write_payload(disk, LAYOUT.pointer, b"step-1\n")
    assert read_pointer(disk, LAYOUT) == "step-1"
    with pytest.raises(OSError):
        read_pointer(FaultyFiles(disk, fail(errno.EIO, op="read")), LAYOUT)
    mine = Layout.at(tmp_path)
    os.symlink("step-1", mine.pointer)  # what other tools leave there
    assert read_pointer(REAL, mine) is None
    os.unlink(mine.pointer)
    os.mkdir(mine.pointer)
    assert read_pointer(REAL, mine) is None


def test_rejections_are_read_by_attempt_and_a_torn_one_still_rejects(disk: CrashFiles) -> None:
    assert catalog.rejections(disk, LAYOUT) == {}
    write_payload(disk, LAYOUT.rejected(attempt_id(1)), b'{"reason": "size differs"}')
    write_payload(disk, LAYOUT.rejected(attempt_id(2)), b'{"rea')
    assert catalog.rejections(disk, LAYOUT) == {attempt_id(1): "size differs", attempt_id(2): "rejected earlier"}
    with pytest.raises(OSError):
        catalog.rejections(FaultyFiles(disk, fail(errno.EIO, op="scan")), LAYOUT)


def test_an_entry_orders_by_commit_then_step() -> None:
    head = marker.Head(3, 9, attempt_id(3), "step-9", "main", "r", 1)
    assert Entry("step-9", 9, "main", head).order == (3, 9) and not Entry("step-9", 9, "main", None).committed
