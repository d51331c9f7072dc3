"""DeepSpeed ZeRO-2 where Accelerate, and Trainer above it, hold the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from tests.frameworks import test_accelerate, test_transformers
from tests.frameworks.alone import ZERO2
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import Job, Story, digest

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

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


@pytest.mark.xdist_group("hf-deepspeed")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
def test_B133_what_goes_wrong_in_deepspeeds_writer_on_one_rank_ends_the_save_on_all(
        stage: Stage, tmp_path: Path, background: bool) -> None:
    """ENOSPC, an exception, a short file: rank 1's shard of the engine that Accelerate or Trainer holds."""
    for told in stage.values(2, test_accelerate.faults, str(tmp_path / "accelerate"), background, "deepspeed"):
        assert told["wrongly blamed"] == {} and told["steps"] == [1, 8]
    for told in stage.values(2, test_transformers.faults, str(tmp_path / "trainer"), background, "deepspeed"):
        assert told["wrongly blamed"] == {} and told["failed"] == [2, 3, 4, 5, 6]
        assert told["left"] == ["checkpoint-1", "checkpoint-7"]


ZERO3 = {**ZERO2, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def evaluates(rank: int, world: int, root: str, ranks: str) -> tuple[str, list[str]]:
    """A hook runs the model, whose weights are spread over the ranks, as ``save_pretrained`` does with a prompt encoder."""
    from deepspeed.runtime.zero import GatheredParameters
    from transformers import TrainerCallback

    class Register(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
            if ranks:
                trainer.manager.on_commit(evaluate, ranks=ranks)

    losses = list[str]()

    def evaluate(record: distckpt.CommitRecord) -> None:
        row = test_transformers.examples(1)[0]["input_ids"][None]
        trainer.model_wrapped.eval()
        with torch.no_grad():
            losses.append(f"{float(trainer.model_wrapped(input_ids=row, labels=row).loss):.6f}")
        trainer.model_wrapped.train()

    trainer = test_transformers.made(root, Job(), deepspeed=ZERO3)
    trainer.add_callback(Register())
    trainer.train()
    with GatheredParameters(list(trainer.model.parameters())):
        return digest([parameter.detach().clone() for parameter in trainer.model.parameters()]), losses


@pytest.mark.xdist_group("hf-deepspeed")
def test_B58_a_forward_of_zero_3_is_for_all_ranks_and_on_rank_0_alone_is_refused_before_it_hangs(
        stage: Stage, tmp_path: Path) -> None:
    """transformers PR#29980. ZeRO-3 itself cannot go on after a gather that failed, so the run ends, and the journal says why."""
    plain, both = (stage.values(2, evaluates, str(tmp_path / f"root-{ranks}"), ranks) for ranks in ("", "all"))
    assert [weights for weights, _ in both] == [weights for weights, _ in plain]
    assert both[0][1] == both[1][1] and len(both[0][1]) == 3
    ends = stage.run(2, evaluates, str(tmp_path / "root"), "rank0")
    assert not any(end.ok for end in ends)
    journal = [json.loads(line) for line in (tmp_path / "root/.distckpt/journal/1.jsonl").read_text().splitlines()]
    told = [event for event in journal if event["event"] == "hook_failed"]
    assert [event["step"] for event in told] == [2]
    assert "evaluate runs on rank 0 alone, and it called c10d." in told[0]["error"], told


def saved(rank: int, world: int, folder: str) -> None:
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, *_ = test_accelerate.prepared(rank, "deepspeed")
    with distckpt.CheckpointManager(f"{folder}/accelerate") as manager:
        Checkpointing(accelerator, manager).save(1)
    test_transformers.made(f"{folder}/trainer", Job(), deepspeed=ZERO2, max_steps=2).train()


def resumed(rank: int, world: int, folder: str, allowed: bool) -> list[str]:
    """What is raised at another number of ranks; with ``allowed`` where the user has said that random states may be new."""
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, *_ = test_accelerate.prepared(rank, "deepspeed")
    texts = []

    def told(run: Callable[[], Any]) -> None:
        try:
            run()
            texts.append("it went on")
        except Exception as error:  # whatever it is: the test says what it must be
            texts.append(f"{type(error).__name__}: {error}")

    with distckpt.CheckpointManager(f"{folder}/accelerate") as manager:
        told(Checkpointing(accelerator, manager, on_world_change="reseed" if allowed else "error").restore)
    trainer = test_transformers.made(f"{folder}/trainer", Job(), deepspeed=ZERO2, max_steps=4)
    trainer.allow_world_change = allowed
    told(lambda: trainer.train(resume_from_checkpoint=True))
    return texts


@pytest.mark.xdist_group("hf-deepspeed")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_B132_another_number_of_ranks_is_told_to_all_and_none_hangs(
        stage: Stage, tmp_path: Path, before: int, after: int) -> None:
    stage.values(before, saved, str(tmp_path))
    for texts in stage.values(after, resumed, str(tmp_path), False):
        for text in texts:
            assert text.startswith("WorldMismatch") and f"saved by {before} ranks and is" in text and f"by {after}" in text, texts


@pytest.mark.xdist_group("hf-deepspeed")
def test_B132_the_way_out_for_zeros_shards_is_the_universal_checkpoint(stage: Stage, tmp_path: Path) -> None:
    stage.values(2, saved, str(tmp_path))
    for allowed in (False, True):
        for text in stage.values(1, resumed, str(tmp_path), allowed)[0]:
            assert text.startswith("WorldMismatch") and "universal" in text, text
