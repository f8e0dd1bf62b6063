"""Intercepts the first call of a module, for techniques that run a trial on the user's own first input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_accel.core.patch import MethodPatch


def at_first_call(
    site: str, module: nn.Module, meet: Callable[[Any, Any], None], *, when: Callable[[], bool] = lambda: True
) -> MethodPatch:
    """Returns an edit that intercepts one call of this module, not of its copies, and then undoes itself.

    Args:
        site: The module's name in the model.
        module: The module.
        meet: Called with the arguments after the edit is undone. The module then runs as ``meet`` leaves it.
        when: Called before each interception. Returns whether to intercept this call.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not module or not patch.is_applied or not when():
                return original(self, *args, **kwargs)
            patch.undo()
            meet(args, kwargs)
            return self.forward(*args, **kwargs)

        return forward

    patch = MethodPatch(site, "trial", module, "forward", wrap)
    return patch
