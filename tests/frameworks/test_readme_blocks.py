"""README's blocks of the frameworks run as they stand there, on two ranks of the real framework, and go on when run again."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import distckpt
from tests.frameworks.stage import Stage

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")

# What a reader's own program has before the lines that README shows.
SETUPS = {
    "deepspeed": """
import json
import deepspeed
import distckpt
from tests.frameworks import dsranks
from tests.frameworks.lightning_nets import Loader
json.dump(dsranks.config(2), open("ds.json", "w"))
deepspeed.init_distributed("gloo")
model, loader, train_one_step = dsranks.net(), Loader(RANK), dsranks.step
""",
    "accelerate": """
import torch
import distckpt
from accelerate import Accelerator as _Accelerator
Accelerator = lambda: _Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.ones(8, 4))
def train_one_step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
""",
    "transformers": """
from transformers import Trainer
from tests.frameworks.test_transformers import arguments, examples, tiny
model, data = tiny(), examples()
TrainingArguments = lambda root, **more: arguments(root, max_steps=TOTAL, **more)
""",
    "lightning": """
import functools
import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from tests.frameworks.lightning_nets import Loader, Net
Trainer = functools.partial(pl.Trainer, accelerator="cpu", devices=2, logger=False, enable_progress_bar=False,
                            enable_model_summary=False, plugins=[TorchElasticEnvironment()])
model, data = Net(), Loader(RANK)
""",
}
FIRST, THEN = 4, 6


def _block(name: str, total: int) -> str:
    found = re.search(rf"<!-- runs on 2 ranks, after the set-up \"{name}\" -->\n```python\n(.*?)```", README, re.S)
    assert found is not None
    code = found.group(1)
    for shown, small in (("save_every=500", "save_every=2"), ("save_steps=500", "save_steps=2"),
                         ("max_steps=10_000", f"max_steps={total}")):
        code = code.replace(shown, small)
    return SETUPS[name] + code


def run_block(rank: int, world: int, folder: str, name: str, total: int) -> None:
    os.chdir(folder)
    names: dict[str, Any] = {"RANK": rank, "total": total, "TOTAL": total, "__name__": "reader"}
    exec(compile(_block(name, total), f"README.md, {name}", "exec"), names)


@pytest.mark.parametrize("name, root, naming, modules", [
    ("deepspeed", "runs/gpt", "step-", ("tests.frameworks.dsranks",)),
    ("accelerate", "runs/acc", "step-", ("accelerate",)),
    ("transformers", "runs/gpt", "checkpoint-", ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2")),
    ("lightning", "runs/gpt", "step-", ("lightning.pytorch",))])
def test_the_block_runs_and_goes_on(name: str, root: str, naming: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip(name)
    stage = Stage(*modules)
    try:
        for total, steps in ((FIRST, [4, 2]), (THEN, [6, 4, 2])):
            stage.values(2, run_block, str(tmp_path), name, total, limit=120)
            found = distckpt.open(tmp_path / root).checkpoints()
            assert [c.step for c in found] == steps
            assert [os.path.basename(c.path) for c in found] == [f"{naming}{step}" for step in steps]
        assert found[0].marker.parent == found[1].attempt, "it went on from the newest"
    finally:
        stage.close()
