"""One side of :mod:`evidence_cost`: a training that takes turns with others, told over a socket.

    python benchmarks/_evidence_side.py SOCKET NAME FOLDER ROUNDS STEPS BATCH_SIZE

A script, as ``traceml run`` wants one.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_accel.callbacks import SpeedMemoryLogger

EVERYTHING = "everything"
"""The name of the side that measures itself; others do not, or somebody else measures them."""


class Net(LightningModule):
    """Twelve layers, so that a step has some hundred operations."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        hidden = [layer for _ in range(10) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss.detach())
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TakesTurns(Callback):
    """Trains an epoch when it is told to, and tells what a step took: seconds, and processor seconds of all threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._marks: list[tuple[float, float]] = []
        self.ended = 0.0

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pipe.recv()
        self._marks = []

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self._marks.append((time.perf_counter(), time.process_time()))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first, last = self._marks[0], self._marks[-1]
        self._pipe.send([(b - a) / (len(self._marks) - 1) for a, b in zip(first, last, strict=True)])
        self.ended = time.perf_counter()


def main() -> None:
    address, name, folder = sys.argv[1:4]
    rounds, steps, batch_size = map(int, sys.argv[4:7])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(steps * batch_size, 64), torch.randint(10, (steps * batch_size,)))
    with Client(address) as pipe:
        pipe.send(name)
        turns = TakesTurns(pipe)  # type: ignore[arg-type]
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=rounds,
            logger=TensorBoardLogger(Path(folder) / name),
            callbacks=[SpeedMemoryLogger(), turns] if name == EVERYTHING else [turns],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batches = [data[begin : begin + batch_size] for begin in range(0, len(data), batch_size)]
        trainer.fit(Net(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        pipe.send(time.perf_counter() - turns.ended)


if __name__ == "__main__":
    main()
