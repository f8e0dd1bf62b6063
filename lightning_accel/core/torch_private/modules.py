"""Private names of ``nn.Module`` and torch's layers: calls, hooks, parts, initialisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils.hooks import RemovableHandle


def eager_call(module: nn.Module | type[nn.Module]) -> Callable[..., Any]:
    """Returns a module's call with its hooks, but without compiled code: ``_call_impl``, since torch 1.6.

    For a class: the function whose frame lies between a caller and a forward pass.
    """
    return module._call_impl


def _attribute_filled_by(add: Callable[..., object], **added: Any) -> str:
    """Returns the attribute in which a module keeps what ``add`` adds to it, found by adding one."""
    module = nn.Module()
    add(module, **added)
    return next(name for name, value in vars(module).items() if isinstance(value, dict) and value)


_HOOKS = tuple(
    _attribute_filled_by(register, hook=lambda *args: None)
    for register in (
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
    )
)


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Returns a module's own forward hooks, forward pre-hooks, backward hooks and backward pre-hooks, by handle.

    Hooks on a module see its inputs and outputs. Torch can add hooks but not list them, so the attributes were found by
    adding one hook. A missing kind counts as empty (a module may define its own attribute access).
    """
    own = vars(module)
    return tuple([own.get(name) or {} for name in _HOOKS])  # a list is faster, and attention asks at every call


_PARTS = tuple(
    _attribute_filled_by(nn.Module.__setattr__, name="part", value=part)
    for part in (nn.Module(), nn.Parameter(torch.empty(0)), nn.Buffer(torch.empty(0)))
)


def parts_of(module: nn.Module) -> list[Any]:
    """Returns a module's own modules, parameters and buffers, including empty slots, in one microsecond.

    The public iterators remove duplicates and take ten times as long. The attributes were found by setting one part of
    each kind. A missing kind counts as empty.
    """
    return [part for name in _PARTS for part in (vars(module).get(name) or {}).values()]


def hooks_on_all_modules() -> list[Any]:
    """Returns the global forward hooks and pre-hooks, from the dicts in torch's handles: torch can only add such hooks.

    They must see each part of an attention being called, which a captured graph does not call.
    """
    return [hook for hooks in _HOOKS_ON_ALL for hook in hooks.values()]


@contextmanager
def registrations_unwatched_after() -> Iterator[None]:
    """Restores the global hooks on registrations of parameters, buffers and modules.

    Before torch 2.12, an export that fails leaves its hooks there, and they see every later registration.
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
    assert hooks is not None  # torch keeps the dict alive
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
    """Returns the dict behind ``register_buffer``, with empty slots and ties: ``_buffers``, since torch 0.1.

    The public iterators omit both. Without the name every trial fails, since no module can be restored after it.
    """
    return module._buffers


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """Returns the method that initialises a module's own parameters; None if it has none.

    Torch's layers have ``reset_parameters()``, except nn.MultiheadAttention and nn.Transformer, where it begins with an
    underscore. Without the name: None, and such a layer on the meta device is refused because it has no initial values.
    """
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return method if callable(method) else None


def convolution_method() -> str:
    """Returns the method to which a convolution's forward passes its weight: ``_conv_forward``, since torch 1.8.

    A patch of it computes with another layout, while the parameter keeps the layout of DDP's buckets. Without the name
    an AttributeError undoes all edits, and the step runs as the user wrote it.
    """
    return "_conv_forward"
