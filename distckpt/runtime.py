"""Clock, threads, events and who this process is: one of the three seams to the outside.

Production uses ``SystemRuntime``; a simulation hands in its own, with a virtual clock and threads it schedules.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from distckpt.launch.environment import detect

log = logging.getLogger(__name__)

NICE = 10
"""What a thread that gives way is set to: a ninth of the others' share where there are fewer cores than threads to run. Not
19, a seventieth: it may be taken off its core while it holds the interpreter's lock, and training waited 100 ms for it then."""


class Event(Protocol):
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Lock(Protocol):
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> Any: ...


class Thread(Protocol):
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


@dataclass(frozen=True)
class Identity:
    """One process, told apart from any other: a pid counts only with equal boot, pid namespace and start time (S6)."""

    host: str
    pid: int
    boot: str
    pidns: str
    started: str
    job: str | None = None
    restart: int = 0
    step: str | None = None
    elastic: int = 0

    def succeeds(self, other: Identity) -> bool:
        """Whether this process was started in place of ``other``, which has therefore ended or is about to be killed: the job
        was requeued, or torchrun started the ranks of the same step anew."""
        if other.job is None or other.job != self.job:
            return False
        return other.restart < self.restart or (other.restart == self.restart and other.step == self.step
                                                and other.elastic < self.elastic)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Identity:
        known = {k: value[k] for k in cls.__dataclass_fields__ if k in value}
        return cls(**known)

    @classmethod
    def of_record(cls, value: Any) -> Identity | None:
        """The identity in a file that somebody else may have written; None when it is none."""
        if not isinstance(value, dict) or not all(isinstance(value.get(k), (str, type(None))) for k in ("job", "step")):
            return None
        texts = ("host", "boot", "pidns", "started")
        numbers = (value.get("pid"), value.get("restart", 0), value.get("elastic", 0))
        if not all(isinstance(value.get(k), str) for k in texts) or not all(isinstance(n, int) for n in numbers):
            return None
        return cls.from_json(value)


class Runtime(Protocol):
    """What the library takes from the machine besides files and the store."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
    def event(self) -> Event: ...
    def lock(self) -> Lock: ...
    def thread(self, name: str, target: Callable[[], None], daemon: bool = True) -> Thread: ...
    def here(self) -> int: ...
    def give_way(self) -> None: ...
    def cores(self) -> int: ...
    def lifeline(self) -> Callable[[], bool]: ...
    def exit_now(self, code: int) -> None: ...
    def token(self, size: int) -> str: ...
    def identity(self) -> Identity: ...
    def restarts(self) -> int: ...
    def recount(self, elastic: int) -> None: ...
    def age(self) -> float: ...
    def alive(self, other: Identity) -> bool | None: ...
    def bytes_moved(self) -> int: ...
    def stacks(self) -> str: ...


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _process_start(pid: int) -> tuple[str, str]:
    """(start time in ticks since boot, state letter) of ``pid``; empty strings when there is no such process."""
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return "", ""
    fields = text[text.rindex(")") + 2:].split()
    return fields[19], fields[0]


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class SystemRuntime:
    """The real machine."""

    _elastic: int | None = None

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> Event:
        return threading.Event()

    def lock(self) -> Lock:
        return threading.RLock()

    def thread(self, name: str, target: Callable[[], None], daemon: bool = True) -> Thread:
        thread = threading.Thread(target=target, name=f"distckpt-{name}", daemon=daemon)
        thread.start()
        return thread

    def here(self) -> int:
        """What tells the calling thread from every other one of this process."""
        return threading.get_ident()

    def give_way(self) -> None:
        """Let the calling thread, and those it starts from now on, have a core when the others leave one. There is no way back
        for an ordinary user. Off Linux this would be the whole process's, so it is not done there: only speed hangs on it."""
        if sys.platform == "linux":
            me = threading.get_native_id()
            try:
                os.setpriority(os.PRIO_PROCESS, me, max(os.getpriority(os.PRIO_PROCESS, me), NICE))
            except OSError as error:
                log.debug("this thread runs at the priority of the others: %s", error)

    def cores(self) -> int:
        """How many this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def lifeline(self) -> Callable[[], bool]:
        """A test of whether the program still runs: its main thread, or the thread that calls this, which may train on after it.
        One that the interpreter would not wait for does not count."""
        me, main = threading.current_thread(), threading.main_thread()
        return lambda: main.is_alive() or (me.is_alive() and not me.daemon)

    def exit_now(self, code: int) -> None:
        """End the process with ``code``, when the main thread that would have done so has ended."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def token(self, size: int) -> str:
        return secrets.token_hex(size)

    def identity(self) -> Identity:
        launch = detect()
        host = os.environ.get("DISTCKPT_HOST") or socket.gethostname()
        return Identity(host=host, pid=os.getpid(), boot=_read("/proc/sys/kernel/random/boot_id"),
                        pidns=_pid_namespace(), started=_process_start(os.getpid())[0], job=launch.job, restart=launch.restart,
                        step=launch.step, elastic=launch.elastic if self._elastic is None else self._elastic)

    def restarts(self) -> int:
        """By torchrun, as the agent of this node counts them: its own alone."""
        return detect().elastic

    def recount(self, elastic: int) -> None:
        """What ``identity`` is to say of restarts by torchrun: those of all nodes."""
        self._elastic = elastic

    def age(self) -> float:
        """Seconds since this process began; 0 where unknown."""
        started, up = _process_start(os.getpid())[0], _read("/proc/uptime").split()
        return float(up[0]) - int(started) / os.sysconf("SC_CLK_TCK") if started and up else 0.0

    def alive(self, other: Identity) -> bool | None:
        """True or False when this kernel can tell, None when it cannot (another machine, another container)."""
        mine = self.identity()
        if not (other.boot and mine.pidns and other.started) or (other.boot, other.pidns) != (mine.boot, mine.pidns):
            return None
        started, state = _process_start(other.pid)
        return started == other.started and state not in ("Z", "X")

    def bytes_moved(self) -> int:
        """Bytes this process has read and written so far, whoever did it: how a long load, or a framework's own writer, shows
        that it moves. 0 where unknown."""
        lines = dict(line.partition(": ")[::2] for line in _read("/proc/self/io").splitlines())
        return sum(int(lines.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))

    def stacks(self) -> str:
        names = {t.ident: t.name for t in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            parts.append(f"--- thread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)))
        return "\n".join(parts)


SYSTEM = SystemRuntime()
