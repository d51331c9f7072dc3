"""DeepSpeed ZeRO-2 where Accelerate, and Trainer above it, hold the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks import test_accelerate, test_transformers
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import Story

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

ZERO2 = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
         "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}}}


stage = staged("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "tests.frameworks.dsranks",
               "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.pipe", "torch._dynamo",
               "distckpt.integrations.transformers", "distckpt.integrations.accelerate")


def assert_engines(tag: Path) -> None:
    """Every rank's shard is there, so it was DeepSpeed that wrote, and on two ranks."""
    names = sorted(p.name for p in tag.iterdir())
    assert len(names) == 3 and names[0] == "mp_rank_00_model_states.pt" and all("zero_pp_rank" in n for n in names[1:]), names


@pytest.mark.xdist_group("hf-deepspeed")
def test_accelerate_holds_the_engine(stage: Stage, tmp_path: Path) -> None:
    story = Story(stage, test_accelerate.train, tmp_path, extra={"kind": "deepspeed"})
    plain = story.plain()
    for background in (False, True):
        root = story.saved(plain, background)
        assert_engines(root / "step-6" / "pytorch_model")
        story.killed_thrice(plain, background)


@pytest.mark.xdist_group("hf-deepspeed")
def test_B31_trainer_holds_the_engine(stage: Stage, tmp_path: Path) -> None:
    story = Story(stage, test_transformers.train, tmp_path, naming="checkpoint-{step}", extra={"arguments": {"deepspeed": ZERO2}})
    plain = story.plain()
    for background in (False, True):
        root = story.saved(plain, background)
        assert_engines(root / "checkpoint-6" / "global_step6")
        assert (root / "checkpoint-6" / "latest").read_text() == "global_step6"
        assert (root / "checkpoint-6" / "zero_to_fp32.py").exists()
        story.killed_thrice(plain, background)
