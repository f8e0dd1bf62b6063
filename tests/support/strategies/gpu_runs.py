"""Trains one model under each strategy on one GPU, NCCL with one rank; writes losses as JSON.

Run by a test in a process of its own: python gpu_runs.py FILE
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.lightning_models import Supervised, Transformer, tokens

RUNS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "32-true"},
    "bfloat16": {"precision": "bf16-mixed"},
    "float16": {"precision": "16-mixed"},
    "checkpointed": {"precision": "32-true", "gradient_checkpointing": "full"},
    "compiled": {"precision": "32-true", "compile": "on"},
}
STRATEGIES = ("plain", "accel", "accel_ddp", "accel_fsdp")


def train(strategy: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    module = Supervised(Transformer(dropout=0.0))
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=SingleDeviceStrategy("cuda:0") if strategy == "plain" else strategy,
        plugins=[AccelPlugin.from_plan(Plan().replace(flash_attention="off", report=False, **settings))],
        max_epochs=2,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, tokens(8))
    trainer.save_checkpoint(folder / f"{strategy}.ckpt")
    again = Supervised(Transformer(dropout=0.0))
    Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False).validate(
        again, tokens(8), ckpt_path=folder / f"{strategy}.ckpt", verbose=False, weights_only=False
    )
    return {"losses": module.losses, "strategy": type(trainer.strategy).__name__}


def main(file: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    said = {
        f"{strategy}, {run}": train(strategy, settings, file.parent)
        for run, settings in RUNS.items()
        for strategy in STRATEGIES
    }
    file.write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
