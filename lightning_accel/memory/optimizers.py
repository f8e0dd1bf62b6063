"""Which optimizers train a model, and whether one has stepped: seen where they step, whoever made them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerWatch:
    """Remembers the optimizers that step a model's parameters, until :meth:`stop`.

    Attributes:
        seen: Those that have stepped so far.
        has_stepped: Whether one has since this was last set to False.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[Optimizer] = []
        self.has_stepped = False
        self._model = model
        self._hook = register_optimizer_step_post_hook(_seen_by(weakref.ref(self)))

    def see(self, optimizer: Optimizer) -> None:
        """Tells that ``optimizer`` made a step."""
        own = {id(parameter) for parameter in self._model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self.has_stepped = True
            if not any(known is optimizer for known in self.seen):
                self.seen.append(optimizer)

    def stop(self) -> None:
        self._hook.remove()


def _seen_by(watch: weakref.ref[OptimizerWatch]) -> Callable[[Optimizer, Any, Any], None]:
    # Weakly: torch holds the hook, and must not hold a model that nobody else does.
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (found := watch()) is not None:
            found.see(optimizer)

    return hook
