"""What every way to save memory costs: the demo's two models, time against peak, each to the plain step.

    python benchmarks/memory_modes.py [--json docs/results]

The same weights and batch for all; float32, as `accelerate(model, Plan(...))` runs them past their trials. The peak is
that of the activations: of a step, less parameters, gradients, optimizer state and buffers.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _measure import publish
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import Plan, accelerate
from lightning_accel.claims.measure import interleaved_ms, median_ratio, peak_step_bytes
from lightning_accel.core.optimizers import state_of
from lightning_accel.core.tree import unique_bytes
from lightning_accel.memory.schedule import FixedMemory

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

DISK = {"to": "disk", "min_bytes": "64KiB"}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"gradient_checkpointing": "selective"},
    "full": {"gradient_checkpointing": "full"},
    "sparse": {"sparse_activations": "auto"},
    "disk": {"activation_offloading": DISK},
    "full + disk": {"gradient_checkpointing": "full", "activation_offloading": DISK},
}
BUDGETS = (0.8, 0.6, 0.4)
PAST_TRIALS = 24


def cnn() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from digits import DigitsNet

    torch.manual_seed(0)
    images, labels = torch.randn(64, 1, 64, 64), torch.randint(10, (64,))
    return DigitsNet(), lambda model: F.cross_entropy(model(images), labels)


def gpt() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from bytes_gpt import BytesGPT

    torch.manual_seed(0)
    tokens = torch.randint(256, (8, 257))
    return BytesGPT(), lambda model: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Side:
    """One model in training in one mode."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]], **settings: Any) -> None:
        self.model, self.loss_of = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        plain = Plan(
            precision="32-true",
            techniques={"flash_attention": "off", "memory_format": "off", "inplace_activations": False},
        )
        self.handle = accelerate(self.model, Plan().replace(**{**plain.to_dict(), **settings}))
        for _ in range(PAST_TRIALS if settings else 3):
            self.step()

    def step(self) -> None:
        with self.handle.step():
            loss = self.loss_of(self.model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def activation_bytes(self) -> int:
        alive = [*self.model.parameters(), *self.model.buffers(), *state_of([self.optimizer])]
        fixed = FixedMemory.of(self.model, [self.optimizer]).total
        return unique_bytes(alive) + peak_step_bytes(self.step) - fixed


def measure(make: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]) -> dict[str, dict[str, float]]:
    """Mode → peak and time, as ratios to the plain step's."""
    sides = {name: Side(make, **settings) for name, settings in MODES.items()}
    peaks = {name: side.activation_bytes() for name, side in sides.items()}
    fixed = FixedMemory.of(sides["plain"].model, [sides["plain"].optimizer]).total
    for share in BUDGETS:
        budget = round(fixed + share * peaks["plain"])
        name = f"budget {share:.0%}"
        try:
            sides[name] = Side(make, memory_budget=budget, activation_offloading=DISK)
        except ValueError as error:
            print(f"{name}: {error}")
            continue
        peaks[name] = sides[name].activation_bytes()
    spent = interleaved_ms({name: side.step for name, side in sides.items()}, rounds=9, warm_up=1)
    return {
        name: {
            "peak": peaks[name] / peaks["plain"],
            "time": median_ratio(spent[name], spent["plain"]),
            "peak_mib": peaks[name] / 2**20,
            "step_ms": statistics.median(spent[name]),
        }
        for name in sides
    }


def main() -> None:
    measured = {"residual CNN": measure(cnn), "GPT on bytes": measure(gpt)}
    rows = [
        [model, mode, f"{m['peak_mib']:.0f}", f"{m['peak']:.2f}x", f"{m['step_ms']:.0f}", f"{m['time']:.2f}x"]
        for model, modes in measured.items()
        for mode, m in modes.items()
    ]
    columns = ["model", "mode", "peak of the activations, MiB", "to plain", "step, ms", "to plain"]
    publish("memory_modes", "python benchmarks/memory_modes.py", columns, rows, measured)


if __name__ == "__main__":
    main()
