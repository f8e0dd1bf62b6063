"""Weights, gradients and optimizer states change their layout together, and go back together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_accel.core.layout import (
    OptimizerLayouts,
    WeightLayout,
    in_format,
    is_channels_last,
    restore_layouts,
    with_strides,
)

pytestmark = pytest.mark.numbers

CHANNELS_LAST = torch.channels_last


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 4, 3, padding=1)


def laid(module: nn.Module) -> WeightLayout:
    patch = WeightLayout("conv", module, 4)
    patch.apply()
    patch.lay()
    return patch


def test_strides_are_given_without_changing_values() -> None:
    x = torch.randn(2, 3, 4, 5)
    moved = with_strides(x, (60, 1, 15, 3))
    assert is_channels_last(moved)
    assert torch.equal(moved, x)
    assert with_strides(moved, moved.stride()) is moved


def test_a_weight_changes_its_layout_and_nothing_else() -> None:
    module = conv()
    weight, values = module.weight, module.weight.detach().clone()
    patch = laid(module)
    assert is_channels_last(module.weight)
    assert module.weight is weight
    assert torch.equal(weight, values)
    patch.undo()
    assert weight.stride() == values.stride()
    assert torch.equal(weight, values)


def test_a_gradient_follows_its_weight_both_ways() -> None:
    module = conv()
    module(torch.randn(1, 3, 4, 4)).sum().backward()
    patch = laid(module)
    assert is_channels_last(module.weight.grad)
    patch.undo()
    assert module.weight.grad.is_contiguous()


@pytest.mark.parametrize("in_reverse", [True, False])
def test_a_weight_tied_between_convolutions_returns_to_its_first_layout(in_reverse: bool) -> None:
    first, second = conv(), conv()
    second.weight = first.weight
    patches = [laid(first), laid(second)]
    assert [list(patch.strides.values()) for patch in patches] == [[(27, 9, 3, 1)], []]
    for patch in reversed(patches) if in_reverse else patches:
        patch.undo()
    assert first.weight.is_contiguous()


def test_weights_changed_under_inference_mode_can_still_be_trained() -> None:
    module = conv()
    with torch.inference_mode():
        laid(module).undo()
        laid(module)
    module(torch.randn(1, 3, 4, 4)).sum().backward()
    assert is_channels_last(module.weight.grad)


# -- optimizers ----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam fused amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


def train(module: nn.Conv2d, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.gelu(module(x)).square().mean().backward()
        optimizer.step()


@contextmanager
def matched(module: nn.Module, *optimizers: Optimizer) -> Iterator[OptimizerLayouts]:
    layouts = OptimizerLayouts(module.parameters())
    for optimizer in optimizers:
        layouts.watch(optimizer)
    try:
        yield layouts
    finally:
        layouts.close()


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_run_that_changes_layouts_in_the_middle_equals_the_plain_one(make_optimizer: Callable[..., Any]) -> None:
    """Fused AdamW updates the wrong elements, silently, where the strides of state and weight differ."""
    plain = conv()
    module = copy.deepcopy(plain)
    train(plain, make_optimizer(plain.parameters()), range(6))

    optimizer = make_optimizer(module.parameters())
    with matched(module, optimizer) as layouts:
        train(module, optimizer, range(2))
        patch = laid(module)
        layouts.match()
        train(module, optimizer, range(2, 4))
        patch.undo()
        layouts.match()
        train(module, optimizer, range(4, 6))
    torch.testing.assert_close(module.weight, plain.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("steps_before_loading", [0, 1])
def test_a_contiguous_runs_optimizer_state_serves_a_channels_last_run(
    make_optimizer: Callable[..., Any], steps_before_loading: int
) -> None:
    plain = conv()
    first = make_optimizer(plain.parameters())
    train(plain, first, range(3))
    weights, state = copy.deepcopy(plain.state_dict()), copy.deepcopy(first.state_dict())
    train(plain, first, range(3, 6))

    module = conv()
    second = make_optimizer(module.parameters())
    with matched(module, second) as layouts:
        laid(module)
        layouts.match()
        train(module, second, range(10, 10 + steps_before_loading))
        module.load_state_dict(weights)
        second.load_state_dict(state)
        train(module, second, range(3, 6))
    torch.testing.assert_close(module.weight, plain.weight, rtol=1e-5, atol=1e-6)


def test_a_state_made_before_the_layouts_changed_is_matched_when_its_optimizer_is_first_seen() -> None:
    module = conv()
    optimizer = OPTIMIZERS["adamw fused"](module.parameters())
    train(module, optimizer, range(1))
    laid(module)
    with matched(module, optimizer):
        train(module, optimizer, range(1, 2))
        assert is_channels_last(optimizer.state[module.weight]["exp_avg"])
        assert optimizer.state[module.weight]["step"].shape == ()


def test_optimizers_of_other_parameters_are_not_touched() -> None:
    module, other = conv(), conv()
    optimizer = OPTIMIZERS["adamw"](other.parameters())
    state_strides = (1, 4, 12, 36)
    train(other, optimizer, range(1))
    optimizer.state[other.weight]["exp_avg"] = with_strides(optimizer.state[other.weight]["exp_avg"], state_strides)
    with matched(module, optimizer):
        train(other, optimizer, range(1))
    assert optimizer.state[other.weight]["exp_avg"].stride() == state_strides


def test_it_says_which_optimizers_are_new_and_hold_some_of_the_parameters() -> None:
    module, other = conv(), conv()
    first, second, stranger = (OPTIMIZERS["adamw"](net.parameters()) for net in (module, module, other))
    with matched(module) as layouts:
        new = [layouts.watch(optimizer) for optimizer in (first, second, stranger, first)]
    assert new == [True, True, False, False]


def test_closed_it_leaves_no_hook_behind() -> None:
    module = conv()
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    with matched(module, optimizer):
        train(module, optimizer, range(1))
    assert not optimizer._optimizer_load_state_dict_post_hooks


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_checkpoint_gets_the_plain_layouts_and_what_is_in_use_keeps_its_own(keep_vars: bool) -> None:
    module = conv()
    patch = laid(module)
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    train(module, optimizer, range(2))
    weights = module.state_dict(keep_vars=keep_vars)
    checkpoint = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}
    restore_layouts(checkpoint, module, [optimizer], patch.strides)
    assert checkpoint["state_dict"]["weight"].is_contiguous()
    assert checkpoint["optimizer_states"][0]["state"][0]["exp_avg"].is_contiguous()
    assert torch.equal(checkpoint["state_dict"]["weight"], module.weight)
    assert is_channels_last(module.weight)
    assert is_channels_last(optimizer.state[module.weight]["exp_avg"])


@pytest.mark.parametrize("export", [Tensor.numpy, Tensor.flatten])
def test_what_a_hook_saves_in_place_of_a_weight_is_left_alone(export: Callable[[Tensor], Any]) -> None:
    module = conv()
    module.register_state_dict_post_hook(lambda _, state, *__: state.update(weight=export(state["weight"])))
    patch = laid(module)
    saved = module.state_dict()
    exported = saved["weight"]
    restore_layouts({"state_dict": saved}, module, [], patch.strides)
    assert saved["weight"] is exported


def test_a_checkpoint_without_some_of_its_parts_is_no_error() -> None:
    module = conv()
    patch = laid(module)
    optimizer = OPTIMIZERS["adamw"](module.parameters())  # never stepped: no state
    for checkpoint in ({"state_dict": {}}, {"state_dict": {}, "optimizer_states": [optimizer.state_dict()]}):
        restore_layouts(checkpoint, module, [optimizer], patch.strides)
    patch.undo()


@pytest.mark.parametrize("shape", [(8, 1, 3, 3), (8, 4, 1, 1), (4, 1, 6, 6)])
def test_one_channel_or_one_pixel_gets_the_strides_that_operators_recognise(shape: tuple[int, ...]) -> None:
    """`.contiguous()` leaves these as they are, and every activation after such a weight would be contiguous."""
    tensor = torch.randn(shape)
    converted = in_format(tensor, CHANNELS_LAST)
    assert converted.stride() == torch.empty(shape, memory_format=torch.channels_last).stride()
    assert torch.equal(converted, tensor)
    assert converted.data_ptr() == tensor.data_ptr()
