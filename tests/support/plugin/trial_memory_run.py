"""Trains a small network for a few steps, and prints what is then resident, free in the heap, and faulted in a step.

python trial_memory_run.py FOLDER plain|accelerated
"""

from __future__ import annotations

import ctypes
import json
import resource
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin


class Net(LightningModule):
    """Convolutions with a skip, norms, dropout: everything that is tried or asked by default but attention."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1))
        self.deep = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.Conv2d(48, 2, 3, padding=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.down(batch[0])
        return nn.functional.cross_entropy(self.up(torch.cat([x, self.deep(x)], 1)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class MallInfo(ctypes.Structure):
    """What glibc's mallinfo2(3) returns, in bytes; of it, ``fordblks`` is free."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Memory(Callback):
    def __init__(self) -> None:
        self.faults: list[int] = []
        self._before = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self._before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def on_train_batch_end(self, *args: Any) -> None:
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._before)


def main(mode: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = torch.randn(64, 3, 48, 48), torch.randint(2, (64, 48, 48))
    memory = Memory()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    plugins = [AccelPlugin(precision="32-true")] if mode == "accelerated" else []
    trainer = Trainer(
        plugins=plugins, max_epochs=1, accelerator="cpu", callbacks=[memory], enable_model_summary=False, **quiet
    )
    trainer.fit(Net(), DataLoader(TensorDataset(images, labels), batch_size=8))
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = MallInfo
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    print(
        json.dumps(
            {
                "resident_mib": resident / 2**20,
                "free_mib": library.mallinfo2().fordblks / 2**20,
                "faults": statistics.median(memory.faults[4:]),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[2])
