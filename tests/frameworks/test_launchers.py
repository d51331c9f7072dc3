"""torchrun and deepspeed start the same program; what the one saved, the other goes on from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed")

from tests.frameworks.stage import ENVIRONMENT
from tests.harness import free_port

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.xdist_group("launchers")
def test_torchrun_and_deepspeed_launch_two_ranks(tmp_path: Path) -> None:
    root, bin = tmp_path / "root", Path(sys.executable).parent
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "PATH": f"{bin}:{os.environ['PATH']}"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    script = str(REPOSITORY / "tests" / "frameworks" / "launched.py")
    for started, command in (
            (0, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
                 f"--master-port={free_port()}", script, str(root)]),
            (2, [str(bin / "deepspeed"), "--num_accelerators=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}",
                 script, str(root)])):
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert [Path(f"{root}.{started}.rank-{rank}").read_text() for rank in (0, 1)] == ["0 of 2", "1 of 2"]
    assert (root / "latest").read_text().strip() == "step-4"
