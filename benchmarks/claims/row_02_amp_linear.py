"""AMP on a linear layer, 1024x256 → 512.

Claimed: 2.5x (3.6x by the times that the article gives)
Holds: half precision is computed several times as fast here, and its casts take little beside the product
Holds when: autocast casts input and weight at every call, and the optimizer stays in float32: how much is gained
    depends on how much of the time goes into the product
No longer holds: a product this small is over so soon that the casts of every call, and what else a step does in
    float32, leave little of what half precision gains, where the device gains by it at all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from lightning_accel import Plan, accelerate
from lightning_accel.claims.claim import Figure, Target, claim_in
from lightning_accel.claims.measure import NOTHING_ELSE, device, speedup, timed_ms
from lightning_accel.core.host import Host
from lightning_accel.techniques.mixed_precision import DTYPES, PrecisionSetting, resolve_precision

CLAIM = claim_in(__doc__, row=2)

ROWS, INPUTS, OUTPUTS = 1024, 256, 512
WIDE = 2048


def measure() -> Iterator[Figure]:
    half = amp_precision()
    target = Target("at least", 2.5)
    size, wide = f"{ROWS}x{INPUTS} → {OUTPUTS}", f"{ROWS}x{WIDE} → {WIDE}"
    yield gain(f"forward in {half}, {size}", forward, half, INPUTS, OUTPUTS, target)
    yield gain(f"a whole training step in {half}, {size}", training_step, half, INPUTS, OUTPUTS, target)
    yield gain(f"a whole training step in {half}, {wide}", training_step, half, WIDE, WIDE)


def gain(
    condition: str,
    make: Callable[[PrecisionSetting, int, int], Callable[[], None]],
    half: PrecisionSetting,
    inputs: int,
    outputs: int,
    target: Target | None = None,
) -> Figure:
    """Float32 against ``half`` of what ``make`` makes for a layer of this size."""
    times = timed_ms({"float32": make("32-true", inputs, outputs), "half": make(half, inputs, outputs)}, seconds=3)
    return speedup(condition, times["float32"], times["half"], target)


def amp_precision() -> PrecisionSetting:
    """What ``precision="auto"`` comes to here where that is half precision, else ``"bf16-mixed"``."""
    precision, _ = resolve_precision("auto", Host.detect(device()))
    return "16-mixed" if precision == "16-mixed" else "bf16-mixed"


def forward(precision: PrecisionSetting, inputs: int, outputs: int) -> Callable[[], None]:
    """The layer on :data:`ROWS` rows, without gradients."""
    layer = nn.Linear(inputs, outputs, device=device())
    handle = accelerate(layer, Plan(precision=precision, techniques=NOTHING_ELSE))
    x = torch.randn(ROWS, inputs, device=device())

    def run() -> None:
        with torch.no_grad(), handle.step("predict"):
            out = layer(handle.batch(x))
        assert out.dtype == DTYPES.get(precision, torch.float32)

    return run


def training_step(precision: PrecisionSetting, inputs: int, outputs: int) -> Callable[[], None]:
    """Forward, mean square, backward, and a step of SGD."""
    layer = nn.Linear(inputs, outputs, device=device())
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    handle = accelerate(layer, Plan(precision=precision, techniques=NOTHING_ELSE))
    x = torch.randn(ROWS, inputs, device=device())

    def run() -> None:
        with handle.step():
            out = layer(handle.batch(x))
            loss = out.square().mean()
        assert out.dtype == DTYPES.get(precision, torch.float32)
        handle.scaler.scale(loss).backward()
        handle.scaler.step(optimizer)
        handle.scaler.update()
        optimizer.zero_grad()

    return run
