"""Trainings whose steps take as long as they are told to, so that what is better does not depend on the machine."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.core.host import Host
from lightning_accel.search.job import TrialSetup, TuneJob
from lightning_accel.search.search import Search, SearchOutcome
from lightning_accel.search.search_cache import Answers
from lightning_accel.search.setup_runs import SetupRuns
from lightning_accel.tuning.comparison import Result

STEP_S = 0.05


class Sleeper(LightningModule):
    """A step takes as long whatever its batch: the larger, the better."""

    def __init__(self, step_s: float = STEP_S) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.step_s = step_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.step_s)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Broken(Sleeper):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


class Scheduled(Sleeper):
    """Its schedulers ask how long the run is, and how the validation went; it writes to its logger by itself."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.logger.experiment.add_scalar("loss", 0.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        rising = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        falling = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [
            {"scheduler": rising, "interval": "step"},
            {"scheduler": falling, "monitor": "val_loss"},
        ]


class Empty(IterableDataset[Any]):
    """Ends before it begins."""

    def __iter__(self) -> Any:
        return iter(())


class Slow(Dataset[Any]):
    """A sample takes as long to load as a step of four of them to train."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(STEP_S / 4)
        return torch.ones(4), index % 2


class Samples(LightningDataModule):
    def __init__(self, batch_size: int = 8, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.num_workers = batch_size, num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), self.batch_size, num_workers=self.num_workers)


def samples(count: int = 32) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.arange(count) % 2)


def loader(batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size, shuffle=True)


def trainer(**options: Any) -> Trainer:
    given: dict[str, Any] = {"max_epochs": 100, "accelerator": "cpu", **options}
    plugins = [AccelPlugin(compile="off", techniques={"threads": 1})]
    return Trainer(plugins=plugins, enable_checkpointing=False, **{"logger": False, **given})


class Quiet:
    """A watcher that presses Ctrl-C after so many wins."""

    def __init__(self, wins: int = 1000) -> None:
        self.wins = wins

    def trying(self, what: str, best: TrialSetup) -> None:
        if not self.wins:
            raise KeyboardInterrupt

    def told(self, result: Result) -> None:
        self.wins -= result.is_won


def searched(
    model: Any,
    data: Any,
    watcher: Quiet | None = None,
    seconds: float = 60.0,
    limit: int | None = None,
    keeps: bool = False,
) -> SearchOutcome:
    job = TuneJob.of(model, data, trainer())
    host, answers = Host(kind="cpu", device_name="a CPU"), Answers({"search": "one"})
    bench = SetupRuns(job, host, "speed", limit=limit, available=1 << 40, answers=answers, seconds=seconds)
    return Search(bench, seconds=seconds, keeps_effective_batch=keeps, watcher=watcher or Quiet()).run()
