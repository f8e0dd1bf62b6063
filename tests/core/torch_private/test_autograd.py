"""What breaks when a torch drops one of the private names of autograd, in plain words: a test a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_accel.core.torch_private.autograd import (
    call_after_backward,
    has_gradient_hooks,
    has_saved_result,
    is_in_backward,
    is_transformed,
    saved_tensors_hooks,
    sequence_number,
)


@pytest.mark.parametrize(
    "register",
    [
        pytest.param(lambda p: p.register_hook(lambda gradient: gradient), id="_backward_hooks"),
        pytest.param(lambda p: p.register_post_accumulate_grad_hook(lambda p: None), id="_post_accumulate_grad_hooks"),
    ],
)
def test_hooks_on_gradients_are_seen(register: Callable[[nn.Parameter], Any]) -> None:
    """Without these two names ``accel_fsdp`` drops a user's hook on a parameter's gradient, and says nothing."""
    parameter = nn.Parameter(torch.ones(2))
    assert not has_gradient_hooks(parameter)
    handle = register(parameter)
    assert has_gradient_hooks(parameter)
    handle.remove()
    assert not has_gradient_hooks(parameter)


def test_hooks_on_saved_tensors_can_be_seen() -> None:
    """Else torch.func would refuse to run wherever activations are offloaded or packed."""

    def same(tensor: Tensor) -> Tensor:
        return tensor

    assert saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert saved_tensors_hooks() == (same, same)


def test_a_result_that_is_about_to_be_saved_is_not_saved_yet() -> None:
    """Else what a ReLU saves could not be kept as one bit an element, half of what sparse activations save."""
    found = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(has_saved_result(tensor.grad_fn))
        return tensor.detach()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = x.relu()
        z = y.square()
    assert found == [False, True]  # by the ReLU itself, and by the square after it
    z.sum().backward()
    assert has_saved_result(y.grad_fn)  # freed: nothing can be said


def test_of_a_node_that_says_nothing_no_result_is_about_to_be_saved() -> None:
    assert has_saved_result(object())


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    """Else the nodes of one block could not be told from those before, and no memory budget could be planned."""
    first = torch.ones(2, requires_grad=True).exp()
    second = first.sin()
    assert sequence_number(first.grad_fn) < sequence_number(second.grad_fn)


def test_a_backward_pass_can_be_told_from_a_forward_pass() -> None:
    """Else calls that a recomputation makes would be counted as calls of the step."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(is_in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not is_in_backward()


def test_execution_engine_calls_back_after_the_last_gradient() -> None:
    """Without it ``accel_ddp`` averages the first step's gradients after code of the user's has changed them."""
    leaf = torch.ones(2, requires_grad=True)
    seen: list[Tensor | None] = []
    loss = (2 * leaf).sum()
    loss.register_hook(lambda _: call_after_backward(lambda: seen.append(leaf.grad)))
    loss.backward()
    assert seen == [leaf.grad]
    assert leaf.grad is not None


def test_transforms_and_forward_mode_are_noticed() -> None:
    """Else a model under vmap or grad is changed in the middle of the transform."""
    seen = []
    torch.func.grad(lambda x: seen.append(is_transformed()) or x)(torch.tensor(1.0))
    with forward_ad.dual_level():
        seen.append(is_transformed())

    assert seen == [True, True]
    assert not is_transformed()
