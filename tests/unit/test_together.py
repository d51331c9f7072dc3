"""Many files, several at a time: every one done, each one's own error, and nothing under way when it is over."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from distckpt.beneath import open_folder
from distckpt.durable import REAL, Files
from distckpt.removal import remove_tree
from distckpt.runtime import SYSTEM, SystemRuntime, Thread
from distckpt.testing.faults import FaultyFiles, fail
from distckpt.together import together
from tests.unit.test_rank_files import rank_files


def test_results_are_in_order_and_threads_do_the_work_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=20)  # two of them must be inside at once

    def do(item: int) -> int:
        if item < 2:
            both.wait()
        return item * item

    assert together(SYSTEM, do, list(range(100))) == [item * item for item in range(100)]


def test_few_are_done_by_the_caller() -> None:
    assert set(together(SYSTEM, lambda item: threading.get_ident(), [1, 2, 3])) == {threading.get_ident()}


def test_the_first_error_is_raised_when_everybody_has_returned() -> None:
    inside, begun, entered, raised = [0], list[int](), threading.Event(), threading.Event()
    lock = threading.Lock()

    def do(item: int) -> None:
        with lock:
            inside[0] += 1
            begun.append(item)
        try:
            if item == 0:
                entered.set()
                assert raised.wait(20)
            elif item == 1:
                assert entered.wait(20)
                raised.set()
                raise OSError(errno.EIO, "of the second")
            else:
                assert raised.wait(20)
        finally:
            with lock:
                inside[0] -= 1

    with pytest.raises(OSError, match="of the second"):
        together(SYSTEM, do, list(range(1000)))
    assert inside == [0] and len(begun) <= 32, "each of sixteen may have taken one more while the error was on its way"


def test_where_no_thread_can_be_made_the_caller_does_it_all() -> None:
    class Poor(SystemRuntime):
        def thread(self, name: str, target: object, daemon: bool = True) -> Thread:
            raise RuntimeError("can't start new thread")

    assert together(Poor(), lambda item: item + 1, list(range(50))) == list(range(1, 51))


class _Interrupted(SystemRuntime):
    """The first wait for one of its threads is interrupted. Each of them may end once somebody waits for it to its end."""

    def __init__(self) -> None:
        self.waited = 0
        self.here = threading.local()

    def thread(self, name: str, target: Callable[[], None], daemon: bool = True) -> Thread:
        runtime, may_end = self, threading.Event()

        def run() -> None:
            runtime.here.may_end = may_end
            target()

        thread = super().thread(name, run, daemon)

        class Waited:
            is_alive = thread.is_alive

            def join(self, timeout: float | None = None) -> None:
                runtime.waited += 1
                if runtime.waited == 1:
                    raise KeyboardInterrupt
                may_end.set()
                thread.join(timeout)

        return Waited()


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_an_interrupt_is_raised_when_nothing_is_under_way_any_more_and_nothing_more_was_begun(number: int) -> None:
    """Where the caller itself ran out of descriptors, the others were to do the rest until the interrupt came."""
    runtime, inside, begun, lock = _Interrupted(), [0], [0], threading.Lock()
    main, all_in = threading.get_ident(), threading.Barrier(16, timeout=20)

    def do(item: int) -> None:
        with lock:
            inside[0], begun[0] = inside[0] + 1, begun[0] + 1
        if item < 16:
            all_in.wait()
        if threading.get_ident() == main:
            raise OSError(number, "of the caller's own")
        assert runtime.here.may_end.wait(20)
        with lock:
            inside[0] -= 1

    with pytest.raises(KeyboardInterrupt):
        together(runtime, do, list(range(1000)))
    assert inside == [1] and begun == [16], "the caller's own has failed, the others have ended"


def test_an_interrupt_while_the_threads_are_started_is_raised_and_the_caller_begins_nothing() -> None:
    class Interrupted(SystemRuntime):
        def __init__(self) -> None:
            self.begun: list[Thread] = []

        def thread(self, name: str, target: Callable[[], None], daemon: bool = True) -> Thread:
            if len(self.begun) == 3:
                raise KeyboardInterrupt
            self.begun.append(super().thread(name, target, daemon))
            return self.begun[-1]

    runtime, who = Interrupted(), set[int]()
    with pytest.raises(KeyboardInterrupt):
        together(runtime, lambda item: who.add(threading.get_ident()), list(range(1000)))
    assert threading.get_ident() not in who and not any(thread.is_alive() for thread in runtime.begun)


def test_an_interrupt_comes_before_errors_and_of_several_errors_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    all_in, interrupt = threading.Barrier(16, timeout=20), list[BaseException]()

    def do(item: int) -> None:
        all_in.wait()
        if item == 5 and interrupt:
            raise interrupt[0]
        if item in (3, 7):
            raise OSError(errno.EIO, f"of item {item}")

    with pytest.raises(OSError, match="of item 3"):
        together(SYSTEM, do, list(range(16)))
    assert "another one failed as well: OSError: [Errno 5] of item 7" in caplog.text and "item 3" not in caplog.text
    interrupt.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        together(SYSTEM, do, list(range(16)))
    assert "of item 3" in caplog.text, "not raised, so told"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_where_descriptors_run_out_fewer_threads_do_it_and_at_last_the_caller_alone(number: int) -> None:
    all_in, main = threading.Barrier(16, timeout=20), threading.get_ident()
    tried = list[int]()

    def do(item: int) -> int:
        tried.append(item)
        if len(tried) <= 16:
            all_in.wait()  # each thread has met it, the caller's as well
            raise OSError(number, os.strerror(number))
        assert threading.get_ident() == main
        return item

    def none(item: int) -> None:
        raise OSError(number, os.strerror(number))

    assert together(SYSTEM, do, range(100)) == list(range(100)) and len(tried) == 116
    with pytest.raises(OSError, match="files"):
        together(SYSTEM, none, range(100))


def test_one_bad_file_of_a_hundred_condemns_the_attempt(tmp_path: Path) -> None:
    faulty = FaultyFiles(REAL, fail(errno.EIO, op="fsync_file", path="file-050"))
    files = rank_files(tmp_path, faulty)
    for number in range(100):
        Path(files.claim(f"file-{number:03d}")).write_bytes(b"x" * number)
    with pytest.raises(OSError, match="file-050") as raised:
        files.finish()
    assert raised.value.errno == errno.EIO


def test_every_file_is_synced_before_the_directory(tmp_path: Path) -> None:
    synced: list[str] = []

    class Noting(Files):
        def fsync(self, path: str) -> None:
            super().fsync(path)
            synced.append(os.path.basename(path))

        def fsync_dir(self, path: str) -> None:
            synced.append("the directory")
            super().fsync_dir(path)

    files = rank_files(tmp_path, Noting())
    names = [f"file-{number:03d}" for number in range(100)]
    for name in names:
        Path(files.claim(name)).write_bytes(b"x")
    assert [entry.path for entry in files.finish()] == names
    assert sorted(synced[:-1]) == names and synced[-1] == "the directory"


# -- deletion ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "helpers"), [(1, 0), (2, 1), (4, 3), (64, 3)])
def test_deletion_takes_as_many_threads_as_cores_and_at_most_four(cores: int, helpers: int, tmp_path: Path) -> None:
    """More would have training wait for one of them that holds the interpreter's lock and has no core."""
    class Machine(SystemRuntime):
        started = 0

        def cores(self) -> int:
            return cores

        def thread(self, name: str, target: Callable[[], None], daemon: bool = True) -> Thread:
            self.started += 1
            return super().thread(name, target, daemon)

    (tmp_path / "v").mkdir()
    for number in range(100):
        (tmp_path / "v" / str(number)).write_bytes(b"x")
    machine = Machine()
    remove_tree(REAL, str(tmp_path), str(tmp_path / "v"), machine)
    assert machine.started == helpers and not (tmp_path / "v").exists()


def test_cores_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert SYSTEM.cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_file_that_cannot_be_deleted_is_named(tmp_path: Path) -> None:
    (tmp_path / "v" / "d").mkdir(parents=True)
    with open_folder(str(tmp_path), "v") as folder, pytest.raises(OSError) as caught:
        folder.unlink("d")
    assert caught.value.filename == str(tmp_path / "v" / "d")
