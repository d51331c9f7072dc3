"""Transformers' Trainer through us, on real ranks with a tiny model made on the spot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.stage import Stage
from tests.frameworks.story import Job, Story, Told, digest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    found = Stage("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "distckpt.integrations.transformers")
    yield found
    found.close()


def tiny() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.2))


def examples(count: int = 40) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 32, (count, 8), generator=made)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(root: str, **options: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(**{"output_dir": root, "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2,
                                "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
                                "learning_rate": 0.01, "ddp_backend": "gloo", "dataloader_pin_memory": False, **options})


def made(root: str, job: Job, **options: Any) -> Any:
    from transformers import Trainer

    from distckpt.integrations.transformers import CrashSafe

    class MyTrainer(CrashSafe, Trainer):
        background_saves = job.background
        manager_options = {"seams": job.seams, **job.extra.get("manager", {})}

    return MyTrainer(model=tiny(), args=arguments(root, **options), train_dataset=examples(), eval_dataset=examples(4))


def train(rank: int, world: int, job: Job) -> Told:
    if not job.root:
        from transformers import Trainer

        plain = Trainer(model=tiny(), args=arguments(os.devnull + "-none", save_strategy="no"), train_dataset=examples())
        plain.train()
        return Told(0, digest([plain.model.state_dict(), torch.get_rng_state()]))
    trainer = made(job.root, job, save_steps=job.every, save_total_limit=job.keep_last)
    trainer.train(resume_from_checkpoint="auto")
    return Told(trainer._initial_global_step, digest([trainer.model.state_dict(), torch.get_rng_state()]))


@pytest.mark.xdist_group("transformers")
def test_story(stage: Stage, tmp_path: Path) -> None:
    story = Story(stage, train, tmp_path, naming="checkpoint-{step}")
    plain = story.plain()
    for background in (False, True):
        story.whole(plain, background)
