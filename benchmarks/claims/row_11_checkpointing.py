"""Gradient checkpointing of an 8-block transformer; memory beyond parameters and batch.

Claimed: −50% memory
Holds: of every block only its input is kept, and in `selective` what its products computed; the rest is computed again,
    one block at a time
Holds when: what is kept besides the blocks' inputs, and the one block that is computed again, weigh more where less is
    recomputed, and at the peak than after the forward pass
No longer holds: little of a step's memory is activations here, or little of them can be computed again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.claims.claim import Figure, Target, claim_in, counted
from lightning_accel.claims.measure import NOTHING_ELSE, device, interleaved_ms, speedup
from lightning_accel.memory.meter import meter_for

CLAIM = claim_in(__doc__, row=11)

WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 256, 4, 8, 4, 256
MODES = ("off", "selective", "full")


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2).chunk(3, dim=1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Training:
    """A training step of the transformer without its optimizer; no gradient is left."""

    def __init__(self, mode: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device())
        self.x = torch.randn(BATCH, LENGTH, WIDTH, device=device())
        plan = Plan(precision="32-true", memory={"checkpoint": mode}, techniques=NOTHING_ELSE)
        self.handle = accelerate(self.model, plan)
        for _ in range(3):
            self()  # past what is decided in the first steps
        assert len(self.handle.report.applied("gradient_checkpointing")) == BLOCKS * (mode != "off")

    def __call__(self, between: Callable[[], None] = lambda: None) -> None:
        with self.handle.step():
            loss = self.model(self.x).square().mean()
        between()
        loss.backward()
        self.model.zero_grad()

    def bytes(self) -> tuple[int, int]:
        """Allocated beyond parameters and batch: after the forward pass, and at the peak of the step."""
        meter = meter_for(device())
        meter.start()
        self(lambda: meter.mark("forward is over"))
        before, after = meter.stop()
        saved = after.level_bytes - before.level_bytes
        return saved, max(before.peak_bytes, after.peak_bytes) - before.level_bytes


def measure() -> Iterator[Figure]:
    steps = {mode: Training(mode) for mode in MODES}
    found = {mode: step.bytes() for mode, step in steps.items()}
    times = interleaved_ms(steps, rounds=7, warm_up=1)
    for mode in MODES[1:]:
        for index, what in enumerate(("what is saved for backward", "the peak of a step")):
            plain, less = found["off"][index], found[mode][index]
            note = f"{plain / 2**20:.0f} to {less / 2**20:.0f} MiB"
            yield counted(f"in mode `{mode}`, {what} is counted", 1 - less / plain, "%", Target("at least", 0.5), note)
        yield speedup(f"in mode `{mode}`, a step's time against that without", times[mode], times["off"])
