"""Write-back that fails while a file is still being written, on a real XFS.

The kernel tells a write error once. Whoever waits for pages (``sync_file_range``) is told, and the fsync after it reports success
over what was lost: on XFS that of the same descriptor, on ext4 that of one that is opened later. A checkpoint of such a file
would be committed with bytes that are nowhere. What paces others' files from outside only begins, and takes nobody's error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.proof import disks

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("who", ["us", "else"])
def test_a_write_error_that_pacing_may_be_told_of_is_not_lost(who: str, tmp_path: Path) -> None:
    lacking = disks.missing("mkfs.xfs")
    if lacking:
        pytest.skip(lacking)
    done = subprocess.run([sys.executable, "-m", "tests.crash.lost_writeback", who, str(tmp_path)], capture_output=True,
                          text=True, timeout=120, check=False, cwd=REPOSITORY,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    ended, newest = done.stdout.splitlines()
    assert ended.startswith("refused:") and newest == "newest: 1", done.stdout
