"""A training script on two CPU processes; each writes what its logger says into ``rank<n>.json``.

Run by a test in a process of its own: python two_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger
from support.strategies.forks import in_ranks


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


class Advised(Uneven):
    def on_train_start(self) -> None: ...

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()


class SlowForward(Advised):
    """Rank 1 takes its time over the forward pass."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.1 * self.global_rank)
        return super().training_step(batch, batch_idx)


class Slow(Dataset[Tensor]):
    def __init__(self, seconds: float = 0.02) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.ones(8)


def make_trainer(**options: Any) -> Trainer:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet, **options)


def straggling(module: LightningModule, seconds: float) -> dict[str, Any]:
    """What a run says of its ranks of which rank 1 takes so long to load a sample."""
    measured = SpeedMemoryLogger()
    # The second epoch counts: in the first one DDP rearranges its buckets, and waits for all ranks, in a forward pass.
    trainer = make_trainer(max_epochs=2, logger=False, callbacks=[measured])
    trainer.fit(module, DataLoader(Slow(seconds * trainer.global_rank), batch_size=2))
    assert measured.last is not None
    assert measured.last.stragglers is not None
    return {**asdict(measured.last.stragglers), "line": measured.last.stragglers.line()}


def advised() -> list[str]:
    """What a run says of its waiting whose ranks load their data in different ways."""
    plugin = AccelPlugin(precision="32-true")
    trainer = make_trainer(max_epochs=1, plugins=[plugin], logger=False)
    num_workers = trainer.global_rank  # rank 0 is advised to take workers, rank 1 to keep those it has
    trainer.fit(Advised(), DataLoader(Slow(), batch_size=2, num_workers=num_workers))
    return plugin.report.notes


def main(folder: Path, rank: int) -> None:
    # DDP has nothing to say about the logger, but a metric logged without sync_dist would be warned about.
    warnings.filterwarnings("error", message=".*sync_dist")
    measured = SpeedMemoryLogger(batch_size_fn=lambda batch: 1 + torch.distributed.get_rank())
    trainer = make_trainer(
        max_epochs=2,
        logger=TensorBoardLogger(folder, name="", version="board"),
        log_every_n_steps=1,
        callbacks=[measured, EarlyStopping("accel/samples_per_sec", mode="max", patience=5)],
    )
    trainer.fit(Uneven(), DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4))
    said = {
        "history": [asdict(epoch) for epoch in measured.history],
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "advice": advised(),
        "slow loader": straggling(Advised(), 0.03),
        "slow forward": straggling(SlowForward(), 0.0),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    in_ranks(functools.partial(main, Path(sys.argv[1])), 2, patience_s=200)
