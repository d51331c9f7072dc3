"""Stop signals: the handler sets a flag, and nothing else."""

from __future__ import annotations

import dis
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from distckpt.errors import ConfigError
from distckpt.launch.signals import StopSignals, ignore_stop_signals

NAMES = ("SIGUSR1", "SIGUSR2")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _in_child(act: Any) -> int:
    """The exit status of a forked child that does ``act``; negative: the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_first_signal_is_kept_and_the_one_before_is_called() -> None:
    called: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    found = StopSignals(NAMES)
    found.install()
    assert found.raised == "" and not found.untouched
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert found.raised == "SIGUSR2" and called == [signal.SIGUSR1]


def test_restored_and_what_somebody_else_took_meanwhile_is_theirs() -> None:
    def first(number: int, frame: FrameType | None) -> None: ...
    def theirs(number: int, frame: FrameType | None) -> None: ...
    signal.signal(signal.SIGUSR1, first)
    signal.signal(signal.SIGUSR2, first)
    found = StopSignals(NAMES)
    found.install()
    found.install()  # once
    signal.signal(signal.SIGUSR2, theirs)
    found.restore()
    found.restore()
    assert signal.getsignal(signal.SIGUSR1) is first and signal.getsignal(signal.SIGUSR2) is theirs


def test_the_handler_does_no_io_and_takes_no_lock() -> None:
    """It runs between any two bytecodes: it may read and set attributes, read a clock, and call what stood before. No logging, no
    event."""
    allowed = {"_before", "get", "_names", "os", "getpid", "_pid", "kill", "signal", "SIG_DFL", "Signals", "name", "raised",
               "callable", "at", "time", "monotonic"}
    code = StopSignals._handle.__code__
    assert set(code.co_names) <= allowed, set(code.co_names) - allowed
    stored = [i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"]
    assert stored == ["at", "raised"], "who sees that it is raised reads when"
    assert not [i for i in dis.get_instructions(code) if "IMPORT" in i.opname or "WITH" in i.opname]


def test_off_the_main_thread_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    found = StopSignals(NAMES)
    thread = threading.Thread(target=lambda: (found.install(), found.restore()))
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGUSR1) is before and "outside the main thread" in caplog.text
    assert "SIGUSR1, SIGUSR2" in caplog.text


def test_two_managers_closed_in_the_order_in_which_they_were_made() -> None:
    """The second keeps the first's handler as the one before; after both have closed, the signal is what it was at first."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    one, two = StopSignals(["SIGUSR1"]), StopSignals(["SIGUSR1"])
    one.install()
    two.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert one.raised == two.raised == "SIGUSR1"
    one.restore()
    two.restore()

    def act() -> None:
        one._pid = os.getpid()  # as if it were its own process, and not a forked child
        os.kill(os.getpid(), signal.SIGUSR1)

    assert _in_child(act) == -signal.SIGUSR1, "a closed manager swallows a signal"


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, "function"])
def test_a_forked_child_has_what_stood_before(before: Any) -> None:
    """``Process.terminate()`` of a data worker must end it: the flag that we would set there is read by nobody."""
    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(9)
    signal.signal(signal.SIGTERM, leave if before == "function" else before)
    found = StopSignals(["SIGTERM"])
    found.install()

    def act() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(5 if not found.raised else 6)

    wanted = {signal.SIG_DFL: -signal.SIGTERM, signal.SIG_IGN: 5, "function": 9}[before]
    assert _in_child(act) == wanted and found.raised == ""


def test_data_workers_ignore_them() -> None:
    def act() -> None:
        ignore_stop_signals(0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(5)

    assert _in_child(act) == 5


@pytest.mark.parametrize("names", [["TERM"], ["SIGKILL"], ["SIGSTOP"], [15], ["SIGNOPE"]])
def test_names_are_checked(names: list[Any]) -> None:
    with pytest.raises(ConfigError):
        StopSignals(names)


def test_none_are_none() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = StopSignals(())
    found.install()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_data_loader_with_workers_survives_a_signal_to_the_group() -> None:
    """SIGTERM to the whole process group while workers are busy: with the helper, the main process gets its flag and all data."""
    script = """
import os, signal, distckpt
from torch.utils.data import DataLoader
ignore = distckpt.launch.ignore_stop_signals
from distckpt.launch.signals import StopSignals
stops = StopSignals(["SIGTERM"])
stops.install()
loader = DataLoader(list(range(64)), num_workers=2, worker_init_fn=ignore, batch_size=4)
got = 0
for n, batch in enumerate(loader):
    if n == 1:
        os.killpg(os.getpid(), signal.SIGTERM)
    got += len(batch)
print(got, stops.raised)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, start_new_session=True)
    assert done.returncode == 0 and done.stdout.split() == ["64", "SIGTERM"], done.stderr[-3000:]
