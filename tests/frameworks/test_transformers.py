"""Transformers' Trainer through us, on real ranks with a tiny model made on the spot."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distckpt.durable import REAL
from distckpt.errors import ConfigError, DiskFull, SaveError, WorldMismatch
from distckpt.options import Seams
from distckpt.payloads import memory
from distckpt.testing.faults import FaultyFiles
from tests.frameworks.alone import FSDP2, TRAINERS, before
from tests.frameworks.hftools import (
    Faults,
    broken,
    broken_shard,
    counted,
    full,
    full_shard,
    hashes,
    instead,
    lost,
    saving,
    short,
    short_shard,
    without_us,
)
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import Job, Story, Told, digest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


stage = staged("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "distckpt.integrations.transformers")


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

    memory.LARGE = 1  # what is small here is large elsewhere, and written behind the training

    class MyTrainer(CrashSafe, Trainer):
        background_saves = job.background
        manager_options = {"seams": job.seams, **job.extra.get("manager", {})}

    return MyTrainer(model=tiny(), args=arguments(root, **options), train_dataset=examples(), eval_dataset=examples(4))


def final(model: torch.nn.Module) -> str:
    state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
    return digest([state, torch.get_rng_state()])


def train(rank: int, world: int, job: Job) -> Told:
    if not job.root:
        from transformers import Trainer

        args = arguments(os.devnull + "-none", save_strategy="no", **job.extra.get("arguments", {}))
        plain = Trainer(model=tiny(), args=args, train_dataset=examples())
        plain.train()
        return Told(0, final(plain.model))
    trainer = made(job.root, job, save_steps=job.every, save_total_limit=job.keep_last, **job.extra.get("arguments", {}))
    trainer.train(resume_from_checkpoint="auto")
    return Told(trainer._initial_global_step, final(trainer.model))


def fsdp(rank: int, world: int, job: Job) -> Told:
    before("fsdp2")
    return train(rank, world, job)


@pytest.mark.xdist_group("transformers")
def test_B32_story_of_fsdp2(stage: Stage, tmp_path: Path) -> None:
    story = Story(stage, fsdp, tmp_path, naming="checkpoint-{step}", extra={"arguments": FSDP2})
    plain = story.plain()
    for background in (False, True):
        root = story.saved(plain, background)
        assert (root / "checkpoint-6" / "pytorch_model_fsdp_0" / "__1_0.distcp").exists()
        story.killed_thrice(plain, background)


@pytest.mark.xdist_group("transformers")
def test_B32_story(stage: Stage, tmp_path: Path) -> None:
    story = Story(stage, train, tmp_path, naming="checkpoint-{step}")
    plain = story.plain()
    for background in (False, True):
        story.whole(plain, background)


def moves(rank: int, world: int, root: str) -> tuple[list[str], set[str]]:
    """The names that directories of this rank's got, and the staging directories in which its files were made."""
    files = FaultyFiles(REAL)
    made(root, Job(seams=Seams(files=files)), max_steps=4).train()
    renamed = [os.path.relpath(o.other, root) for o in files.log if o.op in ("rename", "exchange")]
    return ([name for name in renamed if name.startswith("checkpoint-") and "/" not in name],
            {o.path.partition("/checkpoint-")[0] for o in files.log if "/staging/" in o.path and "/checkpoint-" in o.path})


@pytest.mark.xdist_group("transformers")
def test_B33_rank_0_alone_names_what_both_wrote_into_one_directory_of_its_making(stage: Stage, tmp_path: Path) -> None:
    """trl issue 2787: each rank moved a temporary directory of its own to checkpoint-50."""
    (named, mine), (others, theirs) = stage.values(2, moves, str(tmp_path / "root"))
    assert named == ["checkpoint-2", "checkpoint-4"] and others == []
    assert theirs <= mine and len(theirs) == 2, (mine, theirs)


def bug() -> AbstractContextManager[None]:
    from transformers import PreTrainedModel

    return instead(PreTrainedModel, "save_pretrained", broken)


LATE: Faults = {
    4: (1, partial(saving, "rng_state_1", lost), "wrote nothing into this file"),
    6: (0, partial(saving, "scheduler", broken), "a bug in the framework"),
}
SHARD, WEIGHTS = "zero_pp_rank_1", "mp_rank_00_model_states"
FAULTS: dict[str, Faults] = {
    "ddp": {
        2: (1, partial(saving, "rng_state_1", full), "No space left"),
        3: (0, bug, "a bug in the framework"),  # while rank 1 stands in Trainer's own barrier
        5: (0, partial(saving, "optimizer", short), "the archive is cut off"),
        **LATE},
    "fsdp2": {
        2: (1, full_shard, "No space left"),
        3: (1, broken_shard, "a bug in the framework"),
        5: (1, partial(short_shard, 3), "the archive is cut off"),
        **LATE},
    "deepspeed": {
        2: (1, partial(saving, SHARD, full), "No space left"),
        3: (1, partial(saving, SHARD, broken), "a bug in the framework"),
        5: (1, partial(saving, SHARD, short), "the archive is cut off"),
        **LATE,
        6: (0, partial(saving, WEIGHTS, full), "No space left")},
}


def faults(rank: int, world: int, root: str, background: bool, kind: str = "ddp") -> dict[str, Any]:
    told: dict[int, str] = {}
    blamed: dict[int, str] = {}
    before(kind)
    trainer = made(root, Job(background=background), save_steps=1, max_steps=7, eval_strategy="steps", eval_steps=1,
                   metric_for_best_model="loss", save_total_limit=2,
                   **TRAINERS[kind])
    real_save = trainer._save_checkpoint

    def save(model: Any, trial: Any) -> None:
        step = trainer.state.global_step
        who, fault, text = FAULTS[kind].get(step, (-1, nullcontext, ""))
        before = {path.name: hashes(path) for path in Path(root).glob("checkpoint-*")}
        with fault() if who == rank else nullcontext():
            try:
                real_save(model, trial)
                trainer.manager.wait()
            except SaveError as error:
                assert text in str(error.failures.get(who)), (step, error)
                assert isinstance(error, DiskFull) == ("No space" in text)
                assert {path.name: hashes(path) for path in Path(root).glob("checkpoint-*")} == before
                told[step] = type(error).__name__
                blamed.update({step: str(error)} if list(error.failures) != [who] else {})

    trainer._save_checkpoint = save
    trainer.train()
    return {"failed": sorted(told), "left": sorted(path.name for path in Path(root).glob("checkpoint-*")),
            "wrongly blamed": blamed}


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_B133_what_goes_wrong_in_trainers_writers_on_one_rank_ends_the_save_on_all(
        stage: Stage, tmp_path: Path, kind: str, background: bool) -> None:
    for told in stage.values(2, faults, str(tmp_path / "root"), background, kind, limit=60):
        assert told["failed"] == sorted(FAULTS[kind])
        assert told["left"] == ["checkpoint-1", "checkpoint-7"]
        if kind != "fsdp2" or not background:  # test_accelerate.py: test_a_rank_that_another_ended_is_not_blamed
            assert told["wrongly blamed"] == {}


LOSSES = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.0, 6: 2.5}


def measured_as(trainer: Any, losses: dict[int, float]) -> dict[int, str]:
    """Every evaluation says what ``losses`` has for the step; a digest of the weights at each, as they come."""
    weights: dict[int, str] = {}

    def evaluate(trial: Any, ignore_keys: Any, skip_scheduler: bool = False) -> dict[str, float]:
        weights[trainer.state.global_step] = digest(trainer.model.state_dict())
        metrics = {"eval_loss": losses[trainer.state.global_step]}
        trainer.log(metrics)
        return metrics

    trainer._evaluate = evaluate
    return weights


def options(rank: int, world: int, root: str, limit: int) -> dict[str, Any]:
    """Best at step 2 of 6, and a limit: what stays, what the state names, what is loaded at the end; who wrote each file."""
    from transformers import modeling_utils

    background = limit == 3
    trainer = made(root, Job(background=background), save_steps=1, eval_strategy="steps", eval_steps=1,
                   load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False, save_total_limit=limit)
    weights = measured_as(trainer, LOSSES)
    with counted((modeling_utils, "safe_save_file")) as calls:
        trainer.train()
    path = f"{root}/checkpoint-6"
    written = {f"rng_state_{rank}.pth": True} | ({} if rank else {  # small ones go to memory at once
        "model.safetensors": False, "optimizer.pt": True, "scheduler.pt": not background, "training_args.bin": not background})
    assert {name: ours for name, ours, _ in calls} == written and len(calls) == 6 * len(written), "by Trainer's own, and once"
    assert all(place.startswith(root) for name, _, place in calls if name == "model.safetensors"), "written in the background"
    state = json.loads(Path(path, "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == trainer.state.best_model_checkpoint == f"{root}/checkpoint-2"
    own = json.loads(Path(f"{root}/checkpoint-2/trainer_state.json").read_text())
    assert own["best_model_checkpoint"] == f"{root}/checkpoint-2"
    assert digest(trainer.model.state_dict()) == weights[2] and trainer.args.save_total_limit == limit
    return {"last": weights[6], "best": weights[2]}


def theirs(rank: int, world: int, path: str) -> str:
    """Trainer itself goes on from the checkpoint, to the end; what it then has is what from_pretrained gives too."""
    without_us()
    from transformers import GPT2LMHeadModel, Trainer

    trainer = Trainer(model=tiny(), args=arguments(os.devnull + "-none", save_strategy="no"), train_dataset=examples())
    trainer.train(resume_from_checkpoint=path)
    assert digest(GPT2LMHeadModel.from_pretrained(path).state_dict()) == digest(trainer.model.state_dict())
    return digest(trainer.model.state_dict())


def world_changes(rank: int, world: int, root: str) -> None:
    with pytest.raises(WorldMismatch, match="saved by 2 ranks and is resumed by 1"):
        made(root, Job()).train(resume_from_checkpoint=True)
    trainer = made(root, Job(), max_steps=7, save_steps=7)
    trainer.allow_world_change = True
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 7


def anew(rank: int, world: int, root: str) -> None:
    """Another run in the same directory: what it saves is new, though its steps are low."""
    made(root, Job(), save_steps=1, max_steps=2, save_total_limit=2).train()
    assert sorted(p.name for p in Path(root).glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2", "checkpoint-old"]
    made(root, Job(), save_steps=1, max_steps=3, save_total_limit=2, save_only_model=True).train(resume_from_checkpoint=True)
    assert not Path(root, "checkpoint-3", "optimizer.pt").exists()
    last = made(root, Job(), save_steps=1, max_steps=4, save_total_limit=2)
    last.train(resume_from_checkpoint=f"{root}/checkpoint-3")
    assert (last._initial_global_step, last.state.global_step) == (3, 4)


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("limit", [1, 3])
def test_B70_B71_B76_B77_the_best_and_the_last_stay_and_the_limit_counts_both(stage: Stage, tmp_path: Path, limit: int) -> None:
    root = tmp_path / "root"
    (root / "checkpoint-old").mkdir(parents=True)
    told = stage.values(2, options, str(root), limit)[0]
    stays = {1: ["checkpoint-2", "checkpoint-6"], 3: ["checkpoint-2", "checkpoint-5", "checkpoint-6"]}[limit]
    assert sorted(p.name for p in root.glob("checkpoint-*")) == [*stays, "checkpoint-old"]
    os.utime(root / "checkpoint-6", (0, 0))
    assert stage.values(2, theirs, str(root / "checkpoint-6")) == [told["last"]] * 2
    if limit == 3:
        stage.values(1, anew, str(root))
    else:
        stage.values(1, world_changes, str(root))
        assert sorted(p.name for p in root.glob("checkpoint-*")) == [*stays, "checkpoint-7", "checkpoint-old"]


def preempted(rank: int, world: int, root: str) -> tuple[int, int]:
    """A stop signal that reaches rank 1 only."""
    from transformers import TrainerCallback

    class Signal(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
            if state.global_step == 1 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = made(root, Job(), max_steps=2000, save_strategy="no", per_device_train_batch_size=1, logging_steps=500)
    trainer.add_callback(Signal())
    trainer.train()
    return trainer.state.global_step, len(list(Path(root).glob("checkpoint-*")))


@pytest.mark.xdist_group("transformers")
def test_B123_a_signal_to_one_rank_saves_and_stops_all_at_one_step(stage: Stage, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (step, count), other = stage.values(2, preempted, str(root))
    assert (step, count) == other and count == 1 and 1 < step < 2000
    assert (root / f"checkpoint-{step}" / "rng_state_1.pth").exists()


def refused(rank: int, world: int, root: str) -> None:
    with pytest.raises(ConfigError, match="enable_jit_checkpoint"):
        made(root, Job(), enable_jit_checkpoint=True)
    trainer = made(root, Job())
    with pytest.raises(ConfigError, match="inside train"):
        trainer._save_checkpoint(trainer.model, None)
    with pytest.raises(ConfigError, match="hyperparameter"):
        trainer.train(trial={"x": 1})
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer.train(resume_from_checkpoint=True)


def torn(rank: int, world: int, root: str) -> int:
    """What Trainer would take for the newest: a directory whose marker never came."""
    trainer = made(root, Job())
    trainer.train(resume_from_checkpoint=True)
    return int(trainer._initial_global_step)


@pytest.mark.xdist_group("transformers")
def test_B01_B55_what_is_refused_and_a_torn_directory_is_passed_over(stage: Stage, tmp_path: Path) -> None:
    root = tmp_path / "root"
    stage.values(1, refused, str(root))
    stage.values(2, train, Job(str(root), steps=6, every=3))
    shutil.copytree(root / "checkpoint-6", root / "checkpoint-9")
    (root / "checkpoint-9" / "commit.json").unlink()
    (root / "checkpoint-9" / "trainer_state.json").unlink()
    (root / "checkpoint-6" / "rng_state_1.pth").write_bytes(b"")
    assert stage.values(2, torn, str(root)) == [3, 3]
    ends = stage.run(2, apart, str(tmp_path))
    assert all(end.error == "RankDisagreement" and "run-1" in end.text for end in ends), ends


def apart(rank: int, world: int, folder: str) -> None:
    made(f"{folder}/run-{rank}", Job()).train()


WHEN: dict[str, tuple[dict[str, Any], list[int]]] = {  # TrainingArguments, and the steps that they save at
    "each epoch": ({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 10},
                   [2, 4, 6]),
    "the best": ({"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss",
                  "greater_is_better": False}, [1, 2]),
    "a part of the run": ({"save_steps": 0.3, "max_steps": 10}, [3, 6, 9, 10]),
}


def when(rank: int, world: int, root: str) -> dict[str, list[list[int]]]:
    """Which steps were saved, without a limit; and again when the last is gone and the run goes on from the one before."""
    told: dict[str, list[list[int]]] = {}
    for name, (options, _) in WHEN.items():
        place, ends = Path(root, name), set()
        for background in (False, True):
            trainer = made(str(place), Job(background=background), save_total_limit=None, **options)
            measured_as(trainer, LOSSES)
            trainer.train(resume_from_checkpoint=background)
            ends.add(final(trainer.model))
            steps = sorted(int(path.name.partition("-")[2]) for path in place.glob("checkpoint-*"))
            told.setdefault(name, []).append(steps)
            assert trainer._initial_global_step == (steps[-2] if background else 0), name
            torch.distributed.barrier()
            if rank == 0 and not background:
                shutil.rmtree(place / f"checkpoint-{steps[-1]}")
            torch.distributed.barrier()
        assert len(ends) == 1, f"{name}: what goes on ends elsewhere"
        if name == "the best":
            assert trainer.state.best_model_checkpoint == f"{place}/checkpoint-2"
    return told


@pytest.mark.xdist_group("transformers")
def test_training_arguments_say_when_and_without_a_limit_all_stays(stage: Stage, tmp_path: Path) -> None:
    for told in stage.values(2, when, str(tmp_path), limit=90):
        assert told == {name: [steps] * 2 for name, (_, steps) in WHEN.items()}
