"""Meets the first call of a module, for techniques that try something on the user's own first input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_accel.core.patch import MethodPatch


def at_first_call(
    site: str, module: nn.Module, meet: Callable[[Any, Any], None], *, when: Callable[[], bool] = lambda: True
) -> MethodPatch:
    """An edit that lasts for one call of this very module, not of a copy: it is undone, met, and then runs as ever.

    Args:
        site: The module's name in the model.
        module: The module.
        meet: Called with the arguments; the module is by then as it was, and runs as ``meet`` leaves it.
        when: Says at a call whether it is one to be met.
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
