"""What SpeedMemoryLogger costs a training step, beside Lightning's ThroughputMonitor.

    python benchmarks/logger_overhead.py [--rounds 20] [--steps 400] [--json docs/results]

One process; a tiny model, so that the loop's own time is all there is. Every round trains the same number of steps
plain, with the one callback and with the other, in turn; a figure is the median over the rounds of what a round's step
took more than its own plain one. Each callback runs with the log interval and the logger that Lightning gives by
default, so neither is helped by logging less than the other.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _measure import publish
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks import SpeedMemoryLogger

BATCH_SIZE = 8
WARM_UP_STEPS = 50
CASES: dict[str, Callable[[], list[Callback]]] = {
    "plain": list,
    "SpeedMemoryLogger": lambda: [SpeedMemoryLogger()],
    "ThroughputMonitor": lambda: [ThroughputMonitor(batch_size_fn=lambda batch: int(batch[0].size(0)))],
}


class Tiny(LightningModule):
    """A step that is nearly all loop. It notes the time of every batch's end, from inside the module."""

    flops_per_batch = 1  # without it ThroughputMonitor warns

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.ends_ns: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends_ns.append(time.perf_counter_ns())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def step_us(callbacks: list[Callback], steps: int, folder: str) -> float:
    """The mean time from one step's end to the next, in an epoch of ``steps`` after a warm-up."""
    total = WARM_UP_STEPS + steps
    data = DataLoader(TensorDataset(torch.randn(total * BATCH_SIZE, 8)), batch_size=BATCH_SIZE)
    model = Tiny()
    Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=TensorBoardLogger(folder),
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, data)
    return (model.ends_ns[-1] - model.ends_ns[WARM_UP_STEPS]) / (total - 1 - WARM_UP_STEPS) / 1e3


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Medians over the rounds, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for round_index in range(rounds + 1):
            # The order turns with the rounds, so that no case always runs in another's wake.
            names = list(CASES)[round_index % len(CASES) :] + list(CASES)[: round_index % len(CASES)]
            for name in names:
                took = step_us(CASES[name](), steps, folder)
                if round_index > 0:  # the first round warms the process up
                    times[name].append(took)
    extra = {name: [a - b for a, b in zip(times[name], times["plain"], strict=True)] for name in CASES}
    return {
        "rounds": rounds,
        "steps": steps,
        "step_us": {name: statistics.median(values) for name, values in times.items()},
        "overhead_us": {name: statistics.median(extra[name]) for name in CASES if name != "plain"},
        "overhead_us_quartiles": {
            name: statistics.quantiles(extra[name], n=4)[::2] for name in CASES if name != "plain"
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    options, _ = parser.parse_known_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    result = measure(options.rounds, options.steps)
    rows = [["plain", f"{result['step_us']['plain']:.0f}", "", ""]]
    for name, overhead in result["overhead_us"].items():
        low, high = result["overhead_us_quartiles"][name]
        rows.append([name, f"{result['step_us'][name]:.0f}", f"{overhead:.1f}", f"{low:.1f} to {high:.1f}"])
    columns = ["callback", "step, µs", "overhead, µs", "quartiles"]
    publish("logger_overhead", "python benchmarks/logger_overhead.py", columns, rows, result)


if __name__ == "__main__":
    main()
