"""Contiguous beats non-contiguous: matmul, conv, transpose, element-wise.

Claimed: matmul +50%, conv +75%, transpose +150%, element-wise equal
Holds: products, convolutions and transpositions copy what is not contiguous first, or read it in a worse order; element
    by element, the order does not matter
Holds when: it depends on the kind: products read transposed operands in place, and element-wise kernels go through
    memory in the order it lies in; gaps have to be copied away, or read along
No longer holds: products, convolutions and transpositions take strides as they come here, or hide the copy beside their
    work, and element-wise kernels are what is slowed by reading gaps along
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_accel.claims.claim import Figure, Target, claim_in
from lightning_accel.claims.measure import device, speedup, timed_ms

CLAIM = claim_in(__doc__, row=7)

SIZE, WIDE = 1024, 2048
CHANNELS, SIDE = 64, 32
CONTIGUOUS, TRANSPOSED, GAPPED = "it is contiguous", "the tensor is transposed", "the tensor has gaps"


def measure() -> Iterator[Figure]:
    operations: list[tuple[str, Callable[[Tensor], Any], Tensor, Target]] = [
        ("matmul", lambda x: x @ x, numbers(SIZE, SIZE), Target("at least", 1.5)),
        ("conv", convolution(), numbers(16, CHANNELS, SIDE, SIDE), Target("at least", 1.75)),
        ("transpose", lambda x: x.mT.contiguous(), numbers(WIDE, WIDE), Target("at least", 2.5)),
        ("element-wise", torch.relu, numbers(WIDE, WIDE), Target("about", 1)),
    ]
    for name, operation, x, target in operations:
        layouts = layouts_of(x)
        if name == "transpose":
            del layouts[TRANSPOSED]  # transposed again it is contiguous: there is nothing to do
        times = timed_ms({name: partial(operation, laid_out) for name, laid_out in layouts.items()}, seconds=1.5)
        for layout in list(layouts)[1:]:
            yield speedup(f"{layout}: {name}", times[layout], times[CONTIGUOUS], target)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device=device())


def layouts_of(x: Tensor) -> dict[str, Tensor]:
    """As many numbers, contiguous and not: the last two axes, of one length, exchanged, or a gap after every number.

    Transposed they are in the same memory: in other memory, with other pages, the same numbers may take 15% longer.
    """
    gaps = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x)
    return {CONTIGUOUS: x, TRANSPOSED: x.mT, GAPPED: gaps}


def convolution() -> Callable[[Tensor], Tensor]:
    weight = numbers(CHANNELS, CHANNELS, 3, 3)
    return lambda images: F.conv2d(images, weight, padding=1)
