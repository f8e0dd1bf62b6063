"""A training script on two CPU processes; each writes what its logger says into ``rank<n>.json``.

Run by a test in processes of its own: python two_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks import SpeedMemoryLogger


class Uneven(LightningModule):
    """Rank 1 holds 300 MiB more than rank 0, and trains on two samples of each batch where rank 0 trains on one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            self.ballast = torch.ones(300 * 2**20, dtype=torch.uint8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0][: 1 + self.global_rank]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # DDP has nothing to say about the logger, but a metric logged without sync_dist would be warned about.
    warnings.filterwarnings("error", message=".*sync_dist")
    measured = SpeedMemoryLogger(batch_size_fn=lambda batch: 1 + torch.distributed.get_rank())
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=TensorBoardLogger(folder, name="", version="board"),
        log_every_n_steps=1,
        callbacks=[measured, EarlyStopping("accel/samples_per_sec", mode="max", patience=5)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Uneven(), DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4))
    said = {
        "history": [asdict(epoch) for epoch in measured.history],
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
