"""A recording of real ranks under strace, for the tests that walk the disks of its power cuts."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.proof import l1
from scripts.proof.l1_cuts import Recorded
from scripts.proof.l1_scenarios import Scenario


@contextmanager
def recording(scenarios: Callable[[Path], Sequence[Scenario]]) -> Iterator[dict[str, Recorded]]:
    """The runs of ``scenarios(folder)`` by mutant, "" for the code as it is; the folder is gone when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="distckpt-l1-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    before = logging.getLogger("distckpt").level
    logging.getLogger("distckpt").setLevel(logging.CRITICAL)
    try:
        l1.record(list(scenarios(folder)), folder)
        yield {one.scenario.mutant: one for one in l1.read(folder)}
    finally:
        logging.getLogger("distckpt").setLevel(before)
        shutil.rmtree(folder)
