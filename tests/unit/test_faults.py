"""FaultyFiles: the n-th operation goes wrong, and one can tell that it did."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distckpt.durable import REAL
from distckpt.ordered import replace, write_new
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.faults import (
    ENVIRONMENT,
    FaultyFiles,
    Killed,
    Operation,
    call,
    die,
    fail,
    from_environment,
    kill,
    lie,
    refuse,
    shorten,
)


def test_every_operation_that_writes_or_orders_is_counted_and_logged() -> None:
    files = FaultyFiles(CrashFiles("/d"))
    replace(files, "/d/f", b"abc", "/d/t")
    files.scan("/d")
    assert [str(o) for o in files.log] == [
        "1: unlink /d/t", "2: open /d/t", "3: write /d/t", "4: fsync /d/t", "5: close /d/t", "6: rename /d/t -> /d/f",
        "7: fsync_dir /d"]
    assert files.count == 7 and files.fired and [o.op for o in files.reads] == ["stat", "scan"]


def test_the_nth_operation_fails_once_or_from_then_on() -> None:
    files = FaultyFiles(CrashFiles("/d"), fail(errno.ENOSPC, 2, op="mkdir"))
    files.mkdir("/d/1")
    assert not files.fired
    with pytest.raises(OSError) as caught:
        files.mkdir("/d/2")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == "/d/2" and files.fired
    files.mkdir("/d/2")
    files = FaultyFiles(CrashFiles("/d"), fail(errno.EIO, forever=True, path="/d/x"))
    files.mkdir("/d/1")
    for _ in range(2):
        with pytest.raises(OSError):
            files.mkdir("/d/x")
    assert files.faults[0].fired == 2


def test_an_error_after_the_operation_is_a_lost_reply() -> None:
    files = FaultyFiles(CrashFiles("/d"), fail(errno.EIO, op="rename", after=True))
    files.mkdir("/d/1")
    with pytest.raises(OSError):
        files.rename("/d/1", "/d/2")
    assert [i.name for i in files.scan("/d")] == ["2"]


def test_a_lie_reports_success_and_does_nothing() -> None:
    disk = CrashFiles("/d")
    files = FaultyFiles(disk, lie(op="fsync"), lie(op="open", path="ghost"))
    write_new(files, "/d/f", b"abc")
    with pytest.raises(FileNotFoundError):
        write_new(files, "/d/ghost", b"abc")
    disk.fsync_dir("/d")
    assert files.fired and {state.snapshot()["/d/f"] for state in disk.crash_states()} > {b""}
    assert "/d/ghost" not in disk.snapshot()


def test_a_shortened_write_reports_the_whole() -> None:
    disk = CrashFiles("/d")
    files = FaultyFiles(disk, shorten(op="write"), shorten(op="append"))
    out = files.open("/d/f")
    assert out.write(b"abcdef") == 6
    out.close()
    files.append("/d/log", b"line")
    assert files.fired and disk.snapshot() == {"/d": None, "/d/f": b"abc", "/d/log": b"li"}


def test_what_is_struck_is_noted_before_it_has_an_effect() -> None:
    noted: list[str] = []
    fault = die(2, op="mkdir")
    fault.note = lambda operation: noted.append(str(operation))
    files = FaultyFiles(CrashFiles("/d"), fault)
    files.mkdir("/d/1")
    with pytest.raises(Killed):
        files.mkdir("/d/2")
    assert noted == ["2: mkdir /d/2"]


def test_a_death_within_the_process_lets_nobody_clean_up() -> None:
    disk = CrashFiles("/d")
    files = FaultyFiles(disk, die(3))
    with pytest.raises(Killed):
        try:
            write_new(files, "/d/f", b"abc")
        finally:
            with pytest.raises(Killed):
                files.unlink("/d/f")
    with pytest.raises(Killed):
        files.scan("/d")
    assert disk.snapshot() == {"/d": None, "/d/f": b"abc"} and files.fired


def test_exchange_and_link_can_be_refused() -> None:
    files = FaultyFiles(CrashFiles("/d/a", "/d/b"), refuse())
    write_new(files, "/d/f", b"")
    assert files.exchange("/d/a", "/d/b") is False and files.link("/d/f", "/d/g") is False
    assert FaultyFiles(CrashFiles("/d/a", "/d/b")).exchange("/d/a", "/d/b") is True


def test_a_hook_lets_another_actor_in_before_or_after() -> None:
    disk = CrashFiles("/d")
    seen: list[tuple[Operation, bool]] = []
    note = lambda o: seen.append((o, disk.is_dir("/d/e")))  # noqa: E731
    files = FaultyFiles(disk, call(note, op="mkdir"), call(note, op="mkdir", after=True))
    files.mkdir("/d/e")
    assert [there for _, there in seen] == [False, True] and seen[0][0].path == "/d/e"


def test_a_read_fails_only_when_it_is_named() -> None:
    files = FaultyFiles(CrashFiles("/d"), fail(errno.EIO, op="scan", path="/d"))
    files.stat("/d")
    with pytest.raises(OSError):
        files.scan("/d")
    assert files.count == 0 and files.fired


def test_the_environment_kills_a_process_for_real(tmp_path: Path) -> None:
    program = (f"from distckpt.ordered import write_new\nfrom distckpt.testing.faults import from_environment\n"
               f"write_new(from_environment(), {str(tmp_path / 'f')!r}, b'abc')\nprint('done')")
    environment = {**os.environ, ENVIRONMENT: "kill:2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL and done.stdout == ""
    assert (tmp_path / "f").read_bytes() == b""


def test_the_tools_need_no_torch() -> None:
    program = ("import sys, distckpt.testing.clock, distckpt.testing.crashfs, distckpt.testing.crashstates\n"
               "import distckpt.testing.faults\n"
               "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_environment_is_quiet_by_default_and_strict_when_set() -> None:
    assert from_environment(REAL, {}) is REAL
    with pytest.raises(ValueError, match="kill:<n>"):
        from_environment(REAL, {ENVIRONMENT: "kill:0"})


def test_a_kill_after_an_operation_that_failed_is_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(number))
    files = FaultyFiles(CrashFiles("/d"), kill(op="mkdir", after=True))
    with pytest.raises(FileExistsError):
        files.mkdir("/d")
    assert killed == [signal.SIGKILL]
