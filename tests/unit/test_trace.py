"""The parser of traces, and the disk that it replays: equal to the real one whatever calls a program makes, or refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from distckpt.testing.replay import InvisibleWrite, Mark, Names, Run, Sync, Write, compile_run
from distckpt.testing.trace import TraceError, capture, parse, program, read
from tests.inprocess import await_

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def _run(tmp_path: Path, source: str) -> tuple[Run, Path]:
    """The run of ``source``, which works in the directory ``base``."""
    base = tmp_path / "ba se"
    base.mkdir()
    head = f"import ctypes, mmap, os, sys, threading\nbase = {str(base)!r}\nos.chdir(base)\n"
    done = capture([program(sys.executable), "-S", "-c", head + textwrap.dedent(source)], tmp_path / "trace", cwd=base, limit=60)
    assert done.returncode == 0, done.stderr
    return compile_run(read(tmp_path / "trace", base), str(base)), base


def _real(base: Path) -> dict[str, bytes | None]:
    return {str(path): None if path.is_dir() else path.read_bytes() for path in base.rglob("*")}


def _model(run: Run, base: Path) -> dict[str, bytes | None]:
    return {path: data for path, data in run.end().snapshot().items() if path.startswith(f"{base}/")}


WAYS = {
    "descriptors": """
        fd = os.open("a", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"0123456789")
        os.pwrite(fd, b"xy", 3)
        os.writev(fd, [b"ab", b"", b"cd"])
        os.lseek(fd, 2, os.SEEK_SET)
        other = os.dup(fd)
        os.write(other, b"!")
        os.write(fd, b"?")
        os.ftruncate(fd, 9)
        os.lseek(fd, 20, os.SEEK_SET)
        os.write(fd, b"beyond a hole")
    """,
    "appending, truncating, reserving": """
        with open("a", "wb") as out: out.write(b"x" * 50)
        with open("a", "ab") as out: out.write(b"more")
        with open("b", "wb") as out: out.write(b"first")
        with open("b", "wb") as out: out.write(b"2nd")
        os.truncate("a", 30)
        fd = os.open("c", os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(fd, 0, 100)
        os.pwrite(fd, b"in", 7)
    """,
    "names": """
        os.makedirs("d/e")
        for name in ("d/a", "d/b", "d/c"):
            with open(name, "w") as out: out.write(name)
        os.link("d/a", "linked")
        os.rename("d/a", "d/e/moved")
        os.replace("d/b", "d/c")
        os.mkdir("gone"); os.rmdir("gone")
        with open("late", "w") as out:
            out.write("before"); out.flush(); os.unlink("late"); out.write("after")
        os.rename("d", "f")
        here = os.open("f", os.O_RDONLY)
        os.mkdir("below", dir_fd=here); os.rename("c", "below/c", src_dir_fd=here, dst_dir_fd=here)
        os.mkdir("x"); os.mkdir("y"); os.mkdir("x/inner")
        assert ctypes.CDLL(None).renameat2(-100, (base + "/x").encode(), -100, (base + "/y").encode(), 2) == 0
    """,
    "processes and threads": """
        fd = os.open("a", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"parent ")
        if os.fork() == 0:
            os.write(fd, b"child "); os._exit(0)
        os.wait()
        os.write(fd, b"again")
        def work(name):
            with open(name, "wb") as out:
                for part in range(20): out.write(b"%d" % part * 5000)
        threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
    """,
    "odd names and bytes": """
        for name in ('sp ace', 'qu"ote', 'back\\\\slash', 'new\\nline', 'b<r>(a) = 1', '\\xe9'):
            with open(name, "wb") as out: out.write(bytes(range(256)))
    """,
}


@needs_strace
@pytest.mark.parametrize("way", WAYS)
def test_the_model_ends_as_the_real_directory_did(way: str, tmp_path: Path) -> None:
    run, base = _run(tmp_path, WAYS[way])
    assert _real(base) and _model(run, base) == _real(base)


HIDDEN = {
    "a shared mapping": 'mmap.mmap(fd, 4096)[:2] = b"no"',
    "sendfile": 'os.sendfile(fd, os.open("b", os.O_RDONLY), 0, 10)',
    "copy_file_range": 'os.copy_file_range(os.open("b", os.O_RDONLY), fd, 10)',
    "a file without a name": "os.open(base, os.O_TMPFILE | os.O_RDWR)",
}


@needs_strace
@pytest.mark.parametrize("how", HIDDEN)
def test_what_the_trace_cannot_show_is_refused(how: str, tmp_path: Path) -> None:
    source = 'open("b", "wb").write(b"x" * 99)\nfd = os.open("a", os.O_RDWR | os.O_CREAT)\nos.ftruncate(fd, 4096)\n'
    with pytest.raises(InvisibleWrite):
        _run(tmp_path, source + HIDDEN[how])


@needs_strace
def test_what_was_not_synced_can_be_lost_and_what_was_cannot(tmp_path: Path) -> None:
    run, base = _run(tmp_path, """
        fd = os.open("kept", os.O_WRONLY | os.O_CREAT); os.write(fd, b"bytes"); os.fsync(fd)
        os.fsync(os.open(base, os.O_RDONLY))
        fd = os.open("torn", os.O_WRONLY | os.O_CREAT); os.write(fd, b"bytes")
    """)
    left = [{path[len(str(base)) + 1:]: data for path, data in disk.snapshot().items() if path.startswith(f"{base}/")}
            for disk in run.end().crash_states()]
    assert all(found["kept"] == b"bytes" for found in left)
    assert {found.get("torn") for found in left} >= {None, b"", b"bytes", b"\0" * 5}


@needs_strace
def test_a_program_that_does_not_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    source = f"import os; os.mkfifo({str(tmp_path / 'never')!r}); os.fork(); open({str(tmp_path / 'never')!r})"
    with pytest.raises(subprocess.TimeoutExpired):
        capture([program(sys.executable), "-S", "-c", source], tmp_path / "trace", limit=3)
    pids = {line.split()[0] for line in (tmp_path / "trace").read_text().splitlines()}
    assert len(pids) == 2
    for pid in pids:
        await_(lambda pid=pid: _dead(pid))  # the kernel takes a moment over a SIGKILL on a busy machine


def _dead(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# -- traces as text ----------------------------------------------------------------------------------------------------------

def test_a_call_that_another_cut_in_two_is_joined() -> None:
    calls = parse(['7  pwrite64(3</d/a>, "zz", 2, 3 <unfinished ...>', '8  mkdir("/d/b", 0777) = 0',
                   "7  <... pwrite64 resumed>)           = 2"])
    assert [(c.call, c.pid, c.begin, c.end) for c in calls] == [("pwrite64", 7, 0, 2), ("mkdir", 8, 1, 1)]
    assert calls[0].data == b"zz" and calls[0].numbers == [2, 3] and calls[0].path == "/d/a"


def test_a_call_that_failed_is_left_out_and_a_mark_is_not() -> None:
    calls = parse(['7  mkdir("/d", 0777) = -1 EEXIST (File exists)',
                   '7  write(1023, "HB send k", 9) = -1 EBADF (Bad file descriptor)'])
    assert [(c.call, c.text) for c in calls] == [("mark", "HB send k")]


def test_a_call_that_a_kill_cut_off_is_left_out_and_any_other_is_an_error() -> None:
    half = '7  write(3</d/a>, "zz", 2 <unfinished ...>'
    assert parse([half, "7  +++ killed by SIGKILL +++"]) == []
    with pytest.raises(TraceError):
        parse([half])


def test_bytes_that_the_trace_cut_short_are_an_error_and_not_other_bytes() -> None:
    with pytest.raises(TraceError):
        _ = parse(['7  write(3</d/a>, "abc"..., 10) = 10'])[0].data


def test_escapes_are_read_with_and_without_hex() -> None:
    calls = parse([r'7  mkdir("/d/\x61\"\n", 0777) = 0', r'7  mkdir("\x2f\x64", 0777) = 0'])
    assert [c.path for c in calls] == ['/d/a"\n', "/d"]


def test_a_relative_name_is_taken_from_where_the_command_ran() -> None:
    assert parse(['7  mkdir("a", 0777) = 0'], "/d")[0].path == "/d/a"


def test_a_sync_covers_only_what_had_ended_before_it_began() -> None:
    run = compile_run(parse(['7  openat(AT_FDCWD</>, "/d/a", O_WRONLY|O_CREAT, 0666) = 3</d/a>',
                             '8  openat(AT_FDCWD</>, "/d/a", O_RDONLY) = 4</d/a>',
                             '8  fsync(4</d/a> <unfinished ...>', '7  write(3</d/a>, "zz", 2) = 2',
                             "8  <... fsync resumed>) = 0"]), "/d")
    assert [type(step) for step in run.steps] == [Names, Sync, Write]


def test_threads_are_one_process_and_its_children_know_it() -> None:
    run = compile_run(parse(["7  clone3({flags=CLONE_VM|CLONE_THREAD} => {parent_tid=[8]}, 88 <unfinished ...>",
                             '8  write(1023, "a", 1) = -1 EBADF (x)', "7  <... clone3 resumed>) = 8",
                             "8  clone(child_stack=NULL, flags=SIGCHLD) = 9", '9  write(1023, "b", 1) = -1 EBADF (x)']), "/d")
    assert [(step.process, step.text) for step in run.steps if isinstance(step, Mark)] == [(7, "a"), (9, "b")]
    assert run.parent == {9: 7}


def test_a_write_to_something_that_was_never_opened_is_an_error() -> None:
    with pytest.raises(TraceError):
        compile_run(parse(['7  write(3</d/a>, "zz", 2) = 2']), "/d")


def test_a_script_that_starts_an_interpreter_is_not_traced(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} $@\n")
    os.chmod(script, 0o755)
    with pytest.raises(TraceError):
        program(str(script))
