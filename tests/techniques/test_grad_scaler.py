"""A gradient scaler for several optimizers, which counts the steps it skips."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.techniques.grad_scaler import CountingGradScaler, check_optimizer


def scaler(**options: Any) -> CountingGradScaler:
    return CountingGradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 1000, **options})


def weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def sgd(*parameters: nn.Parameter, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1.0, **options)


def overflow(p: Tensor) -> Tensor:
    return (p * float("inf")).sum()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_moves_weights_as_without_a_scaler(clips: bool, fused: bool) -> None:
    p, grads = weight(), scaler()
    optimizer = sgd(p, fused=fused)
    grads.scale((0.25 * p).sum()).backward()
    if clips:
        grads.unscale_(optimizer)
        assert p.grad.item() == 0.25
    grads.step(optimizer)
    grads.update()
    assert p.item() == 0.75
    assert grads.skipped_steps == 0


def test_unscaling_again_before_the_step_changes_nothing() -> None:
    p, grads = weight(), scaler()
    optimizer = sgd(p)
    grads.scale((0.25 * p).sum()).backward()
    for _ in range(3):
        grads.unscale_(optimizer)
    assert p.grad.item() == 0.25


def test_an_overflow_is_skipped_counted_and_halves_the_scale() -> None:
    p, grads = weight(), scaler()
    optimizer = sgd(p)
    for loss in (overflow, overflow, torch.sum):
        optimizer.zero_grad()
        grads.scale(loss(p)).backward()
        grads.step(optimizer)
        grads.update()
    assert p.item() == 0.0
    assert grads.skipped_steps == 2
    assert grads.get_scale() == 2.0


def test_growth_is_no_skipped_step() -> None:
    p, grads = weight(), scaler(growth_interval=1)
    grads.scale(p.sum()).backward()
    grads.step(sgd(p))
    grads.update()
    assert (grads.get_scale(), grads.skipped_steps) == (16.0, 0)


def test_a_scale_that_is_set_by_hand_is_no_skipped_step() -> None:
    p, grads = weight(), scaler()
    grads.scale(p.sum()).backward()
    grads.step(sgd(p))
    grads.update(2.0)
    assert (grads.get_scale(), grads.skipped_steps) == (2.0, 0)


def test_an_overflow_of_one_optimizer_skips_that_one_only() -> None:
    good, bad, grads = weight(), weight(), scaler()
    optimizers = [sgd(good), sgd(bad)]
    grads.scale(good.sum()).backward()
    grads.scale(overflow(bad)).backward()
    for optimizer in optimizers:
        grads.step(optimizer)
    grads.update()
    assert (good.item(), bad.item()) == (0.0, 1.0)
    assert (grads.skipped_steps, grads.get_scale()) == (1, 4.0)


@pytest.mark.parametrize("first_overflows", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_interleaved_optimizers_get_right_gradients_though_the_scale_changes_between(
    first_overflows: bool, unscales: bool
) -> None:
    """One backward pass fills the gradients of both; the second adds to what the first left for the other."""
    a, b, grads = weight(), weight(), scaler(growth_interval=1)
    first, second = sgd(a), sgd(b)
    grads.watch([first, second])
    grads.scale((0.5 * a + 0.25 * b).sum()).backward()
    if first_overflows:
        a.grad.fill_(float("inf"))
    if unscales:
        grads.unscale_(first)
    grads.step(first)
    grads.scale((0.25 * b).sum()).backward()
    if unscales:
        grads.unscale_(second)
    grads.step(second)
    grads.update()
    assert (a.item(), b.item()) == (1.0 if first_overflows else 0.5, 0.5)
    assert grads.skipped_steps == first_overflows


def test_one_optimizer_may_step_twice_before_the_update() -> None:
    p, grads = weight(), scaler()
    optimizer = sgd(p)
    for _ in range(2):
        optimizer.zero_grad()
        grads.scale((0.25 * p).sum()).backward()
        grads.unscale_(optimizer)
        grads.step(optimizer)
    grads.update()
    assert p.item() == 0.5


@pytest.mark.parametrize("has_others", [False, True])
def test_an_optimizer_without_gradients_steps_and_does_not_disturb_the_others(has_others: bool) -> None:
    idle, p, grads = weight(), weight(), scaler()
    if has_others:
        grads.scale(p.sum()).backward()
    for optimizer in (sgd(idle), sgd(p)):
        grads.unscale_(optimizer)
        grads.step(optimizer)
    grads.update()
    assert (idle.item(), p.item()) == (1.0, 0.0 if has_others else 1.0)


def test_switched_off_it_passes_everything_through() -> None:
    p, grads = weight(), scaler(enabled=False)
    optimizer = sgd(p)
    loss = p.sum()
    assert grads.scale(loss) is loss
    loss.backward()
    grads.unscale_(optimizer)
    grads.step(optimizer)
    grads.update()
    assert (p.item(), grads.skipped_steps, grads.state_dict()) == (0.0, 0, {})


@pytest.mark.parametrize("make", [scaler, lambda: torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)])
@pytest.mark.parametrize("resume", [scaler, lambda: torch.amp.GradScaler("cpu")])
def test_its_state_goes_to_torchs_scaler_and_back(
    make: Callable[[], torch.amp.GradScaler], resume: Callable[[], torch.amp.GradScaler]
) -> None:
    p = weight()
    optimizer, saved = sgd(p), make()
    saved.scale(overflow(p)).backward()
    saved.step(optimizer)
    saved.update()
    resumed = resume()
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert resumed.state_dict() == saved.state_dict()
    assert resumed.get_scale() == 4.0


def test_a_run_equals_torchs_own_scaler_step_by_step() -> None:
    def run(grads: torch.amp.GradScaler) -> list[tuple[float, float]]:
        p = weight(2.0)
        optimizer = torch.optim.Adam([p], lr=0.1)
        trace = []
        for step in range(12):
            optimizer.zero_grad()
            grads.scale(overflow(p) if step % 5 == 3 else (p**2).sum()).backward()
            if step % 2:
                grads.unscale_(optimizer)
                nn.utils.clip_grad_norm_([p], 1.0)
            grads.step(optimizer)
            grads.update()
            trace.append((p.item(), grads.get_scale()))
        return trace

    assert run(scaler(growth_interval=3)) == run(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))


def test_lbfgs_with_a_scaler_is_a_clear_error() -> None:
    optimizer = torch.optim.LBFGS([weight()])
    with pytest.raises(ValueError, match=r"LBFGS with precision='16-mixed'.*Use precision='bf16-mixed' or '32-true'"):
        check_optimizer(optimizer, "16-mixed")
    check_optimizer(optimizer, "bf16-mixed")
    check_optimizer(sgd(weight()), "16-mixed")
