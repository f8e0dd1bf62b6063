"""Two ranks that train under DDP and under FSDP, the second of which comes late to every step.

Run by a test in a process of its own: python two_recorded_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from lightning_accel import AccelFSDPStrategy, AccelPlugin
from lightning_accel.callbacks import TraceCallback
from support.measured_runs import Folder, Model, fit, loader
from support.strategies.forks import in_ranks

WAIT = vars(torch.distributed.Work)["wait"]


def late(module: Model, batch_idx: int) -> Any:
    if module.global_rank == 1:
        time.sleep(0.02)


def main(folder: Path, rank: int) -> None:
    fit(Model(late), loader(64), logger=Folder(folder / "ddp"), strategy="ddp", devices=2)
    traces, sharded = TraceCallback(steps=[6]), AccelFSDPStrategy(blocks=["layer"])
    logger, callbacks = Folder(folder / "fsdp"), [traces]
    plugins = [AccelPlugin(precision="32-true", trust="checked")]
    fit(Model(late), loader(64), logger=logger, strategy=sharded, devices=2, callbacks=callbacks, plugins=plugins)
    assert vars(torch.distributed.Work)["wait"] is WAIT, "the edit was left behind"


if __name__ == "__main__":
    in_ranks(functools.partial(main, Path(sys.argv[1])), 2, patience_s=200)
