"""Optimizer steps that must be the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from lightning_accel import Plan, accelerate
from support.optimizer_loops import Loop, alone, assert_same_training, network, operations, plain_and

pytestmark = pytest.mark.numbers

momentum = partial(SGD, lr=0.1, momentum=0.9)


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


def transposed_gradient(loop: Loop) -> None:
    weight = next(loop.model.parameters())
    assert weight.grad is not None
    weight.grad = weight.grad.t().contiguous().t()


def transposed_state(loop: Loop) -> None:
    state = loop.optimizer.state[next(loop.model.parameters())]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


@pytest.mark.parametrize("change", [transposed_gradient, transposed_state])
def test_a_layout_that_changes_after_many_equal_steps_is_seen(change: Callable[[Loop], None]) -> None:
    plain, loop = plain_and("fused", AdamW)
    for each in (plain, loop):
        each.run(range(4))
        each.gradients(4)
        change(each)
        each.optimizer.step()
    assert_same_training(loop, plain)
    assert "do not lie alike in memory" in told(loop)


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
