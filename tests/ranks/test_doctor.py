"""``distckpt doctor`` on real ranks, as a launcher starts it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from distckpt.cli.main import main
from tests import harness

_NEWNS, _PRIVATE_ALL = 0x20000, 0x44000


def visit(rank: int, world: int, root: str, apart: bool) -> int:
    os.environ["DISTCKPT_HOST"] = f"node-{rank}"
    if apart and rank == 1:  # another disk under the same path
        libc = ctypes.CDLL(None, use_errno=True)
        if (libc.unshare(_NEWNS) or libc.mount(b"none", b"/", None, _PRIVATE_ALL, None)
                or libc.mount(b"none", root.encode(), b"tmpfs", 0, None)):
            raise OSError(ctypes.get_errno(), "cannot have mounts of its own")
    return main(["doctor", root, "--size", "1", "--timeout", "30"])


def test_ranks_that_share_a_root_and_ranks_that_do_not(tmp_path: Path) -> None:
    outcomes = harness.run(2, visit, str(tmp_path), False, init=False)
    assert harness.values(outcomes) == [0, 0]
    said, other = outcomes[0].text, outcomes[1].text
    assert "2 ranks on 2 hosts, found by torch" in said and "ranks see rank 0's files after at most" in said
    assert "a small save: 2.1 MB through the library" in said and "visibility" not in other, "rank 0 speaks for all"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts of its own need root")
def test_a_rank_with_another_disk_under_the_same_path_is_named(tmp_path: Path) -> None:
    outcomes = harness.run(2, visit, str(tmp_path), True, init=False)
    if isinstance(outcomes[1].error, OSError):
        pytest.skip(str(outcomes[1].error))
    assert harness.values(outcomes) == [2, 2], "every rank exits alike, so that any launcher sees it"
    assert "will fail  visibility: rank 1 on node-1 does not see what rank 0 on node-0 wrote there" in outcomes[0].text
    assert list(tmp_path.iterdir()) == []
