"""Programs that end as programs do: through the interpreter's own shutdown, in a process forked from one that has torch loaded.

The harness ends its ranks by ``os._exit``, which hides whatever the end of the interpreter would do: threads that are joined
for ever, threads that abort the process. Here the script is the main program of its process, to its last instruction.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import free_port

_ZYGOTE = """
import json, os, select, signal, sys, time
import torch, torch.distributed, torch.distributed.checkpoint, numpy, distckpt, distckpt.manager, distckpt.payloads.train_state
children, script = {}, None
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("{}", flush=True)
buffer = b""
while script is None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - children.pop(pid)
            print(json.dumps({"pid": pid, "code": code, "seconds": seconds}), flush=True)
    if not select.select([0], [], [], 0.02)[0]:
        continue
    data = os.read(0, 65536)
    if not data:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)
    buffer += data
    while b"\\n" in buffer and script is None:
        line, _, buffer = buffer.partition(b"\\n")
        order = json.loads(line)
        pid = os.fork()
        if pid:
            children[pid] = time.monotonic()
            print(json.dumps({"order": order["order"], "pid": pid}), flush=True)
        else:
            os.setsid()
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0), os.dup2(log, 1), os.dup2(log, 2)
            os.environ.update(order["env"])
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = ["script", *order["args"]]
            torch.set_num_threads(1)
            script = order["script"]
del children, buffer, line, order, pid, data
exec(compile(script, "script", "exec"), {"__name__": "__main__"})
"""


@dataclass
class Ended:
    """How one process ended: exit code (negative: by that signal), what it said, and how long it took."""

    code: int
    text: str
    seconds: float


class Zygote:
    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         bufsize=0, start_new_session=True)
        assert self._process.stdout is not None and self._process.stdin is not None
        self._stdout, self._stdin = self._process.stdout, self._process.stdin
        self._buffer = b""
        self._orders = 0
        self._told: dict[int, Any] = {}
        self._ended: dict[int, Any] = {}
        self._read(60)

    def _read(self, timeout: float) -> None:
        """What the zygote says next, if it says something within ``timeout`` seconds."""
        if not select.select([self._stdout], [], [], max(timeout, 0))[0]:
            return
        data = os.read(self._stdout.fileno(), 65536)
        assert data, "the zygote has died"
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in map(json.loads, lines):
            if "order" in line:
                self._told[line["order"]] = line["pid"]
            elif "pid" in line:
                self._ended[line["pid"]] = line

    def start(self, folder: Path, world: int, script: str, *args: object, env: dict[str, str] | None = None) -> list[int]:
        """``script`` as the main program of ``world`` ranks, with torch's environment; their pids, by rank."""
        port, first = free_port(), self._orders
        self._folder = folder
        for rank in range(world):
            order = {"order": self._orders, "script": script, "args": [str(a) for a in args],
                     "log": str(folder / f"rank-{rank}.log"),
                     "env": {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                             "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **(env or {})}}
            self._stdin.write(json.dumps(order).encode() + b"\n")
            self._orders += 1
        while not all(n in self._told for n in range(first, self._orders)):
            self._read(60)
        return [self._told[n] for n in range(first, self._orders)]

    def join(self, pids: list[int], timeout: float = 60.0) -> list[Ended]:
        """How each ended; AssertionError with what they said when one does not within ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while not all(pid in self._ended for pid in pids):
            self._read(until - time.monotonic())
            if time.monotonic() > until:
                said = {pid: (self._folder / f"rank-{rank}.log").read_text()[-4000:] for rank, pid in enumerate(pids)}
                raise AssertionError(f"still running after {timeout} s: {[p for p in pids if p not in self._ended]}: {said}")
        return [Ended(self._ended[pid]["code"], (self._folder / f"rank-{rank}.log").read_text(), self._ended[pid]["seconds"])
                for rank, pid in enumerate(pids)]

    def run(self, folder: Path, world: int, script: str, *args: object, timeout: float = 60.0,
            env: dict[str, str] | None = None) -> list[Ended]:
        return self.join(self.start(folder, world, script, *args, env=env), timeout)

    def close(self) -> None:
        self._stdin.close()
        self._process.wait(10)
        self._stdout.close()
