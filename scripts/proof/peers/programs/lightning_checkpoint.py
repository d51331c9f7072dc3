"""Lightning's ModelCheckpoint with save_last. Its rule, for ckpt_path="last": the newest of the files ``last*.ckpt``."""

from __future__ import annotations

import glob
import logging
import os
import warnings

import lightning.pytorch as pl
import torch
from common import SAVES, Run, main
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from state import model

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.net, self.run = model()[0], run

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *args: object) -> None:
        self.run.ack(self.global_step)  # Lightning calls this after the callbacks' hooks, the save among them


def session(run: Run) -> None:
    saver = ModelCheckpoint(dirpath=run.root, save_last=True, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    trainer = pl.Trainer(max_steps=SAVES, accelerator="cpu", devices=1, logger=False, callbacks=[saver],
                         default_root_dir=run.root, plugins=[LightningEnvironment()], enable_progress_bar=False,
                         enable_model_summary=False)
    trainer.fit(Module(run), torch.utils.data.DataLoader(torch.randn(2 * SAVES, 16), batch_size=2))


def pick(root: str) -> str | None:
    return max(glob.glob(f"{root}/last*.ckpt"), key=os.path.getmtime, default=None)


if __name__ == "__main__":
    main(pl.__version__, session, pick)
