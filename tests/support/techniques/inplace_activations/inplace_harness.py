"""Trains a model with the technique and an untouched copy without, and compares the two bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.host import Host
from lightning_accel.core.patch import PatchSet
from lightning_accel.techniques.inplace_activations import InplaceActivations

CPU = Host(kind="cpu", device_name="a test's CPU")
GPU = Host(kind="cuda", device_name="a test's GPU")


@dataclass
class Converted:
    """A model with the technique in force, until ``patches.undo()``."""

    technique: InplaceActivations
    patches: PatchSet
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def in_place(self) -> dict[str, int]:
        """Site → calls done in place, for the sites with any."""
        return {name: site.in_place for name, site in self.technique.activations.items() if site.in_place}

    @property
    def as_it_was(self) -> dict[str, int]:
        return {name: site.as_it_was for name, site in self.technique.activations.items() if site.as_it_was}


def convert(
    model: nn.Module, *, host: Host = CPU, skip: Mapping[str, str] | None = None, smallest: int = 0
) -> Converted:
    """Puts the technique to work, on tensors of all sizes."""
    technique = InplaceActivations(skip=lambda: skip or {}, smallest=smallest)
    found = list(technique.sites(model, host))
    patches = PatchSet(item for item in found if not item.why_not)
    patches.apply()
    return Converted(technique, patches, {item.site: item.why_not for item in found if item.why_not})


@contextmanager
def converted(model: nn.Module, **options: Any) -> Iterator[Converted]:
    """As :func:`convert`, for as long as it lasts."""
    made = convert(model, **options)
    try:
        yield made
    finally:
        made.patches.undo()


def run(model: nn.Module, *inputs: Any, **options: Any) -> list[Tensor]:
    """Forward and backward from the same random numbers: the outputs, then all gradients, the input's among them.

    The inputs stand at the end: nobody may have overwritten them.
    """
    torch.manual_seed(0)
    model.zero_grad()
    leaves = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    outputs = model(*leaves, **options)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if any(y.requires_grad for y in outputs):
        sum((y * torch.linspace(0.5, 1.5, y.numel()).view_as(y)).sum() for y in outputs).backward()
    leaves = [x for x in leaves if isinstance(x, Tensor)]
    gradients = [p.grad for p in model.parameters()] + [x.grad for x in leaves]
    found = [*outputs, *(g for g in gradients if g is not None), *model.buffers(), *leaves]
    return [tensor.detach().clone() for tensor in found]


def train(model: nn.Module, *inputs: Any, steps: int = 3, **options: Any) -> list[Tensor]:
    """What :func:`run` finds on each of some steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        found += run(model, *inputs, **options)
        optimizer.step()
    return found


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def assert_same_training(model: nn.Module, *inputs: Any, **options: Any) -> Converted:
    """Trains with the technique and without; what was done in place is to be seen in what comes back."""
    plain = copy.deepcopy(model)
    with converted(model) as made:
        actual = train(model, *inputs, **options)
    assert_same(actual, train(plain, *inputs, **options))
    return made
