"""What a forward pass changes is put back: random generators that the module holds."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

from lightning_accel.core.snapshot import Snapshot

OWN = {
    "torch": (torch.Generator, lambda own: float(torch.rand((), generator=own))),
    "Python": (random.Random, lambda own: own.random()),
    "NumPy": (numpy.random.default_rng, lambda own: float(own.random())),
    "NumPy, older": (numpy.random.RandomState, lambda own: float(own.random_sample())),
}


@pytest.mark.parametrize(("make", "draw"), OWN.values(), ids=OWN)
def test_a_modules_own_generator_draws_the_same_again(
    make: Callable[[], object], draw: Callable[[object], float]
) -> None:
    module = nn.Module()
    module.generator = make()
    before = Snapshot(module)
    drawn = draw(module.generator)
    assert before.restore() == ["generator"]
    assert draw(module.generator) == drawn


def test_a_generator_that_was_not_drawn_from_has_not_changed() -> None:
    module = nn.Module()
    module.generators = torch.Generator(), random.Random(1)
    module.generator, module.system = torch.Generator(), random.SystemRandom()
    assert Snapshot(module).restore() == []
