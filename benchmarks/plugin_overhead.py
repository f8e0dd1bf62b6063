"""What AccelPlugin itself costs a training step, beside the same techniques applied by hand.

    python benchmarks/plugin_overhead.py [--json docs/results]

By hand: `Trainer(precision="bf16-mixed")`, the network in channels_last, its images too, its ReLUs in place. The
plugin finds and does all that, and logs speed and memory; what is left is the time of its own hooks. One process,
fits of both in turn, every step timed from batch end to batch end; the trial steps at the start are left out.

To answer: at most 1% of a 50 ms step.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _measure import publish
from lightning.pytorch import Trainer, seed_everything
from torch import nn

from lightning_accel import AccelPlugin

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from digits import Digits, DigitsNet

STEPS, WARM_UP_STEPS, ROUNDS, BATCH_SIZE = 30, 6, 7, 20


class TimedNet(DigitsNet):
    """Notes when every batch ends."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


class ByHandNet(TimedNet):
    """What a careful user writes to have the same."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].contiguous(memory_format=torch.channels_last), batch[1]]


def step_ms(by_hand: bool) -> list[float]:
    """Milliseconds of every step of one fit, after the first few."""
    seed_everything(0, verbose=False)
    options: dict[str, Any] = {"max_steps": STEPS, "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    if by_hand:
        model: TimedNet = ByHandNet().to(memory_format=torch.channels_last)
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = True
        trainer = Trainer(precision="bf16-mixed", **options)
    else:
        model = TimedNet()
        plugin = AccelPlugin(precision="bf16-mixed", memory_format="channels_last")
        trainer = Trainer(plugins=[plugin], **options)
    model.ends = []
    trainer.fit(model, datamodule=Digits(batch_size=BATCH_SIZE))
    return [1e3 * (b - a) for a, b in zip(model.ends[WARM_UP_STEPS:], model.ends[WARM_UP_STEPS + 1 :], strict=False)]


def main() -> None:
    pairs = []
    for round_ in range(1 + ROUNDS):
        order = (True, False) if round_ % 2 else (False, True)
        medians = {by_hand: statistics.median(step_ms(by_hand)) for by_hand in order}
        if round_ > 0:
            pairs.append((medians[True], medians[False]))
    by_hand_ms = statistics.median(by_hand for by_hand, _ in pairs)
    plugin_ms = statistics.median(plugin for _, plugin in pairs)
    cost = statistics.median(plugin / by_hand - 1 for by_hand, plugin in pairs)
    publish(
        "plugin_overhead",
        "python benchmarks/plugin_overhead.py",
        ["by hand, ms a step", "AccelPlugin", "cost (median of pairs)", "lowest pair", "highest pair"],
        [
            [
                f"{by_hand_ms:.2f}",
                f"{plugin_ms:.2f}",
                f"{100 * cost:+.1f}%",
                f"{100 * min(p / h - 1 for h, p in pairs):+.1f}%",
                f"{100 * max(p / h - 1 for h, p in pairs):+.1f}%",
            ]
        ],
        {"pairs_ms": pairs},
    )


if __name__ == "__main__":
    main()
