"""Processes that save a checkpoint over another, and end, or fill the disk, in the middle of it.

Run by a test in a process of its own: python interrupted_saves.py FOLDER. Each run leaves in ``FOLDER/<run>`` what it
had when it ended, beside ``whole.pt``, a copy of what its first save wrote, and ``said.txt``, what was raised.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_accel.resilience.atomic_checkpoint import AtomicCheckpointIO, save_atomically
from support.resilience.replacing import replacing_folder

ROOM = 1 << 20  # bytes that a file may have once there is no more


def state(value: float) -> dict[str, Tensor]:
    """Of 2 MiB, in two halves: the first one fits."""
    return {half: torch.full((1 << 18,), value) for half in ("a", "b")}


def end_within_the_next_save() -> None:
    """The system ends the process with a signal at the write that goes too far."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))


def leave_no_room() -> None:
    """The write that goes too far fails, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))


def save_twice(folder: Path, interrupt: Callable[[], None]) -> None:
    save_atomically(state(1.0), folder / "last.ckpt")
    shutil.copy(folder / "last.ckpt", folder / "whole.pt")
    interrupt()
    save_atomically(state(2.0), folder / "last.ckpt")


def save_folders(folder: Path, interrupt: Callable[[], None]) -> None:
    for value in (1.0, 2.0):
        with replacing_folder(folder / "last.ckpt") as shards:
            torch.save({"value": value}, shards / "0.pt")
            torch.save(state(value), shards / "1.pt")
        if value == 1.0:
            shutil.copy(folder / "last.ckpt" / "1.pt", folder / "whole.pt")
            interrupt()


class Large(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers[1](self.layers[0](batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, interrupt: Callable[[], None]) -> None:
    class InterruptSecondEpoch(AtomicCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            if Path(path).name == "last.ckpt" and checkpoint["epoch"] == 1:
                shutil.copy(path, folder / "whole.pt")
                interrupt()
            super().save_checkpoint(checkpoint, path, storage_options)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[InterruptSecondEpoch()],
        callbacks=[ModelCheckpoint(folder, "best", save_last=True)],
    )
    trainer.fit(Large(), DataLoader(TensorDataset(torch.randn(4, 512))))


RUNS: dict[str, Callable[[Path], None]] = {
    f"{name}, {how}": lambda folder, run=run, interrupt=interrupt: run(folder, interrupt)
    for name, run in {"file": save_twice, "folder": save_folders, "trainer": train}.items()
    for how, interrupt in {"ended": end_within_the_next_save, "full": leave_no_room}.items()
}


def run(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir()
    try:
        RUNS[name](folder)
    except Exception as error:
        (folder / "said.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # torch and Lightning are imported once
    for name in RUNS:
        process = fork.Process(target=run, args=(name, Path(sys.argv[1], name)))
        process.start()
        process.join()
        ends = -signal.SIGXFSZ if name.endswith("ended") else os.EX_OK
        assert process.exitcode == ends, f"{name}: {process.exitcode}"
