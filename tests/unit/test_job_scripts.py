"""The job scripts that people copy: what survives a signal, and who starts the job again, is the same in all of them.

That it works is shown on a cluster by the tests of ``tests/slurm``, each with one or two of the scripts.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from distckpt.launch.environment import RENDEZVOUS, STORE, Launch

FOLDER = Path(__file__).parents[2] / "slurm"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sbatch"))

TRAP = """\
trap 'echo "$(date +%T) job $SLURM_JOB_ID: told to stop; waiting for the save in flight"' TERM USR1
"""

END = """\
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done    # a signal ends wait, and not srun
wait "$step" && exit
status=$?

# A run that failed (a lost node, a crashed rank, finish's code 75) goes on from its last checkpoint. One that SLURM is ending,
# because it was cancelled or is requeued already, is left alone.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
if ((status == 75 || ${SLURM_RESTART_COUNT:-0} < RETRIES)) && [[ $(scontrol show job -o "$job") == *" JobState=RUNNING "* ]]; then
    echo "$(date +%T) job $job: failed with $status, and is started again"
    scontrol requeue "$job"
fi
exit "$status"
"""


def test_there_is_one_for_each_way_to_start_ranks() -> None:
    assert [f"{name}.sbatch" for name in ("deepspeed", "mpi", "srun", "torchrun")] == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_survives_a_signal_and_starts_the_job_again_is_alike(name: str) -> None:
    """The trap stands before srun, which runs behind a loop that a signal does not end; the requeue asks SLURM first."""
    text = (FOLDER / name).read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", text, re.MULTILINE))
    assert (options["signal"], options["open-mode"]) == ("USR1@300", "append") and "requeue" in options, options
    start = re.search(r"^srun .*?&$", text, re.MULTILINE | re.DOTALL)
    mark = '[[ -e $STOPPED ]] && status=75\n'  # torchrun exits with 1, whatever its ranks do
    assert start is not None and TRAP in text[:start.start()] and text[start.end() + 1:].replace(mark, "") == END
    assert (mark in text) == ("torch.distributed.run" in text)
    assert "--kill-on-bad-exit=0" in start[0] and '--wait="$GRACE"' in start[0]
    assert ("export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$GRACE" in text) == ("torch.distributed.run" in text)


@pytest.mark.parametrize("name", ["deepspeed.sbatch", "torchrun.sbatch"])
@pytest.mark.parametrize("job", [1, 2499, 2500, 7_654_321])
def test_the_rendezvous_port_of_a_job_is_the_one_that_the_library_leaves_to_it(name: str, job: int) -> None:
    """One formula in shell and one in Python: jobs on one node, and a launcher and the library's own store, do not meet."""
    formula = re.search(r"(?:PORT|port)=\$\(\((.*)\)\)", (FOLDER / name).read_text())
    assert formula is not None
    said = subprocess.run(["bash", "-c", f"echo $(({formula[1]}))"], env={"SLURM_JOB_ID": str(job), "PATH": os.environ["PATH"]},
                          capture_output=True, text=True, check=True, timeout=10)
    ours, next_ones = ([Launch("srun", job_id=number, step=str(step)).port(purpose) for step in range(4)
                        for purpose in (RENDEZVOUS, STORE)] for number in (job, job + 1))
    assert int(said.stdout) == ours[0] and len({*ours, *next_ones}) == 16
