"""The oracle: whatever the technique applies leaves every model as it was, on the step it watched and on all others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from techniques.inplace_activations import (
    inplace_models,
    inplace_models_containers,
    inplace_models_flow,
    inplace_models_modules,
)
from techniques.inplace_activations.inplace_harness import assert_same, convert_and_compare, run

_BASES = {inplace_models.Model, inplace_models_containers.Keeper, inplace_models_containers.ReadyMadeSequence}
MODELS: list[type[Any]] = [
    entry
    for module in (inplace_models, inplace_models_flow, inplace_models_modules, inplace_models_containers)
    for entry in vars(module).values()
    if isinstance(entry, type) and issubclass(entry, nn.Module) and entry.__module__ == module.__name__
    if entry not in _BASES
]


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_what_is_applied_is_exactly_what_is_safe(kind: type[Any]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 8)
    plain = copy.deepcopy(model)

    outcome = convert_and_compare(model, x, others=kind.others)

    assert outcome.applied == kind.applied, outcome.refused
    assert_same(run(model.eval(), x), run(plain.eval(), x))


def test_the_oracle_would_notice() -> None:
    """Forced in place, every model with a trap but no applied site computes something else, or raises."""
    unnoticed = [kind.__name__ for kind in MODELS if not kind.applied and not _forcing_shows(kind)]

    # The first is refused because autograd copies what a view belongs to; the others go wrong where no output shows it.
    assert set(unnoticed) == {"InputIsAView", "AlsoHeldByAClosure", "TryFinally"}


def _forcing_shows(kind: type[Any]) -> bool:
    torch.manual_seed(0)
    plain, x = kind(), torch.randn(4, 8)
    forced = copy.deepcopy(plain)
    for module in forced.modules():
        if getattr(module, "inplace", None) is False:
            module.inplace = True
    for options in ({}, *kind.others):
        for training in (True, False):
            expected = run(plain.train(training), x, **options)
            try:
                actual = run(forced.train(training), x, **options)
            except RuntimeError:
                return True
            if not all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)):
                return True
    return False
