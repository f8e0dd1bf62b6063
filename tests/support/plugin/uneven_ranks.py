"""Runs of two CPU processes with different numbers of batches; how each rank ended goes to ``<run>.<rank>.json``.

Run by a test in a process of its own: python uneven_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_accel import AccelDDPStrategy, AccelFSDPStrategy, AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger
from support.strategies.forks import Ranks, as_torchrun_does

_PATIENCE_S = 90
STRATEGIES: dict[str, Any] = {"ddp": DDPStrategy, "accel_ddp": AccelDDPStrategy, "accel_fsdp": AccelFSDPStrategy}
# What is done, with how many batches on each rank, for how long, under which strategy.
RUNS: dict[str, tuple[str, tuple[int, int], dict[str, int], str]] = {
    "plain, stopped by steps": ("plain", (5, 3), {"max_steps": 6}, "ddp"),
    "stopped by steps, ddp": ("fit", (5, 3), {"max_steps": 6}, "ddp"),
    "stopped by steps, accel_ddp": ("fit", (5, 3), {"max_steps": 6}, "accel_ddp"),
    "stopped by steps, accel_fsdp": ("fit", (5, 3), {"max_steps": 6}, "accel_fsdp"),
    "plain, one ends first": ("plain", (5, 3), {"max_epochs": 1}, "ddp"),
    "one ends first": ("fit", (5, 3), {"max_epochs": 1}, "ddp"),
    "one has none": ("fit", (5, 0), {"max_epochs": 1}, "ddp"),
    "even": ("fit", (3, 3), {"max_epochs": 2}, "ddp"),
    "validated": ("validate", (0, 2), {}, "ddp"),
    "predicted": ("predict", (2, 0), {}, "ddp"),
}


class Stream(IterableDataset[Tensor]):
    """As many batches as its rank has, which nobody knows beforehand."""

    def __init__(self, batches: tuple[int, int]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.batches[torch.distributed.get_rank()]):
            yield torch.ones(2, 3, 8, 8)


class Convolutions(LightningModule):
    """Something to try: memory formats, in training as in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def run(name: str, folder: Path, rank: int) -> None:
    does, batches, until, strategy = RUNS[name]
    measured = SpeedMemoryLogger()
    ours: dict[str, Any] = {"plugins": [AccelPlugin(precision="32-true")], "callbacks": [measured]}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        # Longer than a run may take: what waits for it fails the test.
        strategy=STRATEGIES[strategy](timeout=timedelta(seconds=2 * _PATIENCE_S)),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({} if does == "plain" else ours),
        **until,
    )
    error = ""
    loader = DataLoader(Stream(batches), batch_size=None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            getattr(trainer, "fit" if does == "plain" else does)(Convolutions(), loader)
        except RuntimeError as caught:
            error = str(caught)
    outcome = {
        "error": error,
        "steps": trainer.global_step,
        "warnings": [str(warning.message) for warning in said if "different numbers" in str(warning.message)],
        "history": [asdict(epoch) for epoch in measured.history],
        "logged": sorted(trainer.callback_metrics),
    }
    (folder / f"{name}.{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")


def run_all(names: Sequence[str], folder: Path, rank: int) -> None:
    for name in names:
        run(name, folder, rank)


def main(folder: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    breaking = [name for name, (_, _, until, _) in RUNS.items() if until == {"max_epochs": 1}]
    lasting = [name for name in RUNS if name not in breaking]
    # A broken connection is not mended: those that break theirs have processes of their own.
    groups = [lasting, *([name] for name in breaking)]
    beside = [
        Ranks(functools.partial(run_all, names, folder), as_torchrun_does(2), patience_s=_PATIENCE_S)
        for names in groups
    ]
    for names, ranks in zip(groups, beside, strict=True):
        if wrong := ranks.wait():
            raise RuntimeError(f"{names}: {wrong}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
