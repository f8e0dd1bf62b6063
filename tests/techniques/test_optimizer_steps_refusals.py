"""Optimizers and groups whose steps are left as the user has them, each with the reason, and steps that must be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from lightning_accel import AccelWarning
from lightning_accel.core.stepping import kind_of
from lightning_accel.techniques.optimizer_steps import SMALL, StepsTogether, step_together
from support.optimizer_loops import Loop, alone, assert_same_training, network, operations, plain_and

pytestmark = pytest.mark.numbers


class OwnStep(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OwnGroup(AdamW):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


class OwnDefaults(AdamW):
    """What is common and harmless: other defaults, and something to look at."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)

    def norm(self) -> float:
        return 0.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


class OwnOptimizer(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def reasons(optimizer: Optimizer, setting: Any = "auto") -> dict[str, str]:
    claims = step_together("it", optimizer, setting)
    return {claim.site: claim.why_not for claim in claims if not isinstance(claim, StepsTogether)}


def ways(optimizer: Optimizer, setting: Any = "auto") -> list[str]:
    return [
        way
        for claim in step_together("it", optimizer, setting)
        if isinstance(claim, StepsTogether)
        for way in claim.variants
    ]


def weights(*shape: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape))]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (OwnStep, "OwnStep has a step of its own"),
        (OwnGroup, "OwnGroup has its own _init_group"),
        (OwnOptimizer, "OwnOptimizer is none of"),
        (LBFGS, "LBFGS is none of"),
        (SparseAdam, "SparseAdam is none of"),
    ],
)
def test_what_is_not_torchs_own_step_is_left(make: Any, reason: str) -> None:
    AdamW(weights(2))  # torch wraps the step of a class at its first instance
    assert reasons(make(weights(2)))["it"].startswith(reason)


@pytest.mark.parametrize("before", [False, True])
def test_a_subclass_that_leaves_the_step_alone_is_torchs_own(before: bool) -> None:
    class Fresh(OwnDefaults):
        """Whose step torch wraps, before that of its base or after."""

    if before:
        AdamW(weights(2))
    assert kind_of(Fresh(weights(2))) is AdamW


def test_a_step_that_somebody_put_on_the_class_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, closure: Any = None) -> None: ...

    monkeypatch.setattr(AdamW, "step", step)
    assert reasons(AdamW(weights(2))) == {"it": "AdamW.step was replaced by another one than torch's"}


def test_a_method_that_somebody_put_on_the_instance_is_left() -> None:
    optimizer = AdamW(weights(2))
    optimizer._init_group = lambda *args: False  # type: ignore[assignment,method-assign]
    assert reasons(optimizer) == {"it": "AdamW has its own _init_group"}


@pytest.mark.parametrize("chosen", [{"foreach": False}, {"foreach": True}, {"fused": False}, {"fused": True}])
def test_what_the_user_has_chosen_is_not_questioned(chosen: dict[str, bool]) -> None:
    optimizer = AdamW(weights(2), **chosen)
    ((name, value),) = chosen.items()
    assert reasons(optimizer) == {"it": f"{name}={value} was chosen for it"}


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
def test_what_is_to_be_captured_or_differentiated_is_left(name: str) -> None:
    assert reasons(Adam(weights(2), **{name: True})) == {"it": f"{name}=True was chosen for it"}


def test_choices_hold_group_by_group() -> None:
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "foreach": False}]
    optimizer = AdamW(groups)
    handle = alone("fused", model, optimizer)
    assert handle.report.refused("optimizer") == {"optimizer 0, group 1": "foreach=False was chosen for it"}
    model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    names = operations(optimizer)
    assert names.count("_fused_adamw_") == 1
    assert names.count("addcdiv_") == 2  # weight and bias of the other
    handle.undo()


def test_a_learning_rate_that_is_a_tensor_is_left() -> None:
    assert reasons(AdamW(weights(2), lr=torch.tensor(0.1))) == {"it": "its lr is a tensor"}
    assert reasons(AdamW(weights(2), betas=(torch.tensor(0.9), torch.tensor(0.99)))) == {"it": "its betas is a tensor"}


def test_complex_parameters_are_left() -> None:
    parameter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    assert "no fused step of AdamW on cpu in complex64" in reasons(AdamW([parameter]), "fused")["it"]
    plain = nn.Parameter(parameter.detach().clone())
    for each, setting in ((parameter, "foreach"), (plain, "off")):
        module = nn.Module()
        module.register_parameter("weight", each)
        optimizer = AdamW([each])
        handle = alone(setting, module, optimizer)
        each.grad = torch.ones_like(each)
        assert not any("foreach" in name for name in operations(optimizer))
        handle.undo()
    assert torch.equal(parameter, plain)


def test_one_addition_a_parameter_is_not_tried() -> None:
    optimizer = SGD(weights(2), lr=0.1)
    assert reasons(optimizer) == {"it": "its step is one addition, which nothing makes less"}
    assert ways(optimizer, "fused") == ["fused"]  # asked for
    assert ways(SGD(weights(2), lr=0.1, momentum=0.9)) == ["fused", "foreach"]


def test_large_parameters_are_not_stepped_by_foreach_on_a_cpu_unless_asked() -> None:
    assert ways(AdamW(weights(SMALL + 1))) == ["fused"]
    assert ways(AdamW(weights(SMALL + 1)), "foreach") == ["foreach"]
    assert "65,537 elements on average" in reasons(RMSprop(weights(SMALL + 1)))["it"]


def test_foreach_with_nesterov_would_change_gradients() -> None:
    optimizer = SGD(weights(2), lr=0.1, momentum=0.9, nesterov=True)
    assert ways(optimizer) == ["fused"]
    assert ways(optimizer, "foreach") == []
    theirs = SGD(parameters := weights(3), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    parameters[0].grad = torch.ones(3)
    theirs.step()
    assert not torch.equal(parameters[0].grad, torch.ones(3))  # the reason, in torch


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_a_group_that_has_a_parameter_twice_is_stepped_as_by_the_user(way: str) -> None:
    """``[*encoder.parameters(), *decoder.parameters()]``, where their weights are tied: torch only warns."""

    def make(parameters: Iterable[Any]) -> AdamW:
        tied, *others = parameters
        return AdamW([{"params": [tied, tied]}, {"params": others}], lr=0.1)

    plain, loop = plain_and(way, make)
    for each in (plain, loop):
        each.run(range(3))
    assert_same_training(loop, plain)
    assert loop.refused()["optimizer 0, group 0"].startswith("it has a parameter twice")


def test_a_group_without_parameters_is_stepped_like_the_others() -> None:
    plain, loop = plain_and("auto", lambda parameters: RMSprop([{"params": []}, {"params": parameters}]))
    for each in (plain, loop):
        each.run(range(2))
    assert_same_training(loop, plain)


def test_asked_for_and_impossible_is_a_warning_with_the_reason() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), foreach=False)
    with pytest.warns(AccelWarning, match="optimizer was asked for and found no site: foreach=False was chosen"):
        Loop(model, lambda _: optimizer, "fused").run(range(2))
