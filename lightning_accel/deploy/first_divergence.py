"""Where the numbers of a form begin to differ: in which module, found by writing modules one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_accel.core.clocks import Deadline
from lightning_accel.core.tree import map_tensors
from lightning_accel.deploy.inputs import Arguments

IsOff = Callable[[nn.Module, list[Arguments]], bool]
SECONDS = 60.0
"""After so many, what is known by then is told."""


def first_off(model: nn.Module, calls: list[Arguments], is_off: IsOff) -> str:
    """The innermost module that is off by itself, on the inputs it has within the model; empty: none is."""
    name, module, deadline = "", model, Deadline(SECONDS)
    while found := next(_children_off(module, calls, is_off, deadline), None):
        child, calls = found
        name, module = f"{name}.{child}".lstrip("."), module.get_submodule(child)
    return f"{name!r}, {type(module).__name__}" if name else ""


def _children_off(
    module: nn.Module, calls: list[Arguments], is_off: IsOff, deadline: Deadline
) -> Iterator[tuple[str, list[Arguments]]]:
    seen: dict[str, list[Arguments]] = {}
    with _watched(module, seen):
        for args, kwargs in calls:
            module(*args, **kwargs)
    for name, inner in seen.items():
        if deadline.is_over():
            return
        if is_off(module.get_submodule(name), inner):
            yield name, inner


@contextmanager
def _watched(module: nn.Module, seen: dict[str, list[Arguments]]) -> Iterator[None]:
    """Notes what each submodule is called with, in the order of first calls; of lists, what is in them."""

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            copies: Arguments = map_tensors(lambda t: t.detach().clone(), (args, kwargs))
            seen.setdefault(name, []).append(copies)

        return hook

    handles = [one.register_forward_pre_hook(note(name), with_kwargs=True) for name, one in _called(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _called(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
