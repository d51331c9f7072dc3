"""The host's side of one boot: start User-Mode Linux, read what it says, kill it when it asks for the cut."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.proof.uml.plan import Plan, parse

HERE = Path(__file__).resolve().parent
CODE = HERE.parents[2]
DISK_SIZE = 256 << 20
SILENCE = 300.0


class Machine:
    """A directory with a disk image, and boots of a machine that has it."""

    def __init__(self, work: Path) -> None:
        self.work, self.disk = work, work / "disk.img"
        with self.disk.open("wb") as image:
            image.truncate(DISK_SIZE)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(self.disk)], check=True)

    def boot(self, plan: Plan, hear: Callable[[dict[str, Any]], None]) -> list[str]:
        """Run ``plan``; ``hear`` gets every event. Ends when the guest halts, is cut, or is silent for too long; what it said
        that was no event is returned (for a machine that did not get as far as it should)."""
        (self.work / "plan.json").write_text(plan.to_json())
        process = subprocess.Popen(
            ["nice", "-n", "10", "linux.uml", "mem=1024M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
             f"ubd0={self.disk}", f"init={HERE / 'init.sh'}", "con=null", "con0=fd:0,fd:1", "ssl=null",
             f"uml_dir={self.work}/uml", f"L4_WORK={self.work}", f"L4_CODE={CODE}", f"L4_PYTHON={sys.executable}",
             f"L4_EXPORT={plan.export}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "TMPDIR": "/dev/shm"})
        assert process.stdout is not None
        other: list[str] = []
        try:
            for text in _lines(process, SILENCE):
                event = parse(text)
                if event is None:
                    other.append(text)
                    continue
                hear(event)
                if "cut" in event:
                    break
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            shutil.rmtree(self.work / "uml", ignore_errors=True)
        return other[-400:]


def _lines(process: subprocess.Popen[bytes], silence: float) -> Iterator[str]:
    """Lines as they come, until the end or ``silence`` seconds without any."""
    assert process.stdout is not None
    fd, buffer, last = process.stdout.fileno(), b"", time.monotonic()
    while True:
        if not select.select([fd], [], [], 1.0)[0]:
            if time.monotonic() - last > silence:
                yield f"L4 {{\"hung\": \"the whole guest was silent for {silence:g} s\"}}"
                return
            continue
        data = os.read(fd, 65536)
        if not data:
            return
        last = time.monotonic()
        *complete, buffer = (buffer + data).split(b"\n")
        for row in complete:
            yield row.decode("utf-8", "replace").rstrip("\r")
