"""Gradient checkpointing of a 12-block transformer: peak memory of the step, and the time it costs.

    python benchmarks/checkpointing.py [--json docs/results]

To answer: `full` at least 60% lower peak of the step; `selective` at least 30% lower, at no more than half of the
extra time that `full` takes. Twice: without dropout, as models are trained from scratch today, and with it, where on a
CPU drawing attention's random mask again takes longer than the matrix products that `selective` spares.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from _measure import publish
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.claims.measure import interleaved_ms, median_ratio, peak_step_bytes

WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 512, 8, 12, 8, 256


class Block(nn.Module):
    """A pre-norm transformer block with attention written by hand, as most people write it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(self.mask, float("-inf"))
        mixed = self.dropout(scores.softmax(dim=-1)) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


def measure(dropout: float) -> tuple[list[list[str]], dict[str, Any]]:
    """The rows of one table, and everything that they were made of."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    steps: dict[str, Callable[[], None]] = {}
    for mode in ("off", "selective", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(dropout) for _ in range(BLOCKS))).to(device)
        handle = accelerate(
            model,
            Plan(
                precision="32-true",
                memory={"checkpoint": mode},
                techniques={"flash_attention": "off", "inplace_activations": False},
            ),
        )

        def step(model: nn.Module = model, handle: AcceleratedModel = handle) -> None:
            with handle.step():
                loss = model(inputs).square().mean()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None

        for _ in range(3):
            step()  # past the trials
        assert mode == "off" or len(handle.report.applied("gradient_checkpointing")) == BLOCKS, handle.report.to_text()
        steps[mode] = step
    peaks = {mode: peak_step_bytes(step) for mode, step in steps.items()}
    spent = interleaved_ms(steps, rounds=5, warm_up=1)
    extra = {mode: median_ratio(spent[mode], spent["off"]) - 1 for mode in spent}
    rows = [
        [
            f"{mode}, dropout {dropout}",
            f"{peaks[mode] / 2**20:.0f}",
            f"{100 * (1 - peaks[mode] / peaks['off']):.0f}%",
            f"{statistics.median(spent[mode]):.0f}",
            f"{100 * extra[mode]:+.0f}%",
        ]
        for mode in steps
    ]
    return rows, {"peak_bytes": peaks, "step_ms": spent, "extra_time": extra}


def main() -> None:
    measured = {dropout: measure(dropout) for dropout in (0.0, 0.1)}
    publish(
        "checkpointing",
        "python benchmarks/checkpointing.py",
        ["mode", "peak of the step, MiB", "lower by", "step, ms", "extra time"],
        [row for rows, _ in measured.values() for row in rows],
        {f"dropout {dropout}": details for dropout, (_, details) in measured.items()},
    )


if __name__ == "__main__":
    main()
