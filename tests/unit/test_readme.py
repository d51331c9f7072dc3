"""README.md says nothing that the code does not: its Python runs, its error texts are raised, its names exist."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import distckpt
from distckpt.cli import exits
from distckpt.cli.main import parser
from distckpt.errors import RankFailure
from distckpt.saving.terms import save_error
from tests.harness import run, values

REPOSITORY = Path(distckpt.__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:<!-- runs (?P<how>.*?)(?:, after the set-up \"(?P<setup>\w+)\")? -->\n)?"
                   r"```python\n(?P<code>.*?)```", re.S)

FRAMEWORKS = {"deepspeed", "accelerate", "transformers", "lightning"}
"""Set-ups of the blocks that tests/frameworks/test_readme_blocks.py runs."""

# What a reader's own program has before the lines that README shows. The names in capitals come from the test.
SETUPS = {
    "headline": """
        import distckpt, torch
        state, total = {"weights": torch.zeros(3)}, TOTAL
        def train_one_step():
            state["weights"] += 1
            return 0.5
    """,
    "fsdp": """
        import distckpt, torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        class Loader:
            position = 0
            def state_dict(self): return {"position": self.position}
            def load_state_dict(self, state): self.position = state["position"]
        total, loader, loss = TOTAL, Loader(), 9.0
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 8))
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        def train_one_step():
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loader.position += 1
            return float(loss.detach())
    """,
    "hand": """
        import distckpt, json, torch
        from pathlib import Path
        total, weights, vocabulary = TOTAL, torch.full((3,), float(RANK)), ["a", "b"]
    """,
    "simulated": """
        import distckpt, torch
    """,
    "reader": """
        import distckpt, torch
        with distckpt.CheckpointManager("runs/gpt") as manager:
            manager.save(7, {"weights": torch.zeros(3)})
        uploaded = []
        upload = uploaded.append
    """,
}


def _dedent(text: str) -> str:
    lines = text.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)


def _blocks(how: str) -> dict[str, str]:
    """Code by the name of its set-up, of the blocks that run ``how``."""
    return {match["setup"] or "": match["code"] for match in BLOCK.finditer(README) if match["how"] == how}


def _execute(rank: int, world: int, folder: str, setup: str, code: str, total: int) -> dict[str, Any]:
    os.chdir(folder)
    names: dict[str, Any] = {"RANK": rank, "WORLD": world, "TOTAL": total}
    exec(compile(_dedent(SETUPS[setup]) + "\n" + code, "README.md", "exec"), names)
    return names


def _on_ranks(rank: int, world: int, folder: str, setup: str, code: str, total: int) -> dict[str, Any]:
    names = _execute(rank, world, folder, setup, code, total)
    return {"step": names["step"], **{name: names[name].tolist() if name == "weights" else names[name]
                                      for name in ("weights", "progress") if name in names}}


def test_every_block_says_how_it_runs() -> None:
    found = list(BLOCK.finditer(README))
    assert len(found) == README.count("```python")
    known = {"in one process", "on 2 ranks", "under mpiexec"}
    assert {match["how"] for match in found} == known
    assert {match["setup"] for match in found if match["how"] != "under mpiexec"} == {*SETUPS, *FRAMEWORKS}


def test_the_headline_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = _blocks("in one process")["headline"]
    _execute(0, 1, str(tmp_path), "headline", code, 500)
    names = _execute(0, 1, str(tmp_path), "headline", code, 1000)
    assert [c.step for c in distckpt.open("runs/gpt").checkpoints()] == [1000, 500]
    assert names["state"]["weights"].tolist() == [1000.0] * 3


def test_the_fsdp_block_runs_and_resumes(tmp_path: Path) -> None:
    code = _blocks("on 2 ranks")["fsdp"]
    values(run(2, _on_ranks, str(tmp_path), "fsdp", code, 10))
    for value in values(run(2, _on_ranks, str(tmp_path), "fsdp", code, 15)):
        assert value == {"step": 15, "progress": {"tokens": 15 * 512}}
    root = distckpt.open(tmp_path / "runs/gpt")
    assert [c.step for c in root.checkpoints()] == [15, 10, 5]
    assert "loss" in root.checkpoints()[0].metrics


def test_the_hand_written_block_runs_and_resumes(tmp_path: Path) -> None:
    code = _blocks("on 2 ranks")["hand"]
    values(run(2, _on_ranks, str(tmp_path), "hand", code, 3))
    found = values(run(2, _on_ranks, str(tmp_path), "hand", code, 5))
    assert [value["weights"] for value in found] == [[5.0] * 3, [6.0] * 3]
    newest = distckpt.open(tmp_path / "runs/hand").checkpoints()[0]
    assert [entry.path for entry in newest.marker.files] == [
        "vocabulary.json", "weights.rank-00000-of-00002.pt", "weights.rank-00001-of-00002.pt"]


def test_the_reader_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = _execute(0, 1, str(tmp_path), "reader", _blocks("in one process")["reader"], 0)
    assert names["uploaded"] == [str(tmp_path / "runs/gpt/step-7")]
    assert not distckpt.open("runs/gpt").leases_on(names["checkpoint"].attempt)


@pytest.mark.skipif(importlib.util.find_spec("greenlet") is None, reason="needs greenlet: the extra 'testing'")
def test_the_block_of_the_simulation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = _execute(0, 1, str(tmp_path), "simulated", _blocks("in one process")["simulated"], 0)
    assert names["run"].resumed and not os.listdir(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and an MPI: the extra 'mpi'")
def test_the_mpi_block_runs(tmp_path: Path) -> None:
    program = tmp_path / "solver.py"
    program.write_text(_blocks("under mpiexec")[""])
    beside = Path(sys.executable).with_name("mpiexec")
    command = [str(beside) if beside.exists() else "mpiexec", "-n", "2", sys.executable, str(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [c.step for c in distckpt.open(tmp_path / "runs/solver").checkpoints()] == [30, 20]


# -- the errors page ---------------------------------------------------------------------------------------------------


def _literals() -> dict[str, list[str]]:
    """The string literals of each module, with ``…`` where a value stands."""
    found = {}
    for path in sorted((REPOSITORY / "distckpt").rglob("*.py")):
        texts = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
        found[str(path)] = texts
    return found


def _put_together(folder: Path) -> list[str]:
    """Messages that are put together from several literals, as they are raised."""
    failure = RankFailure(1, "ValueError", "boom", "node1", 7, "write")
    texts = [str(save_error(5, "a" * 16, {1: failure}, 2, outcome)) for outcome in ("aborted", "unknown")]
    with distckpt.CheckpointManager(folder) as manager:
        manager.save(5, {"a": 1})
        with pytest.raises(distckpt.StepAlreadyExists) as caught:
            manager.save(5, {"a": 1})
    return [*texts, str(caught.value)]


def _troubles() -> list[str]:
    section = README.partition("## Troubleshooting")[2]
    paragraphs = [" ".join(p.split()) for p in section.split("\n\n")]
    return [p for p in paragraphs if p.startswith("`")]


def test_the_errors_page_quotes_texts_that_are_raised(tmp_path: Path) -> None:
    literals = {**_literals(), "put together": _put_together(tmp_path)}
    troubles = _troubles()
    assert len(troubles) > 30
    for paragraph in troubles:
        head, middle, rest = paragraph.partition(" · ")
        assert middle, f"no class or place is named: {paragraph[:60]}"
        quotes = re.findall(r"`([^`]+)`", head) + [q for q in re.findall(r"`([^`]+)`", rest) if "…" in q]
        for quote in quotes:
            parts = [part.strip() for part in quote.split("…") if len(part.strip()) > 2]
            assert any(all(any(part in text for text in texts) for part in parts) for texts in literals.values()), (
                f"no module raises {quote!r}")


def test_the_errors_page_names_classes_that_exist_and_misses_none() -> None:
    named = {name for p in _troubles() for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", p.partition(" · ")[2].partition(".")[0])}
    errors = {name for name in distckpt.__all__ if isinstance(getattr(distckpt, name), type)
              and issubclass(getattr(distckpt, name), distckpt.DistckptError)}
    assert named <= errors
    assert errors - named <= {"DistckptError", "CoordinationError", "IntegrityError"}  # the roots of the others


# -- names -------------------------------------------------------------------------------------------------------------


def test_the_files_it_points_to_exist() -> None:
    for name in set(re.findall(r"`((?:tests|scripts)/[\w./-]+)`", README)):
        assert (REPOSITORY / name).exists(), name


def test_the_commands_and_exit_codes_are_the_commands_own() -> None:
    action = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    section = README.partition("## The command")[2].partition("## What stays")[0]
    lines = re.findall(r"^distckpt ([\w, -]+?)(?= +(?:\[|ROOT|NAME))", section, re.M)
    assert {name for line in lines for name in line.split(", ")} == set(action.choices)
    codes = {int(code) for code in re.findall(r"^\| (\d) \|", section, re.M)}
    assert codes == {exits.OK, exits.FAILED, exits.USAGE, exits.NO_CHECKPOINT, exits.NONE_USABLE, exits.DAMAGED, exits.IN_USE}


def test_the_retention_words_are_real(tmp_path: Path) -> None:
    line = re.search(r"`retention=(Keep[^`]+)`", README)
    assert line is not None
    policy = eval(line[1], {name: getattr(distckpt, name) for name in ("KeepLast", "KeepEvery", "KeepBest")})
    assert policy.spec == "last=3|every=1000|best=2,loss,min"
