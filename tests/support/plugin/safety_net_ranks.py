"""Two CPU processes, of which one raises because of an edit; what each rank came to goes to ``<run>.<rank>.json``.

Run by a test in a process of its own: python safety_net_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_accel import AccelDDPStrategy, AccelPlugin
from support.strategies.forks import in_ranks

_PATIENCE_S = 60
# The strategy, whether with the plugin, the step in which rank 1 raises if its network is edited, and how many steps'
# gradients are added up.
RUNS: dict[str, tuple[type[Strategy], bool, int, int]] = {
    "plain": (DDPStrategy, False, 0, 1),
    "a trial step, ddp": (DDPStrategy, True, 0, 1),
    "a later step, ddp": (DDPStrategy, True, 5, 1),
    "a later step, accel_ddp": (AccelDDPStrategy, True, 5, 1),
    "plain, accumulating": (DDPStrategy, False, 0, 2),
    "the first step of two, accumulating": (DDPStrategy, True, 4, 2),
    "the second step of two, accumulating": (DDPStrategy, True, 5, 2),
}
CANNOT_BE_KEPT_AGAIN = "no step raises, and none can be kept again, ddp"
WEIGHTS_ONLY = "weights only"


class Net(LightningModule):
    """With running statistics, which DistributedDataParallel sends to all ranks at the begin of every forward."""

    def __init__(self, raises_at: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.raises_at = raises_at

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        is_edited = any("forward" in vars(module) for module in self.net.modules())
        if is_edited and batch_idx == self.raises_at and self.global_rank == 1:
            raise RuntimeError("only an edit raises this")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


class CopiedOnceAStep(list[Tensor]):
    """Every second copy fails: that which is made when the step has begun."""

    copies = 0

    def __copy__(self) -> CopiedOnceAStep:
        self.copies += 1
        if self.copies % 2 == 0:
            raise RuntimeError("no second copy")
        return CopiedOnceAStep(self)


class Seen(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("batches", default=[])

    def update(self, batch: Tensor) -> None: ...
    def compute(self) -> None: ...


class CannotBeKeptAgain(Net):
    def __init__(self, raises_at: int) -> None:
        super().__init__(raises_at)
        self.seen = Seen()

    def on_train_start(self) -> None:
        self.seen.batches = CopiedOnceAStep()  # not earlier: to move a metric makes its states anew


class TakesAView(LightningModule):
    """Refuses channels_last, in which its features have no view of this shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8 * 36, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features = self.conv(batch[0])
        return self.head(features.view(len(features), -1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


class SavesWeights(Callback):
    """Writes a checkpoint of weights only while the run goes on, and notes how the convolution's lies in memory."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.strides: tuple[int, ...] = ()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.strides = pl_module.conv.weight.stride()  # type: ignore[operator, union-attr]
        trainer.save_checkpoint(self.file, weights_only=True)


def fit(
    module: LightningModule, data: Tensor, plugins: list[Any], *callbacks: Callback, strategy: Any, accumulated: int = 1
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(timeout=timedelta(seconds=_PATIENCE_S)),
        plugins=plugins,
        callbacks=list(callbacks),
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4))


def run(name: str, folder: Path, rank: int) -> None:
    strategy, is_ours, raises_at, accumulated = RUNS.get(name, (DDPStrategy, True, -1, 1))
    seed_everything(0, verbose=False)
    plugin = AccelPlugin(precision="32-true", report=False)
    module = CannotBeKeptAgain(raises_at) if name == CANNOT_BE_KEPT_AGAIN else Net(raises_at)
    plugins = [plugin] if is_ours else []
    fit(module, torch.randn(64, 16), plugins, strategy=strategy, accumulated=accumulated)
    outcome: dict[str, Any] = {
        "weights": [p.double().sum().item() for p in module.parameters()],
        "statistics": [b.double().sum().item() for b in module.buffers()],
        "notes": plugin.report.notes,
    }
    (folder / f"{name}.{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")


def save_weights_twice(folder: Path, rank: int) -> None:
    """Of a module that refuses channels_last in its first fit, and is fitted once more."""
    seed_everything(0, verbose=False)
    module = TakesAView()
    for fitted in (1, 2):
        plugin = AccelPlugin(precision="32-true", techniques={"memory_format": "channels_last"}, report=False)
        saves = SavesWeights(folder / f"{WEIGHTS_ONLY}.{fitted}.ckpt")
        fit(module, torch.randn(64, 8, 8, 8), [plugin], saves, strategy=DDPStrategy)
        said = {"refused": plugin.report.refused("memory_format"), "strides in the run": saves.strides}
        (folder / f"{WEIGHTS_ONLY}.{fitted}.{rank}.json").write_text(json.dumps(said), encoding="utf-8")


def main(folder: Path) -> None:
    for name in (*RUNS, CANNOT_BE_KEPT_AGAIN):
        in_ranks(functools.partial(run, name, folder), 2, patience_s=2 * _PATIENCE_S)
    in_ranks(functools.partial(save_weights_twice, folder), 2, patience_s=2 * _PATIENCE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
