"""README's "A preempted job on SLURM" is what happens: its commands, as they stand there, and each line of the job's output that
it shows, in that order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.slurm.conftest import REPOSITORY, Cluster, user

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
WORLD = 4

# The reader's own program: what README says that it ends with comes after it. In the first run every rank stands in the middle of
# step 3 until the signal has come to all of them. TERM is ignored once the manager is closed: SLURM's for the requeue could else
# end rank 0 before it has said that it asked for that.
TRAIN = """
import argparse, logging, os, signal, sys, time
from pathlib import Path
import torch
import distckpt

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
root = parser.parse_args().root
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank, first = torch.distributed.get_rank(), "SLURM_RESTART_COUNT" not in os.environ
signal.signal(signal.SIGUSR1, lambda *ignored: Path(f"signalled.{rank}").touch())
signal.signal(signal.SIGTERM, signal.SIG_IGN)
state = {"weights": torch.zeros(3)}
manager = distckpt.CheckpointManager(root)
step = manager.restore(state) or 0
total = 1_000_000 if first else step + 3
while step < total:
    todo = manager.poll(step)
    if todo.save: manager.save(step, state)
    if todo.stop: break
    if first and step == 3:
        Path(f"at.{rank}").touch()
        while not Path("go").exists(): time.sleep(0.05)
    sums = torch.ones(3)
    torch.distributed.all_reduce(sums)
    state["weights"] += sums
    step += 1
else:
    manager.save(step, state, on_exists="skip")
"""


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """Each with what it shows."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


def pattern(shown: str) -> re.Pattern[str]:
    """Of a line that README shows: "..." is anything; the run's id and the step are what they are, and the same wherever they
    come again; which rank the signal came to first is chance; all else is as it stands."""
    text = re.escape(shown).replace(r"\.\.\.", ".*")
    text = re.sub(r"run\\-[0-9a-f]{12}", "(?P<run>run-[0-9a-f]{12})", text)
    text = re.sub(r"(?<=step\\-)[0-9]+", "(?P<step>[0-9]+)", text)
    text = re.sub(r"(?<=step\\ )[0-9]+", "(?P=step)", text)
    return re.compile(re.sub(r"(?<=SIGUSR1\\ on\\ rank\\ )[0-9]+", "[0-9]+", text))


def matched(shown: list[str], output: str) -> None:
    """Every line of ``shown``, one after the other; AssertionError names the first that is not there."""
    left, said = iter(output.splitlines()), dict[str, str]()
    for line in shown:
        wanted = pattern(line)
        found = next((match for match in map(wanted.fullmatch, left) if match and all(
            said.get(name, value) == value for name, value in match.groupdict().items())), None)
        assert found is not None, f"README shows {line!r}; after what is like the lines before it, nothing is so in:\n{output}"
        said |= found.groupdict()


def test_the_story_of_the_readme_command_by_command(cluster: Cluster, tmp_path: Path) -> None:
    section, = re.findall(r"^### A preempted job on SLURM\n(.*?)^#", README, re.MULTILINE | re.DOTALL)
    block, = re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    end, = re.findall(r"The training script ends with `(.*?)`", section.replace("\n", " "))
    (submit, submitted), (signal, nothing), (look, not_shown), (cat, shown) = commands(block)
    (tmp_path / "slurm").symlink_to(REPOSITORY / "slurm")
    (tmp_path / "train.py").write_text(f"{TRAIN}{end}\n")

    def typed(command: str) -> str:
        return cluster.run("bash", "-c", command, env=user(tmp_path), cwd=tmp_path)

    def real(text: str) -> str:
        """With our job's number for README's."""
        return re.sub(rf"\b{submitted[0].split()[-1]}\b", job.number, text)

    answer = typed(submit)
    job = cluster.job(answer.split()[-1], tmp_path)
    assert answer.splitlines() == [real(line) for line in submitted]
    job.until("every rank in the middle of a step", job.files("at", WORLD))
    assert typed(real(signal)) == "".join(nothing)
    job.until("the signal on every rank", job.files("signalled", WORLD))
    (tmp_path / "go").touch()
    assert job.number in typed(real(look)).split() and not not_shown
    job.over()
    matched([real(line) for line in shown], typed(real(cat)))
    assert job.field("Restarts") == "1"
