"""Private names of ``nn.Module`` and of torch's layers: calls, hooks, parts, what initialises them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils.hooks import RemovableHandle


def eager_call(module: nn.Module | type[nn.Module]) -> Callable[..., Any]:
    """A module's call, its hooks included, past whatever was compiled: ``_call_impl``, since torch 1.6.

    Of the class: the function whose frame lies between a caller and a forward pass.
    """
    return module._call_impl


def _attribute_of_hooks(register: Callable[..., RemovableHandle]) -> str:
    """The attribute in which a module keeps the hooks that ``register`` takes: the handle refers to them."""
    module = nn.Module()
    hooks = register(module, lambda *args: None).hooks_dict_ref()
    return next(name for name, value in vars(module).items() if value is hooks)


_HOOKS = (
    _attribute_of_hooks(nn.Module.register_forward_hook),
    _attribute_of_hooks(nn.Module.register_forward_pre_hook),
    _attribute_of_hooks(nn.Module.register_full_backward_hook),
    _attribute_of_hooks(nn.Module.register_full_backward_pre_hook),
)


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """A module's own forward hooks, forward pre-hooks, backward hooks and backward pre-hooks, each by its handle.

    Whoever hooks a module sees its inputs and outputs. Torch can only add hooks, not list them; where it keeps them is
    found by adding one. Where one kind is missing (a module may answer for its own attributes), as if it were empty.
    """
    return tuple(vars(module).get(name) or {} for name in _HOOKS)


def _attribute_of_parts(part: Any) -> str:
    """The attribute in which a module keeps parts of this kind: where one is found that was set."""
    module = nn.Module()
    module.part = part
    return next(name for name, value in vars(module).items() if isinstance(value, dict) and "part" in value)


_PARTS = tuple(map(_attribute_of_parts, (nn.Module(), nn.Parameter(torch.empty(0)), nn.Buffer(torch.empty(0)))))


def parts_of(module: nn.Module) -> list[Any]:
    """A module's own modules, parameters and buffers, empty slots among them, in a microsecond.

    The public ways, which are generators over names without repetition, take ten times as long. Where they are kept is
    found by setting one of each; where one kind is missing, as if there were none.
    """
    return [part for name in _PARTS for part in (vars(module).get(name) or {}).values()]


def hooks_on_all_modules() -> list[Any]:
    """The forward hooks and pre-hooks on every module, which torch can only add, in the dicts that its handles show.

    They are to see each part of an attention called, which no graph calls.
    """
    return [hook for hooks in _HOOKS_ON_ALL for hook in hooks.values()]


@contextmanager
def registrations_unwatched_after() -> Iterator[None]:
    """Leaves the hooks on every registration of a parameter, buffer or module as it finds them.

    An export that fails leaves its own behind, until torch 2.12, and they see all that is registered from then on.
    """
    before = [(hooks, dict(hooks)) for hooks in _HOOKS_ON_REGISTRATIONS]
    try:
        yield
    finally:
        for hooks, had in before:
            hooks.clear()
            hooks.update(had)


def _hooks_kept_by(handle: RemovableHandle) -> dict[int, Any]:
    handle.remove()
    hooks: dict[int, Any] | None = handle.hooks_dict_ref()
    assert hooks is not None  # torch holds it
    return hooks


_HOOKS_ON_ALL = tuple(
    _hooks_kept_by(register(lambda *args: None))
    for register in (all_modules.register_module_forward_hook, all_modules.register_module_forward_pre_hook)
)
_HOOKS_ON_REGISTRATIONS = (
    _hooks_kept_by(all_modules.register_module_buffer_registration_hook(lambda *_: None)),
    _hooks_kept_by(all_modules.register_module_parameter_registration_hook(lambda *_: None)),
    _hooks_kept_by(all_modules.register_module_module_registration_hook(lambda *_: None)),
)


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict behind ``register_buffer``: ``_buffers``, since torch 0.1, empty slots and ties among them.

    The public iterators leave both out. Without it every trial fails, as no module can be put back after it.
    """
    return module._buffers


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """What initialises a module's own parameters; None where it has no such method.

    Torch's layers have ``reset_parameters()``, except nn.MultiheadAttention and nn.Transformer, which underline it.
    Without the name: None, and such a layer on the meta device is refused as one without initial values.
    """
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


def convolution_method() -> str:
    """The method that a convolution's forward calls with its weight: ``_conv_forward``, since torch 1.8.

    Patched, it computes on its weight in another layout, while the parameter keeps the one that DDP's buckets have.
    Without the name an AttributeError takes all edits back, and the step runs as the user wrote it.
    """
    return "_conv_forward"
