"""Files of the user's own beside a framework's (B35, B36): in Accelerate's hook, in a Trainer's own method, around a DeepSpeed
engine. One name on two ranks ends the save with both named; a name of each rank's own, or one writer, does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("deepspeed", reason="needs DeepSpeed")

import distckpt
from distckpt.errors import SaveError
from tests.frameworks import alone
from tests.frameworks.stage import Stage, staged

pytestmark = pytest.mark.xdist_group("alone")

NAME = "prefetch_orders.json"
BOTH = f"ranks 0 and 1 both wrote '{NAME}': use files.mine"


stage = staged("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "deepspeed",
               "deepspeed.runtime.zero.muon.muon_optimizer", "torch._dynamo", "distckpt.integrations.transformers",
               "distckpt.integrations.accelerate")


class Names:
    """What this rank's side file is called: the same on all ranks, its own, or none but on rank 0."""

    def __init__(self, rank: int) -> None:
        self._rank, self.kind = rank, "same"

    def write(self, directory: str) -> None:
        if self.kind == "own":
            Path(directory, f"prefetch_orders.{self._rank}.json").write_text("[]")
        elif self.kind == "same" or self._rank == 0:
            Path(directory, NAME).write_text("[]")


def refused(save: Callable[[], Any]) -> str:
    with pytest.raises(SaveError) as caught:
        save()
    return str(caught.value)


def beside(root: str, step: int, naming: str = "step") -> list[str]:
    return sorted(name for name in os.listdir(f"{root}/{naming}-{step}") if name.startswith("prefetch_orders"))


def by_accelerate(rank: int, world: int, root: str, background: bool) -> tuple[str, list[list[str]]]:
    from distckpt.integrations.accelerate import Checkpointing

    accelerator, *_ = alone.accelerated("ddp")
    names = Names(rank)
    accelerator.register_save_state_pre_hook(lambda models, weights, directory: names.write(directory))
    with distckpt.CheckpointManager(root) as manager:
        checkpoints = Checkpointing(accelerator, manager)

        def save(step: int) -> None:
            checkpoints.save(step, background=background)
            manager.wait()

        said = refused(lambda: save(1))
        for step, names.kind in ((2, "own"), (3, "one")):
            save(step)
        assert manager.all_steps() == [2, 3]
    return said, [beside(root, 2), beside(root, 3)]


def by_trainer(rank: int, world: int, root: str, background: bool) -> tuple[str, list[list[str]]]:
    from transformers import Trainer

    from distckpt.integrations.transformers import CrashSafe

    names = Names(rank)

    class MyTrainer(CrashSafe, Trainer):
        background_saves = background

        def _save_rng_state(self, output_dir: str) -> None:
            super()._save_rng_state(output_dir)
            names.write(output_dir)
            names.kind = {2: "own", 4: "one"}.get(self.state.global_step, names.kind)

    def run(place: str) -> None:
        MyTrainer(model=alone.tiny(), args=alone.arguments(place), train_dataset=alone.rows()).train()

    said = refused(lambda: run(f"{root}-same"))
    names.kind = "own"
    run(root)
    return said, [beside(root, 2, "checkpoint"), beside(root, 6, "checkpoint")]


def by_deepspeed(rank: int, world: int, root: str, background: bool) -> tuple[str, list[list[str]]]:
    """Its own writers claim what they write, so the block is the user's for the rest."""
    from distckpt.payloads.deepspeed import claiming

    engine = alone.engine()
    with distckpt.CheckpointManager(root) as manager:
        def save(step: int, kind: str) -> None:
            with manager.saving(step) as files, claiming(engine, files):
                engine.save_checkpoint(os.path.dirname(files.directory), tag=os.path.basename(files.directory), save_latest=False)
                if kind == "same":
                    Path(files.claim(NAME)).write_text("[]")
                elif kind == "own":
                    Path(files.mine(NAME)).write_text("[]")
                elif files.writes(NAME):
                    Path(files.shared(NAME)).write_text("[]")

        said = refused(lambda: save(1, "same"))
        for step, kind in ((2, "own"), (3, "one")):
            save(step, kind)
        assert manager.all_steps() == [2, 3]
    return said, [beside(root, 2), beside(root, 3)]


@pytest.mark.parametrize(("writer", "background"), [(by_accelerate, False), (by_accelerate, True), (by_trainer, False),
                                                    (by_trainer, True), (by_deepspeed, False)])
def test_B35_B36_one_name_on_two_ranks_names_both_and_every_rank_may_have_its_own(
        writer: Any, background: bool, stage: Stage, tmp_path: Path) -> None:
    for said, (own, one) in stage.values(2, writer, str(tmp_path / "root"), background):
        assert BOTH in said
        assert len(own) == 2 and NAME not in own and one == [NAME]
