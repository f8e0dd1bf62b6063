"""Optimizers and groups whose steps are left as the user has them, each with the reason, and steps that must be."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from lightning_accel import AccelWarning, Plan, accelerate
from lightning_accel.core.stepping import kind_of
from lightning_accel.techniques.optimizer_steps import SMALL, StepsTogether, step_together
from support.optimizer_loops import Loop, alone, assert_same_training, network, operations, plain_and

pytestmark = pytest.mark.numbers

momentum = partial(SGD, lr=0.1, momentum=0.9)


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


# -- steps that must be the user's own ---------------------------------------------------------------------------------


def told(loop: Loop) -> str:
    """What the report says of the optimizer, once a step has begun after it was found."""
    with loop.handle.step():
        pass
    return loop.handle.report.to_text()


class Embedded(nn.Module):
    """With sparse gradients: (B,) of integers → (B, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 5, sparse=True), nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.table((inputs[:, 0] * 4 % 9).abs().long()))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("way", ["fused", "foreach"])
@pytest.mark.parametrize("make", [momentum, Adagrad], ids=["SGD", "Adagrad"])
def test_sparse_gradients_are_stepped_as_by_the_user(make: Any, way: str) -> None:
    torch.manual_seed(0)
    model = Embedded()
    plain, loop = Loop(copy.deepcopy(model), make), Loop(model, make, way)
    for each in (plain, loop):
        each.run(range(4))
    torch.testing.assert_close(loop.weights(), plain.weights())
    assert "in the user's way in steps where a gradient is sparse" in told(loop)


class Thawing(nn.Module):
    """Whose second half joins in the course of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, dtype=torch.float64), nn.Linear(5, 5, dtype=torch.float64)
        self.has_thawed = False

    def forward(self, inputs: Tensor) -> Tensor:
        x: Tensor = self.first(inputs)
        return self.second(x) if self.has_thawed else x


@pytest.mark.parametrize("make", [momentum, AdamW, Adagrad])
def test_parameters_without_gradients_at_first_join_later(make: Any) -> None:
    """Torch's fused SGD raises where some momentum buffers are there and others are not (torch 2.11 to 2.13)."""
    torch.manual_seed(0)
    model = Thawing()
    plain, loop = Loop(copy.deepcopy(model), make), Loop(model, make, "fused")
    for each in (plain, loop):
        each.run(range(2))
        each.model.has_thawed = True
        each.run(range(2, 5))
    assert_same_training(loop, plain)
    loop.gradients(5)
    assert any(name.startswith("_fused") for name in operations(loop.optimizer))
    assert ("some of its parameters have no momentum yet" in told(loop)) is (make is momentum)


def test_a_group_without_gradients_is_passed_over() -> None:
    plain, loop = plain_and("fused", AdamW)
    for each in (plain, loop):
        each.optimizer.step()
        each.run(range(2))
        each.optimizer.zero_grad()
        each.optimizer.step()
    assert_same_training(loop, plain)


def relaid(tensor: Tensor) -> Tensor:
    """The same matrix, column by column."""
    return tensor.mT.contiguous().mT


@pytest.mark.parametrize("make", [momentum, AdamW, Adagrad])
@pytest.mark.parametrize("what", ["state", "gradient", "parameter", "all of them"])
def test_layouts_that_differ_are_never_fused_and_those_that_agree_are(make: Any, what: str) -> None:
    """Fused kernels walk by addresses and would update other elements, without an error."""
    plain, loop = plain_and("fused", make)
    for each in (plain, loop):
        each.run(range(2))
        each.gradients(2)
    weight: Any = loop.model[0].weight
    if what in ("parameter", "all of them"):
        weight.data = relaid(weight.data)
    if what in ("gradient", "all of them"):
        weight.grad = relaid(weight.grad)
    if what in ("state", "all of them"):
        state = loop.optimizer.state[weight]
        state.update({name: relaid(value) for name, value in state.items() if value.shape == weight.shape})
    plain.optimizer.step()
    is_fused = any(name.startswith("_fused") for name in operations(loop.optimizer))
    assert is_fused is (what == "all of them")
    assert_same_training(loop, plain)


def test_a_parameter_with_gaps_is_never_fused() -> None:
    held = torch.randn(6, 8)
    parameter, plain = nn.Parameter(held[:, :4]), nn.Parameter(held[:, :4].clone())
    module = nn.Module()
    module.register_parameter("weight", parameter)
    optimizer, theirs = SGD([parameter], lr=0.1, weight_decay=0.1), SGD([plain], lr=0.1, weight_decay=0.1)
    handle = alone("fused", module, optimizer)
    gradient = torch.randn(6, 8)
    parameter.grad, plain.grad = gradient[:, :4], gradient[:, :4].clone()
    assert "_fused_sgd_" not in operations(optimizer)
    theirs.step()
    assert torch.equal(parameter, plain)
    handle.undo()


def test_a_state_of_another_dtype_is_never_fused() -> None:
    loop = Loop(network(torch.float32), AdamW, "fused")
    loop.run(range(1))
    loop.gradients(1)
    for state in loop.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double()
    with pytest.raises(RuntimeError, match="dtype"):  # torch's own, as in a plain run
        loop.optimizer.step()


def test_counts_of_steps_in_float64_are_read_as_such() -> None:
    """Torch makes them so where that is the default, and its fused Adagrad takes them for float32."""
    torch.set_default_dtype(torch.float64)
    try:
        plain, loop = plain_and("off", partial(Adagrad, lr=0.1, lr_decay=0.1))
        for each in (plain, loop):
            each.run(range(3))
        loop.handle = alone("fused", loop.model, loop.optimizer)
        for each in (plain, loop):
            each.run(range(3, 6))
        assert_same_training(loop, plain)
        loop.handle.undo()
        assert next(iter(loop.optimizer.state.values()))["step"].dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_layout_that_comes_and_goes_in_mid_run_is_fused_and_right() -> None:
    """Channels_last is an arm, too: the states follow the weights, and only then are they fused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    twin = copy.deepcopy(model)
    optimizer, theirs = AdamW(model.parameters()), AdamW(twin.parameters())
    settings: dict[str, Any] = {"precision": "32-true", "inplace_activations": False, "trust": "unchecked"}
    handle = accelerate(
        model, Plan().replace(optimizer="fused", memory_format="auto", **settings), optimizers=optimizer
    )
    arms = {arm.name: arm for arm in handle.engine.arms()}
    for index in range(8):
        images = torch.randn(4, 3, 8, 8)
        arms["memory_format"].choose("on" if index // 2 % 2 else "off")
        for net, each in ((model, optimizer), (twin, theirs)):
            each.zero_grad()
            if net is model:
                with handle.step():
                    loss = net(handle.batch(images)).square().mean()
            else:
                loss = net(images).square().mean()
            loss.backward()
        assert "_fused_adamw_" in operations(optimizer)
        theirs.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-4, atol=1e-5)
    handle.undo()


def test_a_gradient_scaler_unscales_before_a_fused_step_and_skips_it_after_an_overflow() -> None:
    plain, loop = plain_and("fused", AdamW, torch.float32)
    scalers = {id(each): torch.amp.GradScaler("cpu", init_scale=2.0**10) for each in (plain, loop)}
    for index in range(4):
        for each in (plain, loop):
            scaler = scalers[id(each)]
            each.optimizer.zero_grad()
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(index))
            inputs = inputs * (float("inf") if index == 2 else 1.0)
            with each.handle.step():
                loss = each.model[0](inputs).square().mean()
            scaler.scale(loss).backward()
            if index % 2:
                scaler.unscale_(each.optimizer)
                nn.utils.clip_grad_norm_(each.model.parameters(), 0.5)
            scaler.step(each.optimizer)
            scaler.update()
    assert scalers[id(loop)].get_scale() == scalers[id(plain)].get_scale() == 2.0**9
    assert_same_training(loop, plain, tolerance=1e-5)


def test_wrappers_are_passed_over_for_what_they_wrap() -> None:
    class Wrapper(Optimizer):
        """As Accelerate's, and those of torch.distributed.optim."""

        def __init__(self, optimizer: Optimizer) -> None:
            self.optim = optimizer
            super().__init__(optimizer.param_groups, {})

        def step(self, closure: Any = None) -> None:
            self.optim.step(closure)

    model = network()
    wrapper = Wrapper(AdamW(model.parameters()))
    handle = alone("fused", model, wrapper)
    with handle.step():
        loss = model(torch.randn(4, 5, dtype=torch.float64)).sum()
    loss.backward()
    assert "_fused_adamw_" in operations(wrapper)
    assert handle.report.refused("optimizer")["optimizer 0"].startswith("Wrapper is none of")
    assert handle.report.applied("optimizer") == ["optimizer 1"]
    handle.undo()
