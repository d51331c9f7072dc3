"""What every peer's program has in common. No import but the standard library's: it runs in the peer's own environment.

    PROGRAM version          the version of the peer
    PROGRAM run WORK         save SAVES times into WORK/root, temporary files in WORK/tmp; a mark when a save returned
    PROGRAM pick             for each line on stdin, a root: what the peer would resume from, as a line of JSON
    PROGRAM cuts             for each line on stdin, {"work", "copies", "mount", "log"}: run, with a copy of the root after each
                             acknowledgement. "mount", if any: this file system is shut down right after the last. "log", if
                             any: how long this file was at each acknowledgement is said in a line of JSON
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import shutil
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO

SAVES = 4
LIMIT = 200.0
SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2
MARK = 1023  # distckpt.testing.trace.MARK: never open
Pick = Callable[[str], "str | None"]


@dataclass
class Run:
    """One rank of one run. ``root`` exists and is empty."""

    root: str
    rank: int = 0
    world: int = 1
    copies: str = ""
    mount: str = ""
    log: str = ""
    out: TextIO | None = None

    def ack(self, number: int) -> None:
        """Rank 0 says that the save returned, on every rank."""
        if self.rank:
            return
        length = os.stat(self.log).st_size if self.log else 0  # before the copy, beside which a thread of the peer may write
        if self.copies:
            with contextlib.suppress(shutil.Error):  # something is deleted beside, by a thread of the peer; the rest is copied
                shutil.copytree(self.root, f"{self.copies}/{number}", symlinks=True)
        with contextlib.suppress(OSError):
            os.write(MARK, b"ACK %d" % number)
        if self.log:
            print(json.dumps({"acknowledged": number, "log": length}), file=self.out, flush=True)
        if self.mount and number == SAVES:
            folder = os.open(self.mount, os.O_RDONLY)
            fcntl.ioctl(folder, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
            os._exit(0)


def _ranks(session: Callable[[Run], None], run: Run, distributed: bool) -> int:
    """0 when every rank ended well. Ranks are forked, because importing a peer takes seconds. After a cut only rank 0
    counts. A rank that does not end in LIMIT seconds shows its stacks and dies."""
    port = 10_000 + os.getpid() % 22_000  # no other run's, and below those that the kernel deals out to outgoing connections
    children = []
    for rank in range(run.world):
        child = os.fork()
        if child == 0:
            code = 1
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                if distributed:
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.world),
                                      LOCAL_WORLD_SIZE=str(run.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                session(replace(run, rank=rank))
                code = 0
            except BaseException:  # a rank of a fork must end here, whatever it was
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(child)
    codes = []
    for rank, child in enumerate(children):
        if rank and run.mount:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes[0] if run.mount else max(map(abs, codes))


def _start(work: str) -> str:
    os.environ["TMPDIR"] = tempfile.tempdir = f"{work}/tmp"
    return f"{work}/root"


def main(version: str, session: Callable[[Run], None], pick: Pick, world: int = 1, distributed: bool = False) -> None:
    """The program. ``session`` does all saves of one rank; ``pick`` is the peer's own rule: the path of the checkpoint that a
    restart would load from this root, or None. ``distributed``: the ranks find each other by torchrun's variables."""
    mode = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")  # peers print
    if mode == "version":
        print(version)
    elif mode == "run":
        sys.exit(_ranks(session, Run(_start(sys.argv[2]), world=world), distributed))
    elif mode == "pick":
        os.dup2(2, 1)
        for line in sys.stdin:
            answer = {"path": None, "error": ""}
            try:
                answer["path"] = pick(line.rstrip("\n"))
            except BaseException as error:  # whatever it raises, it resumes from nothing
                answer["error"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(answer), file=answers, flush=True)
    elif mode == "cuts":
        os.dup2(2, 1)
        for line in sys.stdin:
            asked = json.loads(line)
            run = Run(_start(asked["work"]), world=world, copies=asked["copies"], mount=asked["mount"], log=asked["log"],
                      out=answers)
            print(json.dumps({"code": _ranks(session, run, distributed)}), file=answers, flush=True)
    else:
        raise SystemExit(__doc__)
