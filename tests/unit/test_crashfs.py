"""CrashFiles answers as a real file system does, and loses what a real one may lose."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distckpt.durable import REAL, Files, Item
from distckpt.ordered import create_exclusively, make_dir, replace, to_trash, write_new
from distckpt.removal import remove_tree
from distckpt.testing.crashfs import CrashFiles, PowerCut, write_payload


@pytest.fixture(params=["real", "crash", "faulty"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Files, str]:
    """The same behaviours are asked of the real file system and of the one in memory."""
    if request.param == "real":
        return REAL, str(tmp_path)
    if request.param == "faulty":
        from distckpt.testing.faults import FaultyFiles

        return FaultyFiles(CrashFiles("/a/b")), "/a/b"
    return CrashFiles("/a/b"), "/a/b"


def refused(*numbers: int) -> Callable[[Callable[[], object]], None]:
    def check(call: Callable[[], object]) -> None:
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno in numbers, caught.value

    return check


def test_a_file_is_written_read_and_measured(place: tuple[Files, str]) -> None:
    files, top = place
    out = files.open(f"{top}/f")
    assert out.write(b"abc") == 3 and out.write(memoryview(b"def")) == 3
    out.start_writeback(0, 6)
    out.drop_cache(0, 6)
    out.fsync()
    out.close()
    assert files.read(f"{top}/f", 100) == b"abcdef" and files.read(f"{top}/f", 4) == b"abcd"
    assert b"".join(bytes(p) for p in files.pieces(f"{top}/f")) == b"abcdef"
    seen = files.stat(f"{top}/f")
    assert (seen.kind, seen.size) == ("file", 6)
    assert files.stat(top).kind == "dir" and files.is_dir(top) and not files.is_dir(f"{top}/f")
    assert files.free(top) > 0 and files.real(f"{top}/x/..") == files.real(top)
    assert files.is_dir(files.mount_point(top)) and not files.is_network("/nowhere")


def test_a_name_is_made_once(place: tuple[Files, str]) -> None:
    files, top = place
    files.open(f"{top}/f").close()
    files.mkdir(f"{top}/d")
    refused(errno.EEXIST)(lambda: files.open(f"{top}/f"))
    refused(errno.EEXIST)(lambda: files.mkdir(f"{top}/d"))
    refused(errno.EEXIST)(lambda: files.mkdir(f"{top}/f"))
    assert make_dir(files, f"{top}/d") is False
    refused(errno.EEXIST)(lambda: make_dir(files, f"{top}/f"))


def test_what_is_absent_or_of_another_kind_says_so(place: tuple[Files, str]) -> None:
    files, top = place
    files.open(f"{top}/f").close()
    files.mkdir(f"{top}/d")
    for call in (lambda: files.scan(f"{top}/no"), lambda: files.stat(f"{top}/no"), lambda: files.read(f"{top}/no", 1),
                 lambda: files.open(f"{top}/no/f"), lambda: files.mkdir(f"{top}/no/d"), lambda: files.unlink(f"{top}/no"),
                 lambda: files.rmdir(f"{top}/no"), lambda: files.rename(f"{top}/no", f"{top}/x"),
                 lambda: files.rename(f"{top}/f", f"{top}/no/f"), lambda: files.fsync(f"{top}/no"),
                 lambda: files.fsync_dir(f"{top}/no"), lambda: files.link(f"{top}/no", f"{top}/x"),
                 lambda: files.exchange(f"{top}/f", f"{top}/no"), lambda: list(files.pieces(f"{top}/no")),
                 lambda: files.append(f"{top}/no/f", b"")):
        refused(errno.ENOENT)(call)
    for call in (lambda: files.scan(f"{top}/f"), lambda: files.stat(f"{top}/f/x"), lambda: files.open(f"{top}/f/x"),
                 lambda: files.mkdir(f"{top}/f/x"), lambda: files.rmdir(f"{top}/f"), lambda: files.fsync_dir(f"{top}/f"),
                 lambda: files.rename(f"{top}/d", f"{top}/f"), lambda: files.folder(top, "f"),
                 lambda: files.folder(top, "").folder("f")):
        refused(errno.ENOTDIR)(call)
    refused(errno.EISDIR)(lambda: files.unlink(f"{top}/d"))
    refused(errno.EISDIR)(lambda: files.rename(f"{top}/f", f"{top}/d"))
    refused(errno.EINVAL)(lambda: files.read(f"{top}/d", 1))


def test_a_directory_goes_when_it_is_empty(place: tuple[Files, str]) -> None:
    files, top = place
    write_payload(files, f"{top}/d/e/f", b"x")
    refused(errno.ENOTEMPTY)(lambda: files.rmdir(f"{top}/d"))
    remove_tree(files, top, f"{top}/d")
    assert files.scan(top) == []


def test_rename_moves_and_replaces_only_what_it_may(place: tuple[Files, str]) -> None:
    files, top = place
    write_payload(files, f"{top}/full/f", b"x")
    write_payload(files, f"{top}/source/g", b"y")
    files.mkdir(f"{top}/empty")
    refused(errno.ENOTEMPTY, errno.EEXIST)(lambda: files.rename(f"{top}/source", f"{top}/full"))
    refused(errno.EINVAL)(lambda: files.rename(f"{top}/source", f"{top}/source/inner"))
    files.rename(f"{top}/source", f"{top}/empty")
    assert files.read(f"{top}/empty/g", 9) == b"y"
    files.rename(f"{top}/empty/g", f"{top}/full/f")
    assert files.read(f"{top}/full/f", 9) == b"y" and files.scan(f"{top}/empty") == []
    files.rename(f"{top}/full/f", f"{top}/full/f")
    assert [i.name for i in files.scan(top)] == ["empty", "full"]


def test_exchange_swaps_two_names(place: tuple[Files, str]) -> None:
    files, top = place
    write_payload(files, f"{top}/a/f", b"a")
    write_payload(files, f"{top}/p/b/f", b"b")
    assert files.exchange(f"{top}/a", f"{top}/p/b") is True
    assert (files.read(f"{top}/a/f", 9), files.read(f"{top}/p/b/f", 9)) == (b"b", b"a")


def test_a_link_is_a_second_name(place: tuple[Files, str]) -> None:
    files, top = place
    write_payload(files, f"{top}/a", b"a")
    assert files.link(f"{top}/a", f"{top}/b") is True
    refused(errno.EEXIST)(lambda: files.link(f"{top}/a", f"{top}/b"))
    files.unlink(f"{top}/a")
    assert files.read(f"{top}/b", 9) == b"a"
    files.mkdir(f"{top}/d")
    assert files.link(f"{top}/d", f"{top}/e") is False


def test_overwrite_and_append_make_the_file(place: tuple[Files, str]) -> None:
    files, top = place
    files.overwrite(f"{top}/beat", b"0001")
    files.overwrite(f"{top}/beat", b"02")
    files.append(f"{top}/log", b"a\n")
    files.append(f"{top}/log", b"b\n")
    assert files.read(f"{top}/beat", 9) == b"0201" and files.read(f"{top}/log", 9) == b"a\nb\n"


def test_an_open_file_goes_on_while_its_directory_is_renamed(place: tuple[Files, str]) -> None:
    files, top = place
    files.mkdir(f"{top}/d")
    out = files.open(f"{top}/d/f")
    out.write(b"before ")
    files.rename(f"{top}/d", f"{top}/moved")
    out.write(b"after")
    out.fsync()
    out.close()
    assert files.read(f"{top}/moved/f", 99) == b"before after"


def test_a_listing_is_sorted_and_says_what_each_entry_is(place: tuple[Files, str]) -> None:
    files, top = place
    files.mkdir(f"{top}/d")
    files.open(f"{top}/b").close()
    if isinstance(files, CrashFiles):
        files.symlink(f"{top}/a")
    else:
        os.symlink("b", f"{top}/a") if files is REAL else files.inner.symlink(f"{top}/a")  # type: ignore[attr-defined]
    assert files.scan(top) == [Item("a", "link"), Item("b", "file"), Item("d", "dir")]
    assert files.stat(f"{top}/a").kind == "link"
    refused(errno.ELOOP)(lambda: files.read(f"{top}/a", 9))
    refused(errno.ELOOP)(lambda: files.fsync(f"{top}/a"))
    refused(errno.ELOOP)(lambda: files.append(f"{top}/a", b"x"))  # a link planted where a journal or a beat belongs
    refused(errno.ELOOP)(lambda: files.overwrite(f"{top}/a", b"x"))
    assert files.read(f"{top}/b", 9) == b""


# -- power cuts ------------------------------------------------------------------------------------------------------


def readings(disk: CrashFiles, path: str = "/d/f") -> set[bytes | None | str]:
    return {state.snapshot().get(path, "absent") for state in disk.crash_states()}


def test_an_unsynced_file_may_be_absent_empty_torn_or_whole() -> None:
    disk = CrashFiles("/d")
    write_payload(disk, "/d/f", b"abcdef", durable=False)
    assert readings(disk) == {"absent", b"", b"\0" * 6, b"abc", b"abcdef"}


def test_fsync_of_a_file_keeps_its_bytes_and_not_its_name() -> None:
    disk = CrashFiles("/d")
    write_new(disk, "/d/f", b"abc")
    assert readings(disk) == {"absent", b"abc"}
    disk.fsync_dir("/d")
    assert readings(disk) == {b"abc"}


def test_fsync_of_a_directory_keeps_its_names_and_not_their_bytes_nor_its_own_name() -> None:
    disk = CrashFiles("/d")
    write_payload(disk, "/d/f", b"abc", durable=False)
    disk.fsync_dir("/d")
    assert readings(disk) == {b"", b"\0\0\0", b"ab", b"abc"}
    disk.mkdir("/d/e")
    write_new(disk, "/d/e/g", b"x")
    disk.fsync_dir("/d/e")
    assert readings(disk, "/d/e/g") == {"absent", b"x"}


def test_a_grown_file_keeps_what_was_synced_before() -> None:
    disk = CrashFiles("/d")
    out = disk.open("/d/f")
    out.write(b"ab")
    out.fsync()
    disk.fsync_dir("/d")
    out.write(b"cdef")
    assert readings(disk) == {b"ab", b"ab\0\0\0\0", b"abcd", b"abcdef"}


def test_a_rename_is_seen_on_both_sides_or_on_neither_until_the_targets_parent_is_synced() -> None:
    disk = CrashFiles("/a", "/b")
    write_payload(disk, "/a/f", b"x")
    disk.rename("/a/f", "/b/f")

    def places() -> set[tuple[str, ...]]:
        return {tuple(p for p in state.snapshot() if p.endswith("/f")) for state in disk.crash_states()}

    assert places() == {("/a/f",), ("/b/f",)}
    disk.fsync_dir("/a")
    assert places() == {("/a/f",), ("/b/f",)}
    disk.fsync_dir("/b")
    assert places() == {("/b/f",)}


def test_an_exchange_is_durable_once_both_parents_are() -> None:
    disk = CrashFiles("/a/x", "/b/y")
    disk.exchange("/a/x", "/b/y")
    disk.open("/a/x/new").close()
    disk.fsync_dir("/a/x")
    found = {tuple(state.snapshot()) for state in disk.crash_states()}
    assert found == {("/a", "/a/x", "/b", "/b/y", "/b/y/new"), ("/a", "/a/x", "/a/x/new", "/b", "/b/y")}
    disk.fsync_dir("/a")
    assert len(list(disk.crash_states())) == 2
    disk.fsync_dir("/b")
    assert len(list(disk.crash_states())) == 1


def test_two_changes_of_one_name_keep_their_order() -> None:
    disk = CrashFiles("/d")
    write_payload(disk, "/d/f", b"old")
    disk.unlink("/d/f")
    write_new(disk, "/d/f", b"new")
    assert readings(disk) == {b"old", "absent", b"new"}


def test_a_replaced_file_is_old_or_new_and_after_the_sync_new() -> None:
    disk = CrashFiles("/d")
    write_payload(disk, "/d/f", b"old")
    write_new(disk, "/d/t", b"new")
    disk.rename("/d/t", "/d/f")
    assert readings(disk) == {b"old", b"new"}
    replace(disk, "/d/f", b"newer", "/d/t")
    assert readings(disk) == {b"newer"}


def test_unsynced_changes_of_one_directory_survive_in_any_combination() -> None:
    disk = CrashFiles("/d")
    for name in "abc":
        disk.mkdir(f"/d/{name}")
    weak = {tuple(state.snapshot()) for state in disk.crash_states()}
    ordered = {tuple(state.snapshot()) for state in disk.crash_states(ordered=True)}
    assert len(weak) == 8 and len(ordered) == 4 and ordered < weak


def test_many_changes_are_sampled_within_the_limit_and_each_state_is_given_once() -> None:
    disk = CrashFiles("/d")
    for number in range(40):
        disk.mkdir(f"/d/{number}")
    found = [tuple(state.snapshot()) for state in disk.crash_states(limit=200, seed=3)]
    assert len(found) == len(set(found)) == 200
    assert found == [tuple(state.snapshot()) for state in disk.crash_states(limit=200, seed=3)]


def test_a_failed_fsync_loses_the_bytes_although_they_can_be_read_and_a_second_fsync_succeeds() -> None:
    disk = CrashFiles("/d")
    write_payload(disk, "/d/f", b"abc", durable=False)
    disk.fsync_dir("/d")
    disk.poison("/d/f")
    refused(errno.EIO)(lambda: disk.fsync("/d/f"))
    disk.fsync("/d/f")
    assert disk.read("/d/f", 9) == b"abc" and readings(disk) == {b""}


def test_a_kill_loses_nothing_and_makes_nothing_durable() -> None:
    disk = CrashFiles("/d")
    write_payload(disk, "/d/f", b"abc", durable=False)
    after = disk.after_kill()
    assert after.snapshot() == disk.snapshot() and readings(after) == readings(disk)
    after.unlink("/d/f")
    assert disk.read("/d/f", 9) == b"abc"


def test_a_state_after_a_cut_is_a_disk_like_any_other() -> None:
    disk = CrashFiles("/d")
    create_exclusively(disk, "/d/f", b"abc", "/d/t")
    disk.fsync_dir("/d")
    (state,) = disk.crash_states()
    state.mkdir("/d/trash")
    write_payload(state, "/d/s/x", b"y")
    to_trash(state, "/d/s", "/d/trash/s")
    assert readings(state, "/d/trash/s/x") == {b"y"}


def test_a_machine_that_is_off_answers_nobody() -> None:
    disk = CrashFiles("/d")
    out = disk.open("/d/f")
    disk.cut()
    for call in (lambda: out.write(b"x"), lambda: disk.scan("/d"), lambda: disk.unlink("/d/f")):
        with pytest.raises(PowerCut):
            call()
    disk.after_kill().scan("/d")


def test_the_hook_sees_every_operation_and_may_act_in_between() -> None:
    disk = CrashFiles("/d")
    seen: list[str] = []
    disk.before_op = lambda op, path: seen.append(f"{op} {path}")
    disk.mkdir("/d/e")
    disk.scan("/d")
    assert seen == ["mkdir /d/e", "scan /d"]
