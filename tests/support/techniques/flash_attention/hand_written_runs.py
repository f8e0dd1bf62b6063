"""How the tests run a module whose attention is written by hand, as it is and fused, and compare the two."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.techniques.flash_attention.backends import BACKENDS, Backend
from lightning_accel.techniques.flash_attention.hand_written import HandWrittenSite
from support.errors import relative_error

SDPA = BACKENDS["sdpa"]
# What two orders of the longest sums here, of 64 numbers, may differ by in float32. relative_error measures what is
# zero but for rounding, as the gradients of the queries of a single position are, against a hundredth of the largest.
ROUNDING = 100 * torch.finfo(torch.float32).eps * math.sqrt(64)


def make(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options)


def batch(size: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, T, 32), the last two positions of the first sample padding."""
    x = torch.randn(size, length, 32, dtype=dtype)
    x[0, max(1, length - 2) :] = 0
    return x


def run(site: HandWrittenSite, x: Tensor, backend: Backend = SDPA) -> Any:
    return site.run(backend, type(site.module).forward, (x,), {})


def results(module: nn.Module, forward: Any, x: Tensor) -> list[Tensor]:
    """Outputs, then gradients of the input and of every parameter that has one."""
    x = x.clone().requires_grad_()
    outputs = forward(x)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    wanted = [x, *module.parameters()]
    loss = sum((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum() for output in outputs)
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [output.detach() for output in outputs] + [g for g in gradients if g is not None]


def assert_same(
    module: nn.Module, site: HandWrittenSite, x: Tensor, tolerance: float = ROUNDING, backend: Backend = SDPA
) -> None:
    expected = results(module, module, x)
    actual = results(module, lambda x: run(site, x, backend), x)
    assert relative_error(actual, expected) < tolerance
