"""A first call is met once, before it runs, and nothing stays of that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel.core.first_call import at_first_call

pytestmark = pytest.mark.numbers


def test_a_call_is_met_once_and_runs_as_ever() -> None:
    module, x, met = nn.Linear(2, 2), torch.ones(1, 2), []
    expected = module(x)
    patch = at_first_call("", module, lambda args, kwargs: met.append((args, kwargs)))
    patch.apply()

    assert torch.equal(module(input=x), expected)
    assert torch.equal(module(x), expected)
    assert met == [((), {"input": x})]
    assert "forward" not in vars(module)
    assert not patch.is_applied


def test_a_call_of_a_copy_or_at_another_time_is_not_met() -> None:
    module, x, met = nn.Linear(2, 2), torch.ones(1, 2), []
    at_first_call("", module, lambda args, kwargs: met.append(args), when=torch.is_grad_enabled).apply()

    copy.deepcopy(module)(x)
    with torch.no_grad():
        module(x)
    assert met == []
    module(x)
    assert met == [(x,)]


def test_what_the_meeting_leaves_is_what_runs() -> None:
    module = nn.Linear(2, 2)

    def meet(args: Any, kwargs: Any) -> None:
        module.forward = lambda x: x  # type: ignore[method-assign]

    at_first_call("", module, meet).apply()

    assert torch.equal(module(torch.ones(1, 2)), torch.ones(1, 2))
