"""Two ranks that train under DDP, the second of which comes late to every step.

Run by a test in a process of its own: python two_recorded_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch.loggers import CSVLogger

from support.measured_runs import Model, fit, loader
from support.strategies.forks import in_ranks


def late(module: Model, batch_idx: int) -> Any:
    if module.global_rank == 1:
        time.sleep(0.02)


def main(folder: Path, rank: int) -> None:
    fit(Model(late), loader(120), logger=CSVLogger(folder), strategy="ddp", devices=2)


if __name__ == "__main__":
    in_ranks(functools.partial(main, Path(sys.argv[1])), 2, patience_s=200)
