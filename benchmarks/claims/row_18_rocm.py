"""AMD ROCm: the same code.

Claimed: runs
Holds: torch speaks to AMD GPUs by the names of CUDA, and every technique answers for what differs there
Holds when: the losses of the other precision are not those of a plain run
No longer holds: the losses are not those of a plain run

Trained there, plain and accelerated; the losses are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

from lightning_accel import Plan, accelerate
from lightning_accel.claims.claim import Figure, NotHereError, Target, claim_in, counted
from lightning_accel.claims.measure import train_step
from lightning_accel.cli.decisions import ExampleModel
from lightning_accel.techniques.mixed_precision import PrecisionSetting

CLAIM = claim_in(__doc__, row=18)

STEPS = 20
ALLOWED: dict[PrecisionSetting, float] = {"32-true": 1e-3, "bf16-mixed": 0.05}
"""Precision → by how much, relative to the plain run's in float32, the loss of a step may be another."""


def measure() -> Iterator[Figure]:
    if torch.version.hip is None or not torch.cuda.is_available():
        raise NotHereError(
            "needs an AMD GPU and torch for ROCm; until one is at hand the device is simulated, in the tests and in"
            " docs/hosts.md"
        )
    yield from same_losses(torch.device("cuda"))


def same_losses(device: torch.device, end_of_step: Callable[[], None] = lambda: None) -> Iterator[Figure]:
    """How far the accelerated losses of a short training are from the plain ones, precision by precision.

    Args:
        device: Where to train.
        end_of_step: Called after every step, for devices that have to be told.
    """
    torch.manual_seed(0)
    model = ExampleModel()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # fused attention and compiled code draw other random numbers
    plain = losses(copy.deepcopy(model).to(device), None, end_of_step)
    for precision, allowed in ALLOWED.items():
        fast = losses(copy.deepcopy(model).to(device), Plan(precision=precision), end_of_step)
        error = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(fast, plain, strict=True))
        yield counted(f"the losses in {precision}, next to a plain run's", error, "error", Target("at most", allowed))


def losses(model: nn.Module, plan: Plan | None, end_of_step: Callable[[], None] = lambda: None) -> list[float]:
    """Of every step of a short training on one batch, which is learned by heart.

    Args:
        model: On its device; trained in place.
        plan: How it is accelerated; None: not at all.
        end_of_step: Called after every step.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(32, 3, 16, 16, generator=generator).to(device)
    labels = torch.randint(10, (32,), generator=generator).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = None if plan is None else accelerate(model, plan)
    found = []
    for _ in range(STEPS):
        loss = train_step(model, images, labels, handle, optimizer)
        end_of_step()
        found.append(loss.item())
    if handle is not None:
        handle.undo()
    return found
