"""The oracle: models in many writing styles train to the same bits with the technique as without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from support.techniques.inplace_activations import (
    inplace_models,
    inplace_models_containers,
    inplace_models_flow,
    inplace_models_modules,
)
from support.techniques.inplace_activations.inplace_harness import assert_same, converted, run, train

pytestmark = pytest.mark.numbers

_BASES = {inplace_models.Model, inplace_models_containers.Keeper, inplace_models_containers.ReadyMadeSequence}
MODELS: list[type[Any]] = [
    entry
    for module in (inplace_models, inplace_models_flow, inplace_models_modules, inplace_models_containers)
    for entry in vars(module).values()
    if isinstance(entry, type) and issubclass(entry, nn.Module) and entry.__module__ == module.__name__
    if entry not in _BASES
]


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_what_is_done_in_place_changes_no_bit(kind: type[Any]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 8)
    plain = copy.deepcopy(model)

    with converted(model) as made:
        actual = [run(model, x, **options) for options in ({}, *kind.others)]
        in_place = made.in_place
        actual += [train(model, x, steps=2), run(model.eval(), x)]
        with torch.no_grad():
            actual.append(run(model, x))
    expected = [run(plain, x, **options) for options in ({}, *kind.others)]
    expected += [train(plain, x, steps=2), run(plain.eval(), x)]
    with torch.no_grad():
        expected.append(run(plain, x))

    assert in_place == kind.in_place
    for a, b in zip(actual, expected, strict=True):
        assert_same(a, b)


def test_the_oracle_would_notice() -> None:
    """Forced in place, every model with a trap but no call in place computes something else, or raises."""
    unnoticed = [kind.__name__ for kind in MODELS if not kind.in_place and not _forcing_shows(kind)]

    # Safe, and written in ways that do not show it; of the others autograd copies what a view belongs to, or what goes
    # wrong is nothing that an output shows.
    safe = {
        *("ReadThroughViewOfTheResultOnly", "CalledInAConditionalExpression", "ChainedAssignmentUnread"),
        *("ActivationsInAModuleList", "MetadataAfterwards"),
    }
    assert set(unnoticed) == {"InputIsAView", "TryFinally", *safe}


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
