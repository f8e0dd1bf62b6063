"""What the tests of trials share: a comparison of a module with a candidate, and a block to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.experiment.trial_runs import TrialSide
from support.models import TransformerBlock

Call = Callable[..., Any]

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))


def compare(module: nn.Module, candidate: Call, *args: Any, **options: Any) -> NumbersComparison:
    return Trial(module, args, **options).numbers(TrialSide(module.forward), TrialSide(candidate))


def block() -> TransformerBlock:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TransformerBlock()


@contextmanager
def allowing(operation: str, rounding: str) -> Iterator[None]:
    """What float32 may be rounded to on a processor, in an operation: ``matmul`` or ``conv``."""
    products: Any = getattr(torch.backends.mkldnn, operation)
    before, products.fp32_precision = products.fp32_precision, rounding
    try:
        yield
    finally:
        products.fp32_precision = before
