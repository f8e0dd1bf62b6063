"""What breaks when a torch drops one of the private names of modules, in plain words: a test a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_accel.core.torch_private.modules import (
    buffer_slots,
    convolution_method,
    eager_call,
    hooks_of,
    hooks_on_all_modules,
    reset_method,
)


def test_the_eager_call_runs_the_module_with_its_hooks_and_not_what_was_compiled() -> None:
    """Else activations are never done in place, unread attention weights are computed, and compiled blocks recurse."""
    module, seen = nn.Linear(2, 2), []
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    module.compile(backend="eager")

    assert eager_call(module)(torch.ones(2)) is seen[0]
    assert eager_call(nn.Module).__code__ is eager_call(module).__func__.__code__


@pytest.mark.parametrize(
    ("at", "register"),
    [
        (0, nn.Module.register_forward_hook),
        (1, nn.Module.register_forward_pre_hook),
        (2, nn.Module.register_full_backward_hook),
        (3, nn.Module.register_full_backward_pre_hook),
    ],
)
def test_the_hooks_of_a_module_are_found(at: int, register: Any) -> None:
    """Else a module that somebody watches is changed like any other."""
    module = nn.Linear(2, 2)
    assert not any(hooks_of(module))

    def hook(*args: Any) -> None: ...

    register(module, hook)

    assert [list(hooks.values()) for hooks in hooks_of(module)] == [[hook] if kind == at else [] for kind in range(4)]


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_on_all_modules_are_found(register: Any) -> None:
    """Else whoever watches all modules sees the parts of a captured attention no more."""

    def hook(*args: Any) -> None: ...

    handle = register(hook)
    assert hooks_on_all_modules() == [hook]
    handle.remove()
    assert not hooks_on_all_modules()


def test_a_module_shows_its_buffers_and_a_change_there_is_a_change_of_the_module() -> None:
    """Else a buffer that a forward pass assigned anew could not be put back after a trial."""
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(2))
    module.register_buffer("absent", None)
    assert buffer_slots(module) == {"mean": module.mean, "absent": None}
    buffer_slots(module)["mean"] = torch.ones(2)
    assert module.mean.tolist() == [1.0, 1.0]


def test_reset_parameters_has_an_underline_in_attention() -> None:
    """Without it ``accel_fsdp`` refuses models with nn.MultiheadAttention that were made on the meta device."""
    assert reset_method(nn.Linear(2, 2)) is not None
    assert reset_method(nn.MultiheadAttention(4, 2)) is not None
    assert reset_method(nn.ReLU()) is None


@pytest.mark.parametrize(("convolution", "num_dims"), [(nn.Conv2d(1, 1, 1), 4), (nn.Conv3d(1, 1, 1), 5)])
def test_a_convolution_computes_with_the_weight_that_one_method_is_given(convolution: nn.Module, num_dims: int) -> None:
    """Else a layout could not be given up in mid-run where DistributedDataParallel is at work."""
    name = convolution_method()
    original = getattr(convolution, name)
    setattr(convolution, name, lambda x, weight, bias: original(x, torch.zeros_like(weight), None))
    assert not convolution(torch.ones([1] * num_dims)).any()
