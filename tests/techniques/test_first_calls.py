"""A first call is met once, before it runs, and nothing stays of that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel.techniques.technique_context import SiteTrial, Verdict, tried_at_first_calls

pytestmark = pytest.mark.numbers


def test_a_call_is_met_once_and_runs_as_ever() -> None:
    module, x, met = nn.Linear(2, 2), torch.ones(1, 2), []
    expected = module(x)

    def judge(args: Any, kwargs: Any) -> Verdict:
        met.append((args, kwargs))
        assert "forward" not in vars(module)
        return Verdict("kept")

    with tried_at_first_calls({"": SiteTrial(module, judge, unseen="not called")}) as verdicts:
        assert verdicts == {"": Verdict("untried", "not called")}
        assert torch.equal(module(input=x), expected)
        assert torch.equal(module(x), expected)
        assert "forward" not in vars(module)

    assert met == [((), {"input": x})]
    assert verdicts == {"": Verdict("kept")}


def test_a_call_of_a_copy_or_at_another_time_is_not_met() -> None:
    module, x, met = nn.Linear(2, 2), torch.ones(1, 2), []

    def judge(args: Any, kwargs: Any) -> Verdict:
        met.append(args)
        return Verdict("kept")

    with tried_at_first_calls({"": SiteTrial(module, judge, when=torch.is_grad_enabled)}) as verdicts:
        copy.deepcopy(module)(x)
        with torch.no_grad():
            module(x)
        assert (met, verdicts) == ([], {})
        module(x)
    assert met == [(x,)]


def test_what_the_trial_leaves_is_what_runs() -> None:
    module = nn.Linear(2, 2)

    def judge(args: Any, kwargs: Any) -> Verdict:
        module.forward = lambda x: x  # type: ignore[method-assign]
        return Verdict("kept")

    with tried_at_first_calls({"": SiteTrial(module, judge)}):
        assert torch.equal(module(torch.ones(1, 2)), torch.ones(1, 2))
