"""Copies of a module: one that a trial runs in its place, and one without the edits of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel.core.module_copies import plain_copy, silent_copy
from lightning_accel.core.patch import MethodPatch

pytestmark = pytest.mark.numbers


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.tied = self.weight
        self.register_parameter("bias", None)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("absent", None)
        self.inner = self.again = nn.BatchNorm1d(2)
        self.add_module("empty", None)
        self.seen: list[int] = []


def test_a_twin_has_the_same_parameters_and_its_own_buffers_modules_and_lists() -> None:
    module = Everything()
    module.register_forward_hook(lambda *args: None)
    twin = silent_copy(module)
    assert twin.weight is twin.tied is module.weight
    assert (twin.bias, twin.absent, twin.empty) == (None, None, None)
    assert twin.inner is twin.again is not module.inner
    assert twin.inner.weight is module.inner.weight
    assert twin.inner.running_mean is not module.inner.running_mean
    assert torch.equal(twin.mean, module.mean)
    assert twin.mean is not module.mean
    assert twin.seen is not module.seen
    assert list(twin.state_dict()) == list(module.state_dict())


def test_what_is_done_to_a_twin_is_not_done_to_the_module() -> None:
    module = Everything()
    twin = silent_copy(module)
    twin.mean = torch.ones(2)
    twin.register_buffer("new", torch.ones(1))
    twin.inner = nn.Identity()
    assert module.mean.tolist() == [0.0, 0.0]
    assert not hasattr(module, "new")
    assert isinstance(module.inner, nn.BatchNorm1d)


def test_a_converted_twin_ties_what_was_tied() -> None:
    twin = silent_copy(Everything(), torch.float64)
    assert twin.weight is twin.tied
    assert twin.weight.dtype is twin.mean.dtype is twin.inner.running_var.dtype is torch.float64


def test_a_plain_copy_has_the_authors_methods_and_the_model_keeps_its_edits() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    model[1].forward = lambda x: -x  # of the author

    def edited(original: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(lambda self, x: original(self, x) + 1)

    for module in [*model, model[0]]:
        MethodPatch("", "edited", module, "forward", edited).apply()
    copied, x = plain_copy(model), torch.ones(1)
    assert "forward" not in vars(copied[0])
    assert (float(copied(x)), float(model(x))) == (-1.0, -2.0)
    assert not copied.training
