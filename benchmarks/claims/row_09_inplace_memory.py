"""In-place operations save memory.

Claimed: add, relu 50%; matmul, conv 33%
Holds: each saves its result: one of two tensors, or of three
Holds when: it saves the operation its result. Products have no in-place form: with `out=` they write into memory that
    has to be held by somebody, and a convolution allocates as much as before. A training step holds what is saved for
    backward, and a ReLU's result is saved whether it is new or not
No longer holds: the results that are spared are little beside what else is held
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.claims.claim import Figure, Target, claim_in, counted
from lightning_accel.claims.measure import NOTHING_ELSE, device, peak_step_bytes, train_step

CLAIM = claim_in(__doc__, row=9)

HALF, THIRD = Target("at least", 0.5), Target("at least", 0.33)


def measure() -> Iterator[Figure]:
    yield from operations()
    for activation in (nn.ReLU, nn.LeakyReLU):
        fresh, inplace = (peak_step_bytes(training_step(activation, on)) for on in (False, True))
        yield saved(f"it is a training step with {activation.__name__}", fresh, inplace, HALF)


def operations() -> Iterator[Figure]:
    """Operands, results and scratch memory of one operation at its peak."""
    torch.manual_seed(0)
    a, b, other = (torch.randn(1024, 1024, device=device()) for _ in range(3))
    one = torch.ones((), device=device())
    images, weight = torch.randn(8, 32, 64, 64, device=device()), torch.randn(32, 32, 3, 3, device=device())
    others = torch.empty_like(images)
    conv = (weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    cases: list[tuple[str, Sequence[Tensor], Callable[[], Any], Callable[[], Any], Target]] = [
        ("the operation is relu", [a], lambda: torch.relu(a), lambda: torch.relu_(a), HALF),
        ("the operation adds a number", [a], lambda: a + one, lambda: a.add_(one), HALF),
        ("the operation adds a tensor", [a, b], lambda: a + b, lambda: a.add_(b), HALF),
        ("a matmul writes into memory held anyway", [a, b], lambda: a @ b, lambda: torch.mm(a, b, out=other), THIRD),
        (
            "a convolution writes into memory held anyway",
            [images, weight],
            lambda: torch.ops.aten.convolution(images, *conv),
            lambda: torch.ops.aten.convolution.out(images, *conv, out=others),
            THIRD,
        ),
    ]
    for condition, operands, fresh, inplace, target in cases:
        held = sum(operand.nbytes for operand in operands)
        fresh()  # allocates what the libraries keep
        inplace()
        yield saved(condition, held + peak_step_bytes(fresh), held + peak_step_bytes(inplace), target)


def saved(condition: str, fresh: int, inplace: int, target: Target) -> Figure:
    """What is saved, as a share."""
    return counted(condition, 1 - inplace / fresh, "%", target, f"{fresh / 2**20:.4g} to {inplace / 2**20:.4g} MiB")


def training_step(activation: type[nn.Module], inplace: bool) -> Callable[[], Any]:
    """Forward and backward of six convolutions with BatchNorm on 16 images, activated in place by a plan or not."""
    torch.manual_seed(0)
    layers = [
        layer
        for channels in (3, *[32] * 5)
        for layer in (nn.Conv2d(channels, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), activation())
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 32 * 32, 10)).to(device())
    images, labels = torch.randn(16, 3, 32, 32, device=device()), torch.randint(10, (16,), device=device())
    techniques = {**NOTHING_ELSE, "inplace_activations": inplace}
    handle = accelerate(model, Plan(precision="32-true", techniques=techniques))
    step = partial(train_step, model, images, labels, handle)
    for _ in range(3):
        step()  # past the proof that it does no harm
    assert len(handle.report.applied("inplace_activations")) == 6 * inplace, handle.report.to_text()
    return step
