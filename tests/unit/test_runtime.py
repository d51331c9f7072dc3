"""Who this process is, and what its kernel can say about another one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from distckpt.runtime import NICE, SYSTEM, Identity, SystemRuntime
from distckpt.testing.clock import VirtualClock, VirtualRuntime


def test_this_process_is_alive_to_itself() -> None:
    me = SYSTEM.identity()
    assert me.pid == os.getpid() and me.boot and me.pidns and me.started.isdigit()
    assert SYSTEM.alive(me) is True and Identity.from_json({**me.to_json(), "of a newer version": 1}) == me


def test_S6_a_pid_counts_only_with_equal_boot_namespace_and_start_time() -> None:
    me = SYSTEM.identity()
    assert SYSTEM.alive(replace(me, started=str(int(me.started) + 1))) is False  # the pid was given to another process
    assert SYSTEM.alive(replace(me, boot="another boot")) is None
    assert SYSTEM.alive(replace(me, pidns="pid:[1]")) is None
    assert SYSTEM.alive(replace(me, boot="")) is None
    assert SYSTEM.alive(replace(me, started="")) is None  # its start time was not known: nothing can be told


def test_S6_a_process_that_ended_is_dead_and_so_is_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    theirs = replace(SYSTEM.identity(), pid=child.pid, started=_started(child.pid))
    assert SYSTEM.alive(theirs) is True
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet reaped
    assert SYSTEM.alive(theirs) is False
    child.wait()
    assert SYSTEM.alive(theirs) is False


def _started(pid: int) -> str:
    from distckpt.runtime import _process_start

    return _process_start(pid)[0]


@pytest.mark.parametrize(("environment", "job", "restart"), [
    ({}, None, 0), ({"SLURM_JOB_ID": "0"}, None, 0), ({"SLURM_JOB_ID": "none"}, None, 0), ({"SLURM_JOB_ID": ""}, None, 0),
    ({"SLURM_JOB_ID": "42"}, "slurm:42", 0), ({"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "3"}, "slurm:42", 3),
    ({"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "x"}, "slurm:42", 0),
    ({"SLURM_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "7"}, "slurm:42[7]", 0)])
def test_S6_a_job_id_counts_only_if_it_is_real(
        monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], job: str | None, restart: int) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    me = SystemRuntime().identity()
    assert (me.job, me.restart) == (job, restart)


def test_the_machine_gives_threads_events_locks_and_tokens() -> None:
    done = SYSTEM.event()
    thread = SYSTEM.thread("unit", done.set)
    assert done.wait(10)
    thread.join(10)
    assert not thread.is_alive() and "MainThread" in SYSTEM.stacks()
    assert len(SYSTEM.token(8)) == 16 and SYSTEM.token(8) != SYSTEM.token(8)
    with SYSTEM.lock() as _, SYSTEM.lock():
        assert threading.active_count() >= 1
    assert SYSTEM.monotonic() <= SYSTEM.monotonic() and SYSTEM.time() > 1e9


# -- the virtual machine -----------------------------------------------------------------------------------------------


def test_virtual_time_passes_only_when_somebody_waits() -> None:
    runtime = VirtualRuntime()
    before = runtime.monotonic(), runtime.time()
    assert (runtime.monotonic(), runtime.time()) == before
    seen: list[float] = []
    runtime.hooks.append(seen.append)
    runtime.sleep(90)
    assert runtime.event().wait(10) is False
    assert runtime.monotonic() - before[0] == 100 and seen == [1_090, 1_100] and runtime.slept == 100


def test_virtual_hosts_share_time_and_not_clocks() -> None:
    clock = VirtualClock()
    one, other = VirtualRuntime(clock), VirtualRuntime(clock, host="b", boot="b", skew=500, born=300)
    one.sleep(5)
    assert other.time() - one.time() == 500 and one.monotonic() - other.monotonic() == 300
    assert one.alive(other.me) is None and other.alive(other.me) is True
    assert one.token(8) != other.token(8)


def test_a_virtual_process_dies_for_those_who_can_tell() -> None:
    clock = VirtualClock()
    one, two = VirtualRuntime(clock, pid=1), VirtualRuntime(clock, pid=2)
    assert one.alive(two.me) is True
    two.die()
    assert one.alive(two.me) is False and one.alive(replace(two.me, pid=3)) is False
    one.answers[two.me] = None
    assert one.alive(two.me) is None


def test_a_virtual_thread_runs_when_it_is_told_to_and_for_as_many_waits() -> None:
    runtime = VirtualRuntime()
    stop, worked = runtime.event(), []

    def loop() -> None:
        while not stop.wait(10):
            worked.append(runtime.clock.now)

    thread = runtime.thread("loop", loop)
    thread.join()
    assert worked == [] and thread.is_alive()
    assert runtime.run("loop", waits=3) is False and worked == [1_010, 1_020, 1_030]
    stop.set()
    assert runtime.run("loop") is True and not thread.is_alive()


def test_a_virtual_thread_with_nothing_to_do_is_taken_off_and_the_main_one_would_hang() -> None:
    runtime = VirtualRuntime()
    wake = runtime.event()
    runtime.thread("idle", lambda: bool(wake.wait()) and None)
    assert runtime.run("idle") is False
    with pytest.raises(RuntimeError, match="waits for ever"):
        wake.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
@pytest.mark.parametrize(("mine", "then"), [(0, NICE), (NICE + 5, NICE + 5)])
def test_a_thread_that_gives_way_takes_those_it_starts_with_it_and_nobody_else(mine: int, then: int) -> None:
    """Never upwards: an ordinary user may not, and a job that was started at the lowest priority is meant to have it."""
    seen = list[int]()

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(mine, before))
        SYSTEM.give_way()
        seen.append(priority())
        SYSTEM.thread("inner", lambda: seen.append(priority())).join()

    before = priority()
    SYSTEM.thread("outer", run).join()
    assert seen == [max(then, before)] * 2 and priority() == before


def test_a_priority_that_cannot_be_lowered_is_no_error_and_elsewhere_it_would_be_the_processs(
        monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def refused(which: int, who: int, priority: int) -> None:
        asked.append(priority)
        raise PermissionError(errno.EPERM, "by the container's filter")

    monkeypatch.setattr(os, "setpriority", refused)
    monkeypatch.setattr(sys, "platform", "linux")
    SYSTEM.give_way()
    assert len(asked) == 1
    monkeypatch.setattr(sys, "platform", "darwin")
    SYSTEM.give_way()
    assert len(asked) == 1
