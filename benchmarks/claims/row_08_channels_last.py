"""`channels_last` for convolutions.

Claimed: faster
Holds: the convolution kernels work on this layout, and are spared the reordering on the way in and out
Holds when: only some kernels here gain by this layout; with others, reordering costs what it saves
No longer holds: the kernels here are as fast in torch's own layout, or the gain is lost in the noise

Measured over whole training steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.claims.claim import Figure, Target, claim_in
from lightning_accel.claims.measure import NOTHING_ELSE, device, speedup, timed_ms, train_step
from lightning_accel.techniques.memory_format import MemoryFormatSetting
from lightning_accel.techniques.mixed_precision import PrecisionSetting

CLAIM = claim_in(__doc__, row=8)


def measure() -> Iterator[Figure]:
    precisions: tuple[PrecisionSetting, ...] = ("32-true", "bf16-mixed")
    layouts: tuple[MemoryFormatSetting, ...] = ("off", "channels_last")
    for precision in precisions:
        sides: dict[str, Callable[[], Any]] = {}
        with ExitStack() as stack:
            for layout in layouts:
                handle, sides[layout] = training_step(layout, precision)
                stack.callback(handle.undo)
            times = timed_ms(sides, seconds=4)
        yield speedup(f"training in {precision}", times["off"], times["channels_last"], Target("more than", 1))


def training_step(
    memory_format: MemoryFormatSetting, precision: PrecisionSetting
) -> tuple[AcceleratedModel, Callable[[], Any]]:
    """A step of a small convolutional network on images of 64x64, accelerated by the memory format alone.

    16 images on a CPU, 256 on a GPU, which fewer leave idle.
    """
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 32), conv(32, 64, 2), conv(64, 64), conv(64, 128, 2), nn.Flatten())
    model.append(nn.Linear(128 * 16 * 16, 10))
    model.to(device())
    batch = 256 if device().type == "cuda" else 16
    images, labels = torch.randn(batch, 3, 64, 64, device=device()), torch.randint(10, (batch,), device=device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # Untried: what is claimed is speed, and a trial gives the layout back where sums come out rounded otherwise.
    techniques = {**NOTHING_ELSE, "memory_format": memory_format}
    handle = accelerate(model, Plan(precision=precision, techniques=techniques, trust="unchecked"))
    step = partial(train_step, model, images, labels, handle, optimizer)
    step()
    applied = handle.report.applied("memory_format")
    if len(applied) != (0 if memory_format == "off" else 4):
        handle.undo()
        raise AssertionError(handle.report.to_text())
    return handle, step


def conv(channels: int, out_channels: int, stride: int = 1) -> nn.Module:
    layer = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(out_channels), nn.ReLU())
