"""Finds the module in which the numbers of a form begin to differ, by trying modules one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from lightning_accel.core.blocks import called_children
from lightning_accel.core.clocks import Deadline
from lightning_accel.core.tree import map_tensors
from lightning_accel.deploy.inputs import Arguments

IsOff = Callable[[str, list[Arguments]], bool]
"""Returns whether the named submodule alone is wrong on these calls. An exception counts as no."""

SECONDS = 60.0
"""The time limit of the search, which then returns what is known."""


def first_off(model: nn.Module, calls: list[Arguments], is_off: IsOff) -> str:
    """Returns the innermost module that is wrong alone, on its inputs within the model; empty if none is."""
    name, deadline = "", Deadline(SECONDS)
    while found := next(_children_off(model, name, calls, is_off, deadline), None):
        name, calls = found
    return f"{name!r}, {type(model.get_submodule(name)).__name__}" if name else ""


def _children_off(
    model: nn.Module, parent: str, calls: list[Arguments], is_off: IsOff, deadline: Deadline
) -> Iterator[tuple[str, list[Arguments]]]:
    """Yields a module's children that are wrong, with their calls, in the order of first calls."""
    module, seen = model.get_submodule(parent), dict[str, list[Arguments]]()

    def note(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        seen.setdefault(name, []).append(map_tensors(lambda t: t.detach().clone(), (args, kwargs)))

    with ExitStack() as hooks:
        for name, child in called_children(module, f"{parent}.".lstrip(".")):
            hooks.enter_context(child.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        for args, kwargs in calls:
            module(*args, **kwargs)
    for name, inner in seen.items():
        if deadline.is_over():
            return
        try:
            found = is_off(name, inner)
        except Exception:  # its inputs or outputs do not suit the form
            continue
        if found:
            yield name, inner
