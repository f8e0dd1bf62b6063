"""Moments in 8 bits, under hooks, schedulers, scalers and optimizers of all kinds, and without torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR

from lightning_accel import Plan, accelerate
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelWarning
from lightning_accel.techniques.optimizer_8bit import state_bytes
from support.techniques.eight_bit_cases import NEAR, OTHERS_OFF, network, packed, started, train

pytest.importorskip("torchao", reason="optimizer states in 8 bits are torchao's")
pytestmark = pytest.mark.numbers


def test_hooks_and_closures_are_called_once_a_step_and_gradients_are_there_again() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    calls: list[str] = []

    def before(_: Optimizer, args: Any, kwargs: Any) -> None:
        calls.append("before" if all(p.grad is not None for p in model.parameters()) else "before, gradients gone")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append("closure")
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        return loss

    model(torch.ones(2, 64)).square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    returned = optimizer.step(closure)
    assert isinstance(returned, Tensor)
    assert calls == ["before", "closure", "after"]
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert optimizer.step() is None
    handle.undo()


def test_a_closure_that_raises_leaves_the_gradients() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    model(torch.ones(2, 64)).square().mean().backward()

    def closure() -> float:
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert all(p.grad is not None for p in model.parameters())
    train(model, optimizer, 2)
    handle.undo()


def test_a_scheduler_of_rates_and_betas_made_afterwards_goes_on() -> None:
    """It rebinds ``step`` on the optimizer, and changes the options of its groups at every step."""
    results = []
    for mode in ("on", "off"):
        model = network()
        optimizer = AdamW(model.parameters())
        handle = started(optimizer, model, optimizer_8bit=mode)
        scheduler = OneCycleLR(optimizer, max_lr=0.01, total_steps=20)
        losses = []
        for _ in range(20):
            losses += train(model, optimizer, 1)
            scheduler.step()
        handle.undo()
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=NEAR)


def test_parameters_added_in_mid_run_and_options_of_each_group_are_honoured() -> None:
    model = network()
    optimizer = AdamW([{"params": model[0].parameters(), "lr": 0.0}], lr=0.01)
    handle = started(optimizer, model)
    frozen = model[0].weight.clone()
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    moving = model[2].weight.clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[2].weight, moving)
    assert len(packed(optimizer)) == 4
    handle.undo()


def test_a_group_made_differentiable_in_mid_run_gets_its_floats_back() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["differentiable"] = True
    train(model, optimizer, 1)
    assert packed(optimizer) == []
    handle.undo()


def test_floats_that_somebody_puts_into_a_state_are_taken_up() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 2)
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros_like(model[0].weight)
    train(model, optimizer, 1)
    assert len(packed(optimizer)) == 4
    handle.undo()


def test_a_state_that_the_user_clears_after_a_measured_step_begins_anew() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 10)
    optimizer.state.clear()
    train(model, optimizer, 1)
    assert len(packed(optimizer)) == 4
    handle.undo()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_a_group_has_twice_is_stepped_twice() -> None:
    results = []
    for mode in ("on", "off"):
        model = network()
        optimizer = AdamW([model[0].weight, *model.parameters()], lr=0.01)
        handle = started(optimizer, model, optimizer_8bit=mode)
        results.append(train(model, optimizer))
        assert len(packed(optimizer)) == (4 if mode == "on" else 0)
        handle.undo()
    assert results[0] == pytest.approx(results[1], rel=NEAR)


def test_accumulated_gradients_and_clipping_are_the_users() -> None:
    results = []
    for mode in ("on", "off"):
        model = network()
        optimizer = AdamW(model.parameters(), lr=0.01)
        handle = started(optimizer, model, optimizer_8bit=mode)
        for index in range(8):
            (model(torch.ones(2, 64)).square().mean() / 2).backward()
            if index % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        handle.undo()
        results.append(model(torch.ones(2, 64)))
    torch.testing.assert_close(*results, rtol=0.05, atol=0.01)


def test_a_gradient_scaler_skips_its_steps() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), fused=True)
    handle = started(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 64)).mean()).backward()
    before = [p.clone() for p in model.parameters()]
    model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0
    handle.undo()


class Lion(Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad.sign())


class LoggingAdamW(AdamW):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class NamedAdamW(AdamW):
    """A subclass without."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (SGD, "SGD does not step as torch's Adam"),
        (RMSprop, "RMSprop does not step as torch's Adam"),
        (Lion, "Lion does not step as torch's Adam"),
        (LoggingAdamW, "LoggingAdamW does not step as torch's Adam"),
        (lambda params: AdamW(params, capturable=True), "capturable=True"),
        (lambda params: AdamW([p for p in params if p.dim() == 1]), "no parameter of 4,096 elements"),
    ],
    ids=["SGD", "RMSprop", "user's", "subclass with a step", "capturable", "small"],
)
def test_other_optimizers_are_left_alone_with_the_reason(make: Callable[[Any], Optimizer], reason: str) -> None:
    model = network()
    optimizer = make(model.parameters())
    handle = started(optimizer, model)
    with handle.step():
        model(torch.ones(2, 64)).sum().backward()
    with pytest.warns(AccelWarning, match="found no site"):
        handle.step()  # the second, by which the loop has made its optimizer
    assert reason in handle.report.to_text()
    handle.undo()


def test_a_subclass_that_steps_as_adamw_does_is_taken() -> None:
    model = network()
    optimizer = NamedAdamW(model.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 1)
    assert len(packed(optimizer)) == 4
    handle.undo()


def test_two_optimizers_of_one_model_are_both_taken() -> None:
    model = network()
    optimizers = [AdamW(model[0].parameters()), Adam(model[2].parameters())]
    plan = Plan().replace(**OTHERS_OFF, optimizer_8bit="on", trust="checked")
    handle = accelerate(model, plan, optimizers=optimizers, host=Host(kind="cpu", device_name="a CPU"))
    model(torch.ones(2, 64)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [len(packed(optimizer)) for optimizer in optimizers] == [2, 2]
    handle.undo()


@pytest.fixture
def no_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_accel.core import torchao

    monkeypatch.setattr(torchao.importlib.util, "find_spec", lambda name: None)


def test_without_torchao_the_mend_is_said(no_torchao: None) -> None:
    model = network()
    with pytest.warns(AccelWarning, match=r"pip install 'lightning-accel\[torchao\]'"):
        handle = started(AdamW(model.parameters()), model)
    handle.undo()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_card_states_take_a_quarter_and_training_goes_on(fused: bool) -> None:
    results = []
    for mode in ("on", "off"):
        model = network().cuda()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
        plan = Plan().replace(**OTHERS_OFF, optimizer_8bit=mode, trust="checked")
        handle = accelerate(model, plan, optimizers=optimizer)
        losses = []
        generator = torch.Generator("cuda").manual_seed(0)
        for _ in range(10):
            inputs = torch.randn(32, 64, device="cuda", generator=generator)
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if mode == "on":
            packed_bytes, floats_bytes = state_bytes(optimizer)
            assert packed_bytes < 0.4 * floats_bytes  # the tables of 1 KiB count in so small a model
        handle.undo()
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=NEAR)
