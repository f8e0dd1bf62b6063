"""Live trials of two CPU processes; what each rank saw goes to ``<run>.<rank>.json``.

Run by a test in a process of its own: python live_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.core.host import Host
from lightning_accel.core.purse import Purse
from lightning_accel.lightning import start_rules
from support.live_runs import Speed, Timed, batches, fit, simulated
from support.strategies.forks import in_ranks

RUNS = {  # how much faster a step is on each rank while the arm is on, and how many batches there are
    "too short": ((0.5, 0.5), 40),  # first, when nothing is remembered
    "faster on both": ((1.5, 1.4), 200),
    "faster on one": ((1.5, 0.8), 200),
}
SHORT_ON_RANKS = start_rules.SHORT_ON_RANKS  # a fork of the tests has none
LIMITED: dict[str, tuple[int, dict[str, Any]]] = {  # by the Trainer: batches of each rank's loader, and settings
    "known to be short": (20, {"max_steps": 20}),
    "known to be short, and uneven": (20, {"limit_train_batches": 12, "max_epochs": 2}),
    "not known to be short": (20, {}),
    "asked for by name": (20, {"max_steps": 20, "accel": {"threads": 1}}),
}

FAILING: dict[str, Any] = {  # the first step that fails, with which message, and what else the model has
    "fails on one": (10, "only an edit raises this"),
    "fails on one from the second step on": (1, "only an edit raises this"),
    "fails on one that has buffers": (10, "only an edit raises this, of another dtype", nn.BatchNorm1d(256)),
}


class Stream(IterableDataset[list[Tensor]]):
    """An epoch without a length, so that only one more fetch tells which batch is the last."""

    def __init__(self, batches: int) -> None:
        self.rows = 4 * batches

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter([[torch.ones(8)]] * self.rows)


class FailsOnOneRank(LightningModule):
    """On rank 1, steps do not run in bfloat16 any more, from one of them on."""

    def __init__(self, fails_from: int, message: str, *more: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 256), *more, nn.ReLU(), nn.Linear(256, 1))
        self.fails_from, self.message = fails_from, message

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and batch_idx >= self.fails_from and torch.is_autocast_enabled("cpu"):
            raise RuntimeError(self.message)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def run_all(folder: Path, rank: int) -> None:
    run_limited(folder, rank)
    for name, (speedups, steps) in RUNS.items():
        with simulated(speedups[rank]) as time:
            model = Timed(time)
            # Each rank has half of the batches.
            plugin = fit(model, loader=batches(2 * steps), devices=2, strategy="ddp")
        outcome = {"seen": model.seen, "status": plugin.report.of("tuning").status}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")

    run_failing(folder, rank)
    with simulated(1.5) as time:
        uneven = Timed(time)
        loader = DataLoader(Stream((40, 9)[rank]), batch_size=4)
        plugin = fit(uneven, loader=loader, devices=2, strategy="ddp", max_epochs=-1, max_steps=400)
    outcome = {"seen": uneven.seen, "status": plugin.report.of("tuning").status}
    (folder / f"uneven epochs.{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")


def run_failing(folder: Path, rank: int) -> None:
    for name, (fails_from, message, *more) in FAILING.items():
        outcome = fit_failing(FailsOnOneRank(fails_from, message, *more))
        (folder / f"{name}.{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")

    outcome = run_sharded()
    (folder / f"sharded.{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")


def run_sharded() -> dict[str, Any]:
    with mock.patch.object(Purse, "can_pay", return_value=True):  # whatever a trial takes on a busy machine
        plugin = fit_in_bfloat16(FailsOnOneRank(1_000, "never"), 480, "accel_fsdp")
    assert plugin.tuning is not None, str(plugin.report)
    return {"compared": [*plugin.tuning.results], "is_on": plugin.report.of("precision").is_on}


def fit_failing(failing: FailsOnOneRank) -> dict[str, Any]:
    plugin = fit_in_bfloat16(failing, 160, "ddp", trust="checked")
    weights = [parameter.tolist() for parameter in failing.parameters()]
    return {"weights": weights, "note": " ".join(plugin.report.notes)}


def fit_in_bfloat16(model: LightningModule, rows: int, strategy: str, **settings: Any) -> AccelPlugin:
    """Fits a model on both ranks, whatever this machine has: the precision that is chosen is bfloat16."""
    plugin = AccelPlugin(report=False, **settings)
    host = Host(kind="cpu", device_name="a CPU with bfloat16", native_bf16=True)
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "enable_checkpointing": False, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    torch.manual_seed(0)
    with mock.patch.object(Host, "detect", return_value=host), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(plugins=[plugin], strategy=strategy, **options, **quiet)
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(rows, 8)), batch_size=2))
    return plugin


def run_limited(folder: Path, rank: int) -> None:
    start_rules.SHORT_ON_RANKS = SHORT_ON_RANKS
    for name, (steps, settings) in LIMITED.items():
        with simulated(0.5) as time:
            Speed.latest = Speed()  # there is none in a plain run
            uneven = {"use_distributed_sampler": False} if "uneven" in name else {}
            loader = batches(steps + rank if uneven else 2 * steps)
            plugin = fit(Timed(time), loader=loader, devices=2, strategy="ddp", **settings, **uneven)
        status = plugin.report.of("speed").status
        (folder / f"{name}.{rank}.json").write_text(json.dumps(status), encoding="utf-8")
    start_rules.SHORT_ON_RANKS = 0


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    in_ranks(functools.partial(run_all, Path(sys.argv[1])), 2, patience_s=200)
