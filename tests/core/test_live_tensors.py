"""Everything that a program holds is found, whoever holds it, and the way to it is named."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core.live_tensors import held_tensors

IN_A_GLOBAL_VARIABLE: list[Tensor] = []


class Pool:
    __slots__ = ("images",)

    def __init__(self, *images: Tensor) -> None:
        self.images = list(images)


class Net(nn.Module):
    seen: list[Tensor] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        IN_A_GLOBAL_VARIABLE.append(x)
        return self.layer(x)


def ways(model: nn.Module) -> set[str]:
    return {way for way, _ in held_tensors(("self", model))} - {"self.layer.weight"}


@pytest.mark.parametrize(
    ("value", "way"),
    [
        (torch.zeros(1), "self.kept"),
        ([0, torch.zeros(1)], "self.kept[1]"),
        ({"a": (torch.zeros(1),)}, "self.kept['a'][0]"),
        (deque([torch.zeros(1)]), "self.kept[0]"),
        (Pool(torch.zeros(1)), "self.kept.images[0]"),
        (functools.partial(print, torch.zeros(1)), "self.kept[0]"),
        (Pool(torch.zeros(1)).images.append, ""),
    ],
)
def test_what_an_attribute_leads_to_is_found(value: Any, way: str) -> None:
    model = Net()
    model.kept = value
    assert ways(model) == ({way} if way else set())


def test_buffers_class_attributes_and_global_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    model.register_buffer("mean", torch.zeros(1))
    monkeypatch.setattr(Net, "seen", [torch.zeros(1)])
    monkeypatch.setitem(globals(), "IN_A_GLOBAL_VARIABLE", [torch.zeros(1)])
    assert ways(model) == {"self.mean", "Net.seen[0]", "IN_A_GLOBAL_VARIABLE[0]"}


def test_what_hooks_and_closures_keep_is_found() -> None:
    activations = {"layer": torch.zeros(1)}
    model = Net()
    model.layer.register_forward_hook(lambda module, inputs, output: activations.update(layer=output))
    (way,) = ways(model)
    assert way.startswith("activations of hooks of self.layer")


def test_circles_end() -> None:
    model = Net()
    model.kept = [model, {"again": model}]
    assert ways(model) == set()
