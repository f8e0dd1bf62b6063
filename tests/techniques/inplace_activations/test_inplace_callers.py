"""However an activation is called, what its caller can read later stays what it was."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.techniques.inplace_activations.inplace_harness import assert_same_training, converted
from support.techniques.inplace_activations.inplace_models import Model, Temporary

pytestmark = pytest.mark.numbers


def asked(call: Callable[[nn.Module, Tensor], Any]) -> tuple[int, bool]:
    """Calls ``call(model, h)`` with a model under the technique: calls in place, and whether ``h`` was overwritten."""
    model = Temporary()
    h = torch.linspace(-1, 1, 32).view(4, 8)
    with torch.no_grad(), converted(model) as made:
        call(model, h)
    return made.in_place.get("act", 0), not torch.equal(h, torch.linspace(-1, 1, 32).view(4, 8))


def fresh() -> Tensor:
    return torch.linspace(-1, 1, 32, requires_grad=True) * 1


# In a function that the forward calls. Python 3.14 does not count what it passes to one.


def renamed(model: nn.Module, x: Tensor) -> Tensor:
    out = x
    out = model.act(out)
    return out


def renamed_and_back(model: nn.Module, x: Tensor) -> Tensor:
    y = x
    x = y
    x = model.act(x)
    return x


def renamed_by_a_pair(model: nn.Module, x: Tensor) -> Tensor:
    x, _ = x, 1
    x = model.act(x)
    return x


def renamed_in_a_branch(model: nn.Module, x: Tensor) -> Tensor:
    out = x if len(x) > 1 else x + 1
    out = model.act(out)
    return out


def a_result_of_its_own(model: nn.Module, x: Tensor) -> Tensor:
    x = x * 2
    x = model.act(x)
    return x


def a_result_of_its_own_in_a_branch(model: nn.Module, x: Tensor) -> Tensor:
    out = x * 2
    if len(x) > 1:
        out = out + 1
    out = model.act(out)
    return out


class Helped(nn.Module):
    def __init__(self, help: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act, self.help = nn.Linear(8, 8), nn.ReLU(), help

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return self.help(self, h) + h


@pytest.mark.parametrize("help", [renamed, renamed_and_back, renamed_by_a_pair, renamed_in_a_branch])
def test_what_a_function_was_passed_is_not_overwritten_by_another_name(help: Any) -> None:
    assert not assert_same_training(Helped(help), torch.randn(4, 8)).in_place


@pytest.mark.parametrize("help", [a_result_of_its_own, a_result_of_its_own_in_a_branch])
def test_a_result_of_a_functions_own_is_overwritten(help: Any) -> None:
    assert set(assert_same_training(Helped(help), torch.randn(4, 8)).in_place) == {"act"}


# How it is called


class FromC(nn.Module):
    """Not torch's: a variable that is bound anew holds an iterator over tensors that somebody has."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, hs: Any) -> Any:
        hs = map(self.act, hs)
        hs = list(hs)
        return hs


@pytest.mark.parametrize(
    "call",
    {
        "variable": lambda model, h: (model.act(h), h),
        "keyword": lambda model, h: model.act(input=h),
        "star": lambda model, h: model.act(*[h]),
        "double star": lambda model, h: model.act(**{"input": h}),
        "forward": lambda model, h: model.act.forward(h),
        "__call__": lambda model, h: model.act.__call__(h),
        "_call_impl": lambda model, h: model.act._call_impl(h),
        "of the class": lambda model, h: nn.Module.__call__(model.act, h),
        "either": lambda model, h: model.act(h if h.dim() else fresh()),
        "or": lambda model, h: model.act(None or h),
        "walrus": lambda model, h: (model.act(g := h), g),
        "map": lambda model, h: list(map(model.act, [h])),
        "map later": lambda model, h: FromC.forward(model, [h]),
        "starmap": lambda model, h: list(itertools.starmap(model.act, zip([h], strict=True))),
        "sorted": lambda model, h: sorted([h], key=model.act),
        "max": lambda model, h: max([h], key=model.act),
        "reduce": lambda model, h: functools.reduce(lambda x, y: model.act(x), [h, 0]),
        "partial": lambda model, h: functools.partial(model.act, h)(),
        "partial later": lambda model, h: functools.partial(model.act)(h),
        "comprehension": lambda model, h: [model.act(x) for x in [h]],
        "generator": lambda model, h: sum(model.act(x) for x in [h]),
        "subscript": lambda model, h: model.act([h][0]),
        "attribute": lambda model, h: model.act(type("Holder", (), {"h": h}).h),
        "bound": lambda model, h: (lambda f, x: f(x))(model.act.__call__, h),
        "getattr": lambda model, h: getattr(model, "act")(h),  # noqa: B009
    }.items(),
    ids=lambda item: item[0],
)
def test_however_it_is_called_what_the_caller_has_stays(call: tuple[str, Callable[[nn.Module, Tensor], Any]]) -> None:
    in_place, is_overwritten = asked(call[1])

    assert not is_overwritten
    assert in_place == 0


def test_compose_of_other_libraries_binds_a_variable_anew_too() -> None:
    class Composed(Model):
        def forward(self, x: Tensor) -> Tensor:
            kept = [self.a(x), self.b(x)]
            value: Any = kept
            for function in (functools.partial(map, self.act), list):
                value = function(value)
            return sum(value) + sum(kept)

    assert assert_same_training(Composed(), torch.randn(4, 8)).in_place == {}


def test_a_conditional_argument_is_none_that_the_next_name_shows() -> None:
    """The instruction before the call loads ``h``, but the branch that was taken loaded ``g``."""

    class Conditional(Model):
        def forward(self, x: Tensor, first: bool = True) -> Tensor:
            g, h = self.a(x), self.b(x)
            h = self.act(g if first else h)
            return h + g

    assert assert_same_training(Conditional(), torch.randn(4, 8)).in_place == {}


def test_generators_and_coroutines_are_callers_like_others() -> None:
    class Yielding(Model):
        def parts(self, x: Tensor) -> Iterator[Tensor]:
            h = self.a(x)
            h = self.act(h)
            yield h
            g = self.b(x)
            yield self.act(g)
            yield g

        async def later(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h = self.act(h)
            return h

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.later(x).send(None)
            except StopIteration as end:
                return sum(self.parts(x)) + end.value
            raise AssertionError

    assert assert_same_training(Yielding(), torch.randn(4, 8), steps=1).in_place == {"act": 2}


def test_a_debugger_that_looks_at_the_variables_finds_them_as_they_were() -> None:
    class Looked(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            y = self.b(x)
            y = self.act(y)
            return self.act(h) + y

    seen = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is not Looked.forward.__code__:
            return None
        h = frame.f_locals.get("h")
        if h is not None:
            seen.append((h < 0).any().item())
        return trace

    model, before = Looked(), sys.gettrace()
    with converted(model):
        sys.settrace(trace)
        try:
            model(torch.randn(4, 8))
        finally:
            sys.settrace(before)

    assert len(seen) > 0
    assert all(seen)
