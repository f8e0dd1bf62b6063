"""The optimizers of a model are found where nobody names them."""

from __future__ import annotations

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

from lightning_accel.core.optimizers import living_optimizers


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


def test_things_that_refuse_to_be_asked_are_left_in_peace() -> None:
    class Proxy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise RuntimeError("nobody asks")

    proxies = [[Proxy()]]
    assert living_optimizers(nn.Linear(2, 2)) == []
    assert proxies
