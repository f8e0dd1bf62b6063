"""Optimizers that step another one and leave ``super().__init__()`` out, as those of other packages do."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Wrapping(Optimizer):
    """Has the groups and states of what it wraps as properties, and no hooks at all: opacus' ``DPOptimizer``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.original_optimizer = optimizer

    param_groups = property(lambda self: self.original_optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.original_optimizer.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.original_optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.original_optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)


class SharingGroups(Wrapping):
    """Shares the groups, has states of its own and the hooks of steps alone: timm's ``Lookahead``."""

    param_groups: Any = None
    state: Any = None
    defaults: Any = None

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()  # type: ignore[var-annotated]
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, defaultdict(dict)


class SavingItsOwn(Wrapping):
    """Keeps slow weights, and saves them by names of its own: pytorch_optimizer's ``Lookahead``."""

    state: Any = None

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        parameters: list[Tensor] = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state = {parameter: {"slow": parameter.detach().clone()} for parameter in parameters}

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        with torch.no_grad():
            for parameter, state in self.state.items():
                parameter.copy_(state["slow"].lerp_(parameter, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"slow": [one["slow"] for one in self.state.values()], "base_optimizer": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["base_optimizer"])
        for state, slow in zip(self.state.values(), state_dict["slow"], strict=True):
            state["slow"].copy_(slow)


WRAPPING = (Wrapping, SharingGroups, SavingItsOwn)
