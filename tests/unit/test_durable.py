"""The system calls, and what ``ordered`` and ``removal`` make of them, killed at every one and cut at every moment."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distckpt import durable, pagecache
from distckpt.digest import of_file
from distckpt.durable import REAL
from distckpt.layout import MARKER
from distckpt.ordered import create_exclusively, fsync_tree_dirs, make_dir, replace, to_trash, unlink_if_there, write_new
from distckpt.removal import discard, remove_tree
from distckpt.runtime import SYSTEM, Runtime, SystemRuntime, Thread
from distckpt.saving.piecewriter import PACE, PieceWriter
from distckpt.testing.clock import VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import Fault, FaultyFiles, Killed, call, die, fail, lie, refuse, shorten
from tests.support import crash_disk, make_checkpoint


def deaths(prepare: Callable[[], CrashFiles], act: Callable[[FaultyFiles], None]) -> Iterator[tuple[int, CrashFiles]]:
    """Run ``act`` on a fresh disk, killed before its first, second, third ... operation, and at last not at all."""
    for n in range(1, 1000):
        disk = prepare()
        files = FaultyFiles(disk, die(n))
        try:
            act(files)
        except Killed:
            yield n, disk
        else:
            assert not files.faults[0].fired and n > 1
            yield n, disk
            return
    raise AssertionError("it never ended")


def test_a_replaced_file_is_old_or_new_at_every_moment() -> None:
    def prepare() -> CrashFiles:
        disk = CrashFiles("/d")
        write_payload(disk, "/d/f", b"old")
        write_payload(disk, "/d/t", b"left over")
        return disk

    last: set[bytes | None] = set()
    for _, disk in deaths(prepare, lambda files: replace(files, "/d/f", b"new", "/d/t")):
        assert disk.read("/d/f", 9) in (b"old", b"new")
        last = {state.snapshot()["/d/f"] for state in disk.crash_states()}
        assert last <= {b"old", b"new"}
    assert last == {b"new"}


def test_an_exclusive_record_appears_whole_or_not_at_all() -> None:
    for _, disk in deaths(lambda: CrashFiles("/d"), lambda files: create_exclusively(files, "/d/f", b"record", "/d/t")):
        assert disk.snapshot().get("/d/f", b"record") == b"record"
        assert {state.snapshot().get("/d/f", b"record") for state in disk.crash_states()} == {b"record"}


@pytest.mark.parametrize("links", [True, False])
def test_of_two_that_create_one_record_exactly_one_wins(links: bool) -> None:
    disk = CrashFiles("/d")
    disk.links_supported = links
    create_exclusively(disk, "/d/f", b"first", "/d/t1")
    with pytest.raises(FileExistsError):
        create_exclusively(disk, "/d/f", b"second", "/d/t2")
    assert disk.snapshot() == {"/d": None, "/d/f": b"first"}


def test_an_fsync_that_failed_is_never_tried_again_and_the_file_is_closed() -> None:
    files = FaultyFiles(CrashFiles("/d"), fail(errno.EIO, op="fsync"))
    with pytest.raises(OSError) as caught:
        write_new(files, "/d/f", b"abc")
    assert caught.value.errno == errno.EIO
    assert [o.op for o in files.log] == ["open", "write", "fsync", "close"]


@pytest.mark.parametrize("op", ["open", "write", "fsync", "close"])
def test_every_step_of_a_write_can_fail_and_is_reported(op: str) -> None:
    files = FaultyFiles(CrashFiles("/d"), fail(errno.ENOSPC, op=op))
    with pytest.raises(OSError) as caught:
        write_new(files, "/d/f", b"abc")
    assert caught.value.errno == errno.ENOSPC and files.fired


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(durable.os, "write", lambda fd, data: real(fd, data[:3]))
    out = REAL.open(str(tmp_path / "f"))
    assert out.write(b"0123456789") == 10
    out.close()
    assert (tmp_path / "f").read_bytes() == b"0123456789"


@pytest.mark.parametrize("fault", [lie(op="write"), shorten(op="write"), lie(op="open")])
def test_a_disk_that_says_yes_and_writes_less_is_found_out(fault: Fault) -> None:
    """Else a torn marker would be published, or put in the place of a good one."""
    disk = CrashFiles("/d")
    write_payload(disk, "/d/f", b"old")
    files = FaultyFiles(disk, fault)
    with pytest.raises(OSError, match="/d/t"):
        replace(files, "/d/f", b"new one", "/d/t")
    assert files.fired and disk.read("/d/f", 9) == b"old"


def test_a_directory_where_a_file_stands_is_an_error() -> None:
    disk = CrashFiles("/d")
    write_new(disk, "/d/f", b"")
    with pytest.raises(FileExistsError):
        make_dir(disk, "/d/f")
    assert make_dir(disk, "/d/e") is True and make_dir(disk, "/d/e") is False


def test_only_absence_is_forgiven_when_a_file_is_removed() -> None:
    disk = CrashFiles("/d/e")
    unlink_if_there(disk, "/d/no")
    with pytest.raises(OSError):
        unlink_if_there(disk, "/d/e")


# -- S9 --------------------------------------------------------------------------------------------------------------


def test_S9_every_name_below_is_durable_after_the_tree_is_synced() -> None:
    disk = CrashFiles("/d")
    for path in ("/d/c/a", "/d/c/s/b", "/d/c/s/t/c"):
        here = os.path.dirname(path)
        while not disk.is_dir(here):
            disk.mkdir(here) if disk.is_dir(os.path.dirname(here)) else disk.mkdir(os.path.dirname(here))
        write_new(disk, path, b"x")
    fsync_tree_dirs(disk, "/d/c")
    disk.fsync_dir("/d")
    assert len(list(disk.crash_states())) == 1


def test_S9_children_are_synced_before_parents() -> None:
    files = FaultyFiles(CrashFiles("/d/c/s/t"))
    fsync_tree_dirs(files, "/d/c")
    assert [o.path for o in files.log] == ["/d/c/s/t", "/d/c/s", "/d/c"]


# -- S3, S21: removals -------------------------------------------------------------------------------------------------


def tree(disk: CrashFiles, top: str) -> dict[str, bytes | None]:
    return {path[len(top):]: data for path, data in disk.snapshot().items() if path.startswith(top + "/")}


def test_S3_a_removal_that_is_killed_or_cut_never_leaves_a_marker_over_a_partial_tree() -> None:
    def prepare() -> CrashFiles:
        disk = CrashFiles("/disk/trash")
        make_checkpoint(disk, 1, directory="/disk/trash/victim")
        return disk

    whole = tree(prepare(), "/disk/trash/victim")
    for n, disk in deaths(prepare, lambda files: discard(files, "/disk", "/disk/trash/victim", MARKER)):
        for state in [disk, *disk.crash_states()]:
            left = tree(state, "/disk/trash/victim")
            if f"/{MARKER}" in left:
                assert left == whole, n


def test_S3_the_marker_inside_an_attempt_goes_first_too() -> None:
    def prepare() -> CrashFiles:
        disk = CrashFiles("/disk/trash/attempt")
        make_checkpoint(disk, 1, directory="/disk/trash/attempt/step-1")
        return disk

    whole = tree(prepare(), "/disk/trash/attempt")
    for n, disk in deaths(prepare, lambda files: discard(files, "/disk", "/disk/trash/attempt", MARKER)):
        for state in [disk, *disk.crash_states()]:
            left = tree(state, "/disk/trash/attempt")
            if f"/step-1/{MARKER}" in left:
                assert left == whole, n


def test_S21_nothing_is_unlinked_durably_before_the_move_to_trash_is() -> None:
    def prepare() -> CrashFiles:
        disk = crash_disk()
        make_checkpoint(disk, 1, root="/disk")
        disk.mkdir("/disk/trash")
        disk.fsync_dir("/disk")
        return disk

    def act(files: FaultyFiles) -> None:
        to_trash(files, "/disk/step-1", "/disk/trash/step-1")
        discard(files, "/disk", "/disk/trash/step-1", MARKER)

    whole = tree(prepare(), "/disk/step-1")
    for n, disk in deaths(prepare, act):
        for state in [disk, *disk.crash_states()]:
            if state.is_dir("/disk/step-1"):
                assert tree(state, "/disk/step-1") == whole, n


def test_S21_both_parents_are_synced_before_to_trash_returns() -> None:
    files = FaultyFiles(CrashFiles("/d/victim", "/d/trash"))
    to_trash(files, "/d/victim", "/d/trash/victim")
    assert [(o.op, o.path) for o in files.log] == [("rename", "/d/victim"), ("fsync_dir", "/d/trash"), ("fsync_dir", "/d")]


def test_a_removal_never_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "f").write_bytes(b"x")
    (tmp_path / "victim").mkdir()
    os.symlink(tmp_path / "precious", tmp_path / "victim" / "link")
    os.symlink(tmp_path / "precious", tmp_path / "alias")
    remove_tree(REAL, str(tmp_path), str(tmp_path / "victim"))
    remove_tree(REAL, str(tmp_path), str(tmp_path / "alias"))
    discard(REAL, str(tmp_path), str(tmp_path / "nothing"), MARKER)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"] and (tmp_path / "precious" / "f").exists()


def test_what_vanishes_during_a_removal_is_no_error() -> None:
    disk = CrashFiles("/d")
    write_payload(disk, "/d/v/a", b"")
    write_payload(disk, "/d/v/s/b", b"")
    files = FaultyFiles(disk, call(lambda o: remove_tree(disk, "/d", "/d/v"), op="unlink", path="/d/v/a"))
    remove_tree(files, "/d", "/d/v")
    assert files.fired and disk.snapshot() == {"/d": None}


def test_a_busy_directory_is_reported() -> None:
    files = FaultyFiles(CrashFiles("/d/v/e"), fail(errno.ENOTEMPTY, op="rmdir", path="/d/v/e"))
    with pytest.raises(OSError):
        remove_tree(files, "/d", "/d/v")


def _many(top: Path) -> None:
    for number in range(200):
        folder = top / f"d{number % 3}" / ("deep" if number % 2 else "")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}").write_bytes(b"x")
        (top / f"{number}").write_bytes(b"x")
    (top / MARKER).write_bytes(b"{}")


class _Quick(SystemRuntime):
    """Its threads do all there is to do before the caller begins."""

    def thread(self, name: str, target: Callable[[], None], daemon: bool = True) -> Thread:
        thread = super().thread(name, target, daemon)
        thread.join()
        return thread


def test_threads_help_to_delete_what_is_much_and_the_marker_goes_first(tmp_path: Path) -> None:
    _many(tmp_path / "v")
    files = FaultyFiles()
    discard(files, str(tmp_path), str(tmp_path / "v"), MARKER, _Quick())
    assert list(tmp_path.iterdir()) == [] and len({o.thread for o in files.log}) > 1
    assert files.log[0].path.endswith(MARKER) and [o.op for o in files.log[:2]] == ["unlink", "fsync_dir"]
    assert len(files.operations("unlink", "/v/")) == 401 + 3 and files.log[-1] == files.operations("rmdir")[-1]


@pytest.mark.parametrize("runtime", [None, SYSTEM, VirtualRuntime()], ids=["alone", "helped", "by threads that never run"])
def test_what_one_of_the_threads_meets_is_raised_when_all_have_ended(tmp_path: Path, runtime: Runtime | None) -> None:
    _many(tmp_path / "v")
    files = FaultyFiles(REAL, fail(errno.EIO, op="unlink", path="/v/150"))
    with pytest.raises(OSError, match="/v/150"):
        discard(files, str(tmp_path), str(tmp_path / "v"), MARKER, runtime)
    assert (tmp_path / "v" / "150").exists() and not (tmp_path / "v" / MARKER).exists()
    before = len(files.log)
    discard(files, str(tmp_path), str(tmp_path / "v"), MARKER, runtime)
    assert list(tmp_path.iterdir()) == [] and len(files.log) > before


@pytest.mark.parametrize("made", [0, 3])
def test_where_threads_are_few_no_late_one_deletes_by_a_descriptor_that_leads_elsewhere_by_then(tmp_path: Path,
                                                                                                made: int) -> None:
    """A thread that begins when the directory is closed would unlink in whatever has got its descriptor since."""
    class Late:
        """A thread that begins when it is waited for."""

        def __init__(self, target: Callable[[], None]) -> None:
            self.go = threading.Event()
            self.thread = SYSTEM.thread("late", lambda: (self.go.wait(20), target())[1])

        def join(self, timeout: float | None = None) -> None:
            self.go.set()
            self.thread.join(timeout)

        def is_alive(self) -> bool:
            return self.thread.is_alive()

    late = list[Late]()

    class Poor(SystemRuntime):
        def cores(self) -> int:
            return 4

        def thread(self, name: str, target: Callable[[], None], daemon: bool = True) -> Thread:
            if len(late) == made:
                raise RuntimeError("can't start new thread")
            late.append(Late(target))
            return late[-1]

    _many(tmp_path / "v")
    remove_tree(REAL, str(tmp_path), str(tmp_path / "v"), Poor())
    assert list(tmp_path.iterdir()) == [] and len(late) == made and not any(thread.is_alive() for thread in late)


# -- S13 -------------------------------------------------------------------------------------------------------------


def test_S13_a_plain_rename_never_replaces_a_checkpoint(tmp_path: Path) -> None:
    disk = CrashFiles("/disk")
    for files, top in ((disk, "/disk"), (REAL, str(tmp_path))):
        make_checkpoint(files, 1, root=top, files=files)
        make_checkpoint(files, 2, root=top, files=files)
        with pytest.raises(OSError) as caught:
            files.rename(f"{top}/step-2", f"{top}/step-1")
        assert caught.value.errno in durable.TAKEN


def test_S13_a_missing_exchange_is_told_by_its_result_and_not_by_an_error() -> None:
    files = FaultyFiles(CrashFiles("/d/a", "/d/b"), refuse("exchange"))
    assert files.exchange("/d/a", "/d/b") is False


def test_reading_never_waits_for_a_pipe_nor_follows_a_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError) as caught:
        REAL.read(str(tmp_path / "pipe"), 10)
    assert caught.value.errno == errno.EINVAL
    assert REAL.stat(str(tmp_path / "pipe")).kind == "other" and REAL.scan(str(tmp_path))[0].kind == "other"


def test_files_and_directories_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        REAL.mkdir(str(tmp_path / "d"))
        write_new(REAL, str(tmp_path / "d" / "f"), b"")
    finally:
        os.umask(before)
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o750 and (tmp_path / "d" / "f").stat().st_mode & 0o777 == 0o640


def test_a_claim_that_failed_half_way_leaves_no_record_that_would_speak_for_it() -> None:
    disk = CrashFiles("/d")
    disk.links_supported = False
    files = FaultyFiles(disk, fail(errno.EIO, op="fsync", path=lambda p: p == "/d/f"))
    with pytest.raises(OSError, match="Input/output"):
        create_exclusively(files, "/d/f", b"record", "/d/t")
    assert disk.scan("/d") == []


def test_a_temporary_that_was_left_behind_is_in_nobodys_way() -> None:
    disk = CrashFiles("/d")
    write_payload(disk, "/d/t", b"of one that was killed")
    create_exclusively(disk, "/d/f", b"record", "/d/t")
    assert disk.read("/d/f", 99) == b"record" and [item.name for item in disk.scan("/d")] == ["f"]


def _complain(*rest: object, **more: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _below(path: str) -> tuple[str, str]:
    return os.path.dirname(os.path.dirname(path)), os.path.relpath(os.path.dirname(path), os.path.dirname(os.path.dirname(path)))


@pytest.mark.parametrize(("call", "act"), [
    ("write", lambda path: REAL.open(f"{path}.new").write(b"x")),
    ("fsync", lambda path: REAL.open(f"{path}.new").fsync()),
    ("close", lambda path: REAL.open(f"{path}.new").close()),
    ("pwrite", lambda path: REAL.overwrite(path, b"x")),
    ("write", lambda path: REAL.append(path, b"x")),
    ("fsync", lambda path: REAL.fsync(path)),
    ("fsync", lambda path: REAL.fsync_dir(os.path.dirname(path))),
    ("read", lambda path: REAL.read(path, 10)),
    ("readv", lambda path: next(REAL.pieces(path))),
    ("unlink", lambda path: REAL.folder(*_below(path)).unlink(os.path.basename(path))),
    ("rmdir", lambda path: REAL.folder(*_below(path)).rmdir(os.path.basename(path))),
    ("scandir", lambda path: REAL.folder(*_below(path)).scan()),
])
def test_an_error_on_a_descriptor_names_the_file(call: str, act: Callable[[str], object], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own does not (I9); strace in place of the seam showed it."""
    path = tmp_path / "some" / "file"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setattr(os, call, _complain)
    with pytest.raises(OSError) as caught:
        act(str(path))
    wanted = {"scandir": str(path.parent)}.get(call, str(path))
    assert str(caught.value.filename) in (wanted, f"{wanted}.new", str(path.parent)) and caught.value.errno == errno.EIO
    assert "some" in str(caught.value)


# -- hints to the page cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", ["sync_file_range", "posix_fadvise", "both"])
def test_where_there_are_no_hints_the_same_bytes_are_as_durable(lacking: str, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has neither: a save is slower there, and nothing else; the fsync is what counts."""
    if lacking != "posix_fadvise":
        monkeypatch.setattr(pagecache, "_SYNC_RANGE", None)
    if lacking != "sync_file_range":
        monkeypatch.delattr(os, "posix_fadvise")
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd))[1])
    out, path = REAL.open(str(tmp_path / "f")), str(tmp_path / "f")
    with PieceWriter(out, path, "xxh3-128", lambda size: None) as file:
        file.write(bytes(6 * PACE))
    REAL.start_writeback(path)
    REAL.drop_cache(path)
    assert len(synced) == 1 and file.durable and file.digest == of_file(REAL, path)[1]


@pytest.mark.parametrize(("number", "raised"), [
    (errno.EIO, True), (errno.ENOSPC, True), (errno.EDQUOT, True), (errno.ENOSYS, False), (errno.EINVAL, False),
    (errno.EOPNOTSUPP, False)])
def test_a_hint_that_a_file_system_does_not_take_is_left_out_and_a_write_error_is_not(
        number: int, raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*args: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(pagecache, "_SYNC_RANGE", answer)
    path = str(tmp_path / "f")
    out = REAL.open(path)
    hints = (lambda: out.start_writeback(0, 8), lambda: out.await_writeback(0, 8), lambda: REAL.start_writeback(path))
    for hint in hints:
        if raised:
            with pytest.raises(OSError, match="/f'") as caught:
                hint()
            assert caught.value.errno == number
        else:
            hint()
    out.close()


def test_hints_for_a_file_that_is_not_there_are_left_out(tmp_path: Path) -> None:
    """Whoever makes it durable says what is wrong with it."""
    REAL.start_writeback(str(tmp_path / "none"))
    REAL.drop_cache(str(tmp_path / "none"))
