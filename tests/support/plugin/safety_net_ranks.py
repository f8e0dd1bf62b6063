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

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_accel import AccelPlugin
from lightning_accel.strategies import AccelDDPStrategy
from support.strategies.forks import in_ranks

_PATIENCE_S = 60
# The strategy, whether with the plugin, and the step in which rank 1 raises if its network is edited.
RUNS: dict[str, tuple[type[Strategy], bool, int]] = {
    "plain": (DDPStrategy, False, 0),
    "a trial step, ddp": (DDPStrategy, True, 0),
    "a later step, ddp": (DDPStrategy, True, 5),
    "a later step, accel_ddp": (AccelDDPStrategy, True, 5),
}


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


def run(name: str, folder: Path, rank: int) -> None:
    strategy, is_ours, raises_at = RUNS[name]
    seed_everything(0, verbose=False)
    plugin = AccelPlugin(precision="32-true", log=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(timeout=timedelta(seconds=_PATIENCE_S)),  # type: ignore[call-arg]  # all of these take it
        plugins=[plugin] if is_ours else [],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net(raises_at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=4))
    outcome: dict[str, Any] = {
        "weights": [p.double().sum().item() for p in module.parameters()],
        "statistics": [b.double().sum().item() for b in module.buffers()],
        "notes": plugin.report.notes,
    }
    (folder / f"{name}.{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")


def main(folder: Path) -> None:
    for name in RUNS:
        in_ranks(functools.partial(run, name, folder), 2, patience_s=2 * _PATIENCE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
