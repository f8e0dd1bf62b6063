"""What the benchmarks of strategies share: a language model, and the time of its steps under a Trainer."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from _networks import Transformer
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin

WARM_UP = 4  # trials, DDP's first buckets, the graph that the first step shows


class LanguageModel(LightningModule):
    """Predicts the next of random tokens with AdamW."""

    def __init__(self, blocks: int, width: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Transformer(blocks, width, max(1, width // 64), vocabulary)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class StepTimes(Callback):
    """Milliseconds from the end of each step to the end of the next, the device's work included."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._ended: float | None = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._ended is not None:
            self.ms.append(1e3 * (now - self._ended))
        self._ended = now


def step_times(model: LightningModule, tokens: Tensor, strategy: Any, *, steps: int, **options: Any) -> list[float]:
    """Trains ``steps`` steps past the warm-up.

    Args:
        model: As it was made.
        tokens: (steps, batch, length): a batch a step, on the host.
        strategy: Of the Trainer.
        steps: How many are timed.
        options: Of the Trainer.

    Returns:
        Milliseconds of each timed step.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    times = StepTimes()
    given: dict[str, Any] = {"plugins": [AccelPlugin(techniques={"flash_attention": "off"}, report=False)], **options}
    trainer = Trainer(
        strategy=strategy,
        max_steps=WARM_UP + steps,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **given,
    )
    trainer.fit(model, DataLoader([tokens[step % len(tokens)] for step in range(WARM_UP + steps)], batch_size=None))
    return times.ms[-steps:]
