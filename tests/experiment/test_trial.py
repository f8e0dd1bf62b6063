"""A trial tells good candidates from bad ones, by their numbers and by the clock."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core import clocks
from lightning_accel.core.purse import TRIALS, Purse
from lightning_accel.core.states import VerdictKind
from lightning_accel.experiment import passes
from lightning_accel.experiment.trial import Trial
from lightning_accel.experiment.trial_runs import TrialSide
from support.trial_cases import Call, X, block, compare


def shifted(module: nn.Module) -> Call:
    return lambda x: module.forward(x) + 1e-2


def wrong_gradient(module: nn.Module) -> Call:
    return lambda x: module.forward(x) + (x - x.detach())


def cut_off(module: nn.Module) -> Call:
    return lambda x: module.forward(x).detach()


def raises(error: Exception) -> Callable[[nn.Module], Call]:
    def make(module: nn.Module) -> Call:
        def call(x: Tensor) -> Tensor:
            raise error

        return call

    return make


GOOD: dict[str, Callable[[nn.Module], Call]] = {
    "itself": lambda module: module.forward,
    "another order of operations": lambda module: lambda x: module.forward(x.flip(1)).flip(1),
    "rounding": lambda module: lambda x: module.forward(x) * (1 + 1e-7),
}
BAD: dict[str, tuple[Callable[[nn.Module], Call], str]] = {
    "shifted outputs": (shifted, "other numbers than the original: relative error"),
    "wrong gradients": (wrong_gradient, "other numbers"),
    "no gradients": (cut_off, "other (numbers|shapes)"),
    "another shape": (lambda module: lambda x: module.forward(x)[:, :1], "other shapes"),
    "another count": (lambda module: lambda x: (module.forward(x), x), "other shapes"),
    "nothing": (lambda module: lambda x: None, "other shapes"),
    "not a number": (lambda module: lambda x: module.forward(x) * float("nan"), "other numbers"),
    "an exception": (raises(ValueError("no such kernel\nstack")), r"failed in its trial: ValueError: no such kernel$"),
    "no memory": (raises(torch.OutOfMemoryError("tried to allocate")), "failed in its trial: OutOfMemoryError"),
    "a silent exception": (raises(AssertionError()), "failed in its trial: AssertionError$"),
}


def modifies_what_backward_needs(module: nn.Module) -> Call:
    """The exponential of zero rows is one: multiplying it by one changes no number, and yet backward() refuses."""

    def call(x: Tensor) -> Tensor:
        y = torch.exp(module.forward(x) * 0)
        result = module.forward(x) + (y - 1)
        y.mul_(1.0)
        return result

    return call


def test_a_candidate_whose_backward_pass_would_raise_in_the_run_fails_in_its_trial() -> None:
    module = block().eval()
    found = compare(module, modifies_what_backward_needs(module), X.clone().requires_grad_())
    assert found.failure == (
        "failed in its trial: RuntimeError: a tensor that its backward pass needs was modified in place"
    )


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_a_candidate_with_the_same_numbers_agrees(make: Callable[[nn.Module], Call]) -> None:
    module = block().eval()
    found = compare(module, make(module), X.clone().requires_grad_())
    assert found.failure == ""
    assert found.spread is not None
    assert found.error <= found.spread.allowed.noise


@pytest.mark.parametrize(("make", "reason"), BAD.values(), ids=BAD)
def test_a_bad_candidate_is_refused_with_the_reason(make: Callable[[nn.Module], Call], reason: str) -> None:
    module = block().eval()
    found = compare(module, make(module), X.clone().requires_grad_())
    assert re.search(reason, found.failure)


def test_a_trial_computes_where_the_input_is_whatever_the_default_device() -> None:
    module = block().eval()
    passes._draws.cache_clear()  # of earlier trials
    with torch.device("meta"):
        found = compare(module, module.forward, X.clone().requires_grad_())
    assert found.failure == ""


class Speaking(nn.Module):
    def forward(self, x: Tensor) -> str:
        return f"{tuple(x.shape)}"


def test_what_returns_no_tensors_cannot_be_compared() -> None:
    module = Speaking()
    found = compare(module, module.forward, X)
    assert found.failure == "returns no tensors that could be compared with the original's"


class Queueing(nn.Module):
    """Returns its results in a deque, as code that keeps the latest few of them does."""

    def forward(self, x: Tensor) -> deque[Tensor]:
        return deque([x.sin(), x.cos()])


def test_tensors_in_a_deque_are_compared() -> None:
    module = Queueing()
    assert compare(module, lambda x: module.forward(x), X).failure == ""
    found = compare(module, lambda x: deque(1.5 * tensor for tensor in module.forward(x)), X)
    assert found.failure.startswith("other numbers than the original: relative error 5.0e-01")


# -- the clock -----------------------------------------------------------------------------------------------------


def test_a_candidate_that_sleeps_is_slower() -> None:
    module = nn.Linear(4, 4)

    def asleep(x: Tensor) -> Tensor:
        time.sleep(0.15)
        return module.forward(x)

    found = Trial(module, (torch.randn(4, 4),)).time(TrialSide(module.forward), TrialSide(asleep))
    assert found.candidate_ms > 10 * found.original_ms


def test_a_candidate_that_raises_only_when_timed_is_a_failure_not_an_exception() -> None:
    module = nn.Linear(4, 4)
    found = Trial(module, (torch.randn(4, 4),)).time(
        TrialSide(module.forward), TrialSide(raises(RuntimeError("later"))(module))
    )
    assert found.failure == "failed in its trial: RuntimeError: later"
    assert found.original_ms is None


# -- the purse -----------------------------------------------------------------------------------------------------


def test_a_trial_ends_where_another_call_cannot_be_paid_and_tells_the_purse_what_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(clocks, "perf_counter", lambda: now)
    module, calls = nn.Linear(4, 4), 0

    def slow(x: Tensor) -> Tensor:
        nonlocal now, calls
        now, calls = now + 1.0, calls + 1
        return module.forward(x)

    def tried(steps: int) -> VerdictKind:
        nonlocal calls
        purse, calls = Purse(), 0
        purse.steps = steps
        purse.step_took(10.0)  # of which a hundredth of the run is a tenth of a second a step
        one = Trial(module, (torch.randn(4, 4),), samples=None, purse=purse)
        found = one.numbers(TrialSide(slow), TrialSide(slow))
        assert purse.spent_s[TRIALS] == calls
        return found.kind

    assert (tried(1_000), calls) == ("kept", 2)
    assert (tried(5), calls) == ("too_dear", 1)
