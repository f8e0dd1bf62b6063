"""Runs the technique as the engine does, and compares a model with its untouched copy, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.host import Host
from lightning_accel.patch import PatchSet
from lightning_accel.techniques.base import Refusal
from lightning_accel.techniques.inplace_activations import InplaceActivations

CPU = Host(kind="cpu", device_name="a test's CPU")
GPU = Host(kind="cuda", device_name="a test's GPU")


@dataclass
class Outcome:
    """What became of each site; ``patches`` are those applied."""

    applied: set[str]
    refused: dict[str, str]
    patches: PatchSet


def convert(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    host: Host = CPU,
    skip: Mapping[str, str] | None = None,
    between: Callable[[], Any] = lambda: None,
) -> Outcome:
    """Proposes, watches ``step``, applies what the verdicts allow. ``between`` runs after the code was read."""
    technique = InplaceActivations(skip=skip)
    found = list(technique.patches(model, host))
    refused = {item.site: item.reason for item in found if isinstance(item, Refusal)}
    patches = PatchSet(item for item in found if not isinstance(item, Refusal))
    between()
    with technique.trial(patches) as verdicts:
        step()
    for patch in list(patches):
        if verdicts[patch.site].keep:
            patch.apply()
        else:
            refused[patch.site] = verdicts[patch.site].reason
            patches.drop(patch.site)
    return Outcome({patch.site for patch in patches}, refused, patches)


def run(model: nn.Module, *inputs: Any, **options: Any) -> list[Tensor]:
    """Forward and backward from the same random numbers: the outputs, then all gradients, the input's among them."""
    torch.manual_seed(0)
    model.zero_grad()
    leaves = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    outputs = model(*leaves, **options)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if any(y.requires_grad for y in outputs):
        sum((y * torch.linspace(0.5, 1.5, y.numel()).view_as(y)).sum() for y in outputs).backward()
    gradients = [p.grad for p in model.parameters()] + [x.grad for x in leaves if isinstance(x, Tensor)]
    return [y.detach().clone() for y in outputs] + [g.clone() for g in gradients if g is not None]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def convert_and_compare(
    model: nn.Module, *inputs: Any, others: Sequence[Mapping[str, Any]] = (), **options: Any
) -> Outcome:
    """Converts on one configuration of options; the model must compute the same on it and on all ``others``."""
    plain = copy.deepcopy(model)
    outcome = convert(model, lambda: run(model, *inputs, **options))
    for each in ({}, *others):
        assert_same(run(model, *inputs, **{**options, **each}), run(plain, *inputs, **{**options, **each}))
    return outcome
