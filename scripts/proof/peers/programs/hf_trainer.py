"""Transformers' Trainer, save_total_limit=2. Its rule is called: get_last_checkpoint, the highest number there is."""

from __future__ import annotations

import torch
import transformers
from common import SAVES, Run, main
from state import model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()[0]

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


class Acks(TrainerCallback):
    """``on_save`` is called when the save, its rotation included, has returned."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_save(self, args: object, state: transformers.TrainerState, control: object, **kwargs: object) -> None:
        self.run.ack(state.global_step)


def session(run: Run) -> None:
    data = [{"x": torch.randn(16), "labels": torch.randn(16)} for _ in range(8)]
    arguments = TrainingArguments(output_dir=run.root, max_steps=SAVES, save_steps=1, save_total_limit=2, use_cpu=True,
                                  per_device_train_batch_size=2, report_to=[], disable_tqdm=True, logging_steps=1)
    Trainer(model=Loss(), args=arguments, train_dataset=data, callbacks=[Acks(run)]).train()


if __name__ == "__main__":
    main(transformers.__version__, session, get_last_checkpoint)
