"""What ``torch.func`` and hooks on saved tensors must know of each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def standing_aside_for_functorch() -> Iterator[None]:
    """Inside, ``torch.func.grad`` and its kin work though there are hooks, if these have ``stands_aside`` on them.

    They refuse to run where saved tensors are caught, and switch the catching off within. Hooks of ours, on top, are
    taken off for that long: what such a transform saves for itself stays where it is.
    """
    graph: Any = torch.autograd.graph
    refusing = graph.disable_saved_tensors_hooks
    if hasattr(refusing, "stands_aside"):
        yield
        return

    @contextmanager
    def disable_saved_tensors_hooks(message: str) -> Iterator[None]:
        autograd: Any = torch._C._autograd
        aside = []
        while (top := autograd._top_saved_tensors_default_hooks(True)) and hasattr(top[0], "stands_aside"):
            autograd._pop_saved_tensors_default_hooks()
            aside.append(top)
        try:
            with refusing(message):
                yield
        finally:
            for hooks in reversed(aside):
                autograd._push_saved_tensors_default_hooks(*hooks)

    disable_saved_tensors_hooks.stands_aside = True  # type: ignore[attr-defined]
    graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = refusing
