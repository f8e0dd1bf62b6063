"""The optimizers of a model are found where nobody names them."""

from __future__ import annotations

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

from lightning_accel import Plan, accelerate
from lightning_accel.core.optimizers import are_all, living_optimizers
from support.live_runs import OTHERS_OFF


def test_optimizers_are_found_by_the_parameters_that_they_hold() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.AdamW([model.bias], lr=0.1)
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    assert living_optimizers(model) == [first, second]
    assert living_optimizers(other) == [elsewhere]


def test_a_wrapper_is_passed_over_for_what_it_wraps() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = LightningOptimizer(optimizer)
    assert isinstance(wrapper, torch.optim.Optimizer)
    assert living_optimizers(model) == [optimizer]


def test_torchs_own_are_all_there_are_if_they_have_every_parameter_that_is_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    assert are_all([first, second], model)
    assert not are_all([first], model)
    assert not are_all([], model)
    assert not are_all([LightningOptimizer(first), LightningOptimizer(second)], model)
    model[1].requires_grad_(False)
    assert are_all([first], model)


def test_those_that_nobody_told_of_are_found_beside_those_that_are_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    told, untold = (torch.optim.AdamW(part.parameters(), lr=0.1) for part in model)
    handle = accelerate(model, Plan().replace(**OTHERS_OFF | {"optimizer": "fused"}), optimizers=told)
    with handle.step():
        model(torch.ones(1, 2)).sum().backward()
    assert handle.report.applied("optimizer") == ["optimizer 0", "optimizer 1"]
    handle.undo()
    assert untold.param_groups


def test_things_that_refuse_to_be_asked_are_left_in_peace() -> None:
    class Proxy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise RuntimeError("nobody asks")

    proxies = [[Proxy()]]
    assert living_optimizers(nn.Linear(2, 2)) == []
    assert proxies
