"""A step of torch's optimizers: parameter by parameter, by foreach, fused, and fused through `optimizer="fused"`.

    python benchmarks/optimizer_steps.py [--rounds 60] [--json docs/results]

To answer: what each way gains over parameter by parameter, for many small parameters and for a few large ones, in
operations and in time; and what the technique pays for looking at every parameter before a fused step. By itself torch
goes parameter by parameter on a CPU, and takes foreach on a GPU. On a GPU where there is one. The ways take turns;
ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _measure import publish
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_accel.claims.measure import device, interleaved_ms, median_ratio
from lightning_accel.core.stepping import has_fused
from lightning_accel.techniques.optimizer_steps import StepsTogether, step_together

PARAMETERS = {
    "an MLP: 6, 134 thousand elements": [(256, 256), (256,), (256, 256), (256,), (10, 256), (10,)],
    "many small: 150 of 64x64": [(64, 64)] * 150,
    "a GPT's: 76, 11 million elements": [
        *[(256, 384), (512, 384)],
        *[(1152, 384), (1152,), (384, 384), (384,), (1536, 384), (1536,), (384, 1536), *[(384,)] * 5] * 6,
        *[(384,)] * 2,
    ],
    "few large: 3 of 1024x1024": [(1024, 1024)] * 3,
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.01),
    "SGD, momentum": partial(SGD, lr=0.01, momentum=0.9),
    "Adam": Adam,
    "AdamW": AdamW,
    "Adagrad": Adagrad,
}
ROUNDS = 60
COLUMNS = (
    "parameters",
    "optimizer",
    "one by one, ms",
    "foreach",
    "fused",
    "fused by the technique",
    "operations: one by one, foreach, fused",
)


class Counting(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.overloadpacket.__name__.startswith("_record_function")
        return func(*args, **(kwargs or {}))


def optimizer_of(make: Callable[..., Optimizer], shapes: list[tuple[int, ...]], **flags: bool) -> Optimizer:
    """An optimizer of new parameters that have gradients, once stepped."""
    parameters = [nn.Parameter(torch.randn(shape, device=device())) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    made = make(parameters, **flags)
    made.step()
    return made


def operations(optimizer: Optimizer) -> int:
    with Counting() as counting:
        optimizer.step()
    return counting.count


def row(shapes: list[tuple[int, ...]], make: Callable[..., Optimizer], rounds: int) -> tuple[list[str], dict[str, Any]]:
    sides = {
        "one by one": optimizer_of(make, shapes, foreach=False),
        "foreach": optimizer_of(make, shapes, foreach=True),
    }
    kind = type(sides["foreach"])
    if has_fused(kind, device().type, torch.float32):
        sides["fused"] = optimizer_of(make, shapes, fused=True)
        ours = sides["fused by the technique"] = optimizer_of(make, shapes)
        (patch,) = step_together("it", ours, "fused")
        assert isinstance(patch, StepsTogether)
        patch.apply()
    spent = interleaved_ms({name: side.step for name, side in sides.items()}, rounds=rounds)
    gains = {name: median_ratio(spent["one by one"], times) for name, times in spent.items()}
    counts = {name: operations(side) for name, side in sides.items()}
    cells = [f"{statistics.median(spent['one by one']):.3g}"]
    cells += [f"{gains[name]:.2f}x" if name in gains else "" for name in COLUMNS[3:6]]
    cells.append(", ".join(str(counts[name]) for name in ("one by one", "foreach", "fused") if name in counts))
    return cells, {
        "median_ms": {n: statistics.median(t) for n, t in spent.items()},
        "gain": gains,
        "operations": counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_known_args()[0].rounds
    torch.manual_seed(0)
    rows, details = [], {}
    for parameters, shapes in PARAMETERS.items():
        is_large = sum(torch.Size(shape).numel() for shape in shapes) > 1e7
        for name, make in OPTIMIZERS.items():
            cells, measured = row(shapes, make, max(5, rounds // 10) if is_large else rounds)
            rows.append([parameters, name, *cells])
            details[f"{parameters}; {name}"] = measured
    publish(
        "optimizer_steps",
        "python benchmarks/optimizer_steps.py" + (f" --rounds {rounds}" if rounds != ROUNDS else ""),
        COLUMNS,
        rows,
        details,
        by_machine=True,
    )


if __name__ == "__main__":
    main()
