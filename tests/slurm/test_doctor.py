"""``distckpt doctor`` in a job script on two nodes: under srun, with one root for both or a disk for each, under mpiexec,
torchrun and deepspeed."""

from __future__ import annotations

import importlib.util
import re
import uuid
from pathlib import Path

from tests.slurm.conftest import RUN, Cluster

SCRIPT = """#!/usr/bin/env bash
doctor() { echo "== $1"; shift; "$@"; echo "code $?"; }
look="$PYTHON -m distckpt doctor --size 1 --timeout 60"
doctor shared srun $look "$SHARED"
doctor local srun $look --storage node-local "$LOCAL"
doctor needless srun $look --storage node-local --strict "$SHARED"
doctor mpi mpiexec -n 3 $look "$SHARED"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
doctor torchrun srun $PYTHON -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d \\
    --rdzv-endpoint="$first:12345" -m ${look#*-m } "$SHARED"
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/ slots=1/' >hosts
doctor deepspeed srun bash -c "deepspeed --hostfile=hosts --no_ssh --node_rank=\$SLURM_NODEID --master_addr=$first \\
    --master_port=12346 --module --no_local_rank ${look#*-m } $SHARED"
echo "== apart"
srun $look "$LOCAL" || exit 7    # as a prolog of the training
echo "not reached"
"""


def test_in_a_job_script_the_exit_code_is_what_the_training_depends_on(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(SCRIPT)
    shared, local = tmp_path / "root", f"/node-local/{uuid.uuid4().hex[:8]}"
    job = cluster.submit(tmp_path, str(tmp_path / "job.sbatch"), "--nodes=2", "--ntasks-per-node=1", "--output=job.out",
                         SHARED=str(shared), LOCAL=f"{local}/root")
    job.over("FAILED")
    assert job.field("ExitCode") == "7:0", job.output()
    told = {part.split("\n", 1)[0]: part for part in re.split("^== ", job.output(), flags=re.MULTILINE)[1:]}

    assert "2 ranks on 2 hosts, found by slurm" in told["shared"] and "code 0" in told["shared"], told["shared"]
    assert f"grace: started by srun, job slurm:{job.number}" in told["shared"] and "SIGKILL comes 5 s after" in told["shared"]
    assert "visibility: ranks see rank 0's files after at most" in told["shared"]

    assert "not reached" not in told["apart"] and "visibility: rank 1 on n2 does not see what rank 0 on n1 wrote" in told["apart"]
    assert "pass storage='node-local', and --storage node-local here" in told["apart"]

    assert "code 0" in told["local"] and "will fail" not in told["local"], told["local"]
    assert "disks: that of rank 0 is seen by rank 0 on n1; others are by rank 1 on n2. A checkpoint exists when every node" in (
        told["local"])
    assert "a small save: 2.1 MB through the library, durable and committed" in told["local"]

    assert "code 1" in told["needless"] and "all ranks see one: storage='node-local' is then as" in told["needless"]
    assert "code 0" in told["mpi"] and "3 ranks on 2 hosts, found by mpi" in told["mpi"], told["mpi"]
    for name in ("torchrun", "deepspeed"):
        if name != "deepspeed" or importlib.util.find_spec(name) is not None:
            assert "code 0" in told[name] and "2 ranks on 2 hosts, found by torch" in told[name], told[name]
            assert f"grace: started by {name}, job slurm:{job.number}, requeued 0 times: SIGKILL comes 30 s after" in told[name]
    assert not shared.exists() and [(RUN / node / "disk" / local.split("/")[2]).exists() for node in ("n1", "n2")] == [False] * 2
