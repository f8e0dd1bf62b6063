"""What breaks when a torch drops one of the private names that the library uses, in plain words: a test a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.core import torch_private

# -- calls of modules ----------------------------------------------------------------------------------------------


def test_the_eager_call_runs_the_module_with_its_hooks_and_not_what_was_compiled() -> None:
    """Else activations are never done in place, unread attention weights are computed, and compiled blocks recurse."""
    module, seen = nn.Linear(2, 2), []
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    module.compile(backend="eager")

    assert torch_private.eager_call(module)(torch.ones(2)) is seen[0]
    assert torch_private.eager_call(nn.Module).__code__ is torch_private.eager_call(module).__func__.__code__


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
    assert not any(torch_private.hooks_of(module))

    def hook(*args: Any) -> None: ...

    register(module, hook)

    assert [list(hooks.values()) for hooks in torch_private.hooks_of(module)] == [
        [hook] if kind == at else [] for kind in range(4)
    ]


# -- who holds a tensor, who sees operations -----------------------------------------------------------------------


def test_a_hook_on_a_gradient_is_found() -> None:
    """Else an activation overwrites an input whose gradient somebody looks at."""
    tensor = torch.ones(2, requires_grad=True) * 2
    assert not torch_private.has_gradient_hooks(tensor)

    tensor.register_hook(lambda gradient: gradient)

    assert torch_private.has_gradient_hooks(tensor)


def test_handles_on_a_tensor_are_counted() -> None:
    """Else in-place activations say that references could not be counted, and do nothing."""
    tensor = torch.ones(2, requires_grad=True) * 2
    before = torch_private.handles_on_tensor(tensor)
    saved = tensor * tensor

    assert torch_private.handles_on_tensor(tensor) > before
    assert saved.requires_grad


def test_handles_on_memory_are_counted() -> None:
    """As for the tensor."""
    tensor = torch.ones(2)
    before = torch_private.handles_on_storage(tensor.untyped_storage())
    view = tensor[:1]

    assert torch_private.handles_on_storage(tensor.untyped_storage()) == before + 1
    assert view.shape == (1,)


def test_the_modules_of_a_module_are_found_by_name() -> None:
    """Else a LeakyReLU is not done in place, since nothing shows what reads its result."""
    model = nn.Sequential(nn.ReLU())
    model.extra = model[0]

    assert torch_private.module_slots(model) == {"0": model[0], "extra": model[0]}


class _SeesOperations(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_SeesOperations, _SeesFunctions])
def test_modes_are_noticed(mode: Any) -> None:
    """Else a FLOP counter meets inputs that were overwritten, and a captured graph that it cannot see into."""
    assert not torch_private.has_modes()
    with mode():
        assert torch_private.has_modes()


def test_transforms_and_forward_mode_are_noticed() -> None:
    """Else a model under vmap or grad is changed in the middle of the transform."""
    seen = []
    torch.func.grad(lambda x: seen.append(torch_private.is_transformed()) or x)(torch.tensor(1.0))
    with forward_ad.dual_level():
        seen.append(torch_private.is_transformed())

    assert seen == [True, True]
    assert not torch_private.is_transformed()


def test_saved_tensor_hooks_are_noticed() -> None:
    """Else what checkpointing recomputes, or offloading has moved, was overwritten in the meantime."""
    assert not torch_private.saved_tensors_are_packed()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert torch_private.saved_tensors_are_packed()
