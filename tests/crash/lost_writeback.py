"""One save on a new XFS, mounted below ``argv[2]``, whose disk takes nothing for a while, and then again.

The file is written by ``argv[1]``: by "us", or by somebody "else" and paced from outside. ``write`` goes on as if nothing were,
since it writes into memory: it is the kernel that cannot write. Prints how the save ended and the newest step. Run by
test_lost_writeback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from distckpt.durable import REAL
from distckpt.errors import SaveError
from distckpt.manager import CheckpointManager
from distckpt.options import Seams
from distckpt.saving.files import RankFiles
from distckpt.testing.faults import FaultyFiles, call
from scripts.proof import disks

MB = 1 << 20


def writer(who: str, files: RankFiles) -> Any:
    return files.writer("a.bin") if who == "us" else open(files.mine("a.bin"), "wb", buffering=0)


def main(who: str, place: str) -> None:
    disks.isolate()
    below, here = f"{place}/below", f"{place}/here"
    os.mkdir(below)
    os.mkdir(here)
    disks.mount("none", below, "tmpfs", f"size={disks.KINDS['xfs'] + 64 * MB}")
    disks.format_image("xfs", f"{below}/image", disks.KINDS["xfs"])
    subprocess.run(["mount", "-o", "loop", f"{below}/image", here], check=True)
    paced = threading.Event()
    begun = call(lambda _: paced.set(), op="start_writeback", path="/a.", after=True, forever=True)
    manager = CheckpointManager(f"{here}/run", seams=Seams(files=FaultyFiles(REAL, begun)))
    with manager.saving(1) as files, files.writer("a.bin") as out:
        out.write(os.urandom(MB))
    manager.wait()
    try:
        with manager.saving(2) as files, writer(who, files) as out:
            os.sync()
            with open(f"{below}/fill", "wb", 0) as fill, suppress(OSError):
                while True:
                    fill.write(bytes(MB))
            for _ in range(39):  # our own writer's first wait comes with the 40th
                out.write(os.urandom(MB))
            os.sync()  # the kernel has tried, and has given these pages up
            if who == "else":
                for _ in range(2):  # the second one has begun after that
                    paced.clear()
                    assert paced.wait(20)
            os.unlink(f"{below}/fill")
            for _ in range(9):
                out.write(os.urandom(MB))
        print("committed")
    except SaveError as error:
        print("refused:", error)
    print("newest:", manager.latest_step(), flush=True)
    os._exit(0)  # the mounts go with this process


if __name__ == "__main__":
    main(*sys.argv[1:])
