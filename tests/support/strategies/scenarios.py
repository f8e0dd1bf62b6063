"""What the scenarios on two CPU processes share: their list, and a short fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.lightning_models import Supervised, Transformer

SCENARIOS: dict[str, Callable[[], Any]] = {}
SLOW: set[str] = set()  # of them, those left to `make test-slow`


def scenario(work: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[work.__name__] = work
    return work


def slow_scenario(work: Callable[[], Any]) -> Callable[[], Any]:
    SLOW.add(work.__name__)
    return scenario(work)


def fit(module: LightningModule, data: Any, strategy: Any, *callbacks: Callback, **options: Any) -> Trainer:
    settings = {"precision": "32-true", "flash_attention": "off", "report": False, **options.pop("plugin", {})}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given: dict[str, Any] = {"max_steps": 3, "plugins": [AccelPlugin.from_plan(Plan().replace(**settings))], **options}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=list(callbacks),
        enable_model_summary=False,
        **quiet,
        **given,
    )
    trainer.fit(module, data)
    return trainer


def transformer() -> Supervised:
    seed_everything(0, verbose=False)
    return Supervised(Transformer(dropout=0.0))


def whole_weights(module: nn.Module) -> Tensor:
    values = (v.full_tensor() if isinstance(v, DTensor) else v for v in module.state_dict().values())
    return torch.cat([value.detach().flatten().float() for value in values])


def is_rank_1() -> bool:
    return os.environ["RANK"] == "1"
