"""Finds the optimizers that train a model, for callers that are not given them, and the tensors that they hold."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accel.core.tree import tensors_in


def state_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Returns the tensors in the states of optimizers."""
    return [tensor for optimizer in optimizers for tensor in tensors_in(list(optimizer.state.values()))]


def living_optimizers(model: nn.Module) -> list[Optimizer]:
    """Returns the optimizers in this process that hold a parameter of ``model``.

    Searches all objects that the garbage collector tracks: 0.1 s in a large program. Skips proxies, and wrappers that
    are optimizers by class, such as Lightning's and Accelerate's. The wrapped optimizers are found themselves.
    """
    kinds = _kinds_of(Optimizer)
    # Compares ids of types: isinstance() would ask proxies for their class, and a set of types would ask for hashes.
    # Both could run foreign code.
    ids = set(map(id, kinds))
    # Instances refer to their class. To list all objects and check each takes twice as long.
    found: list[Any] = [thing for thing in gc.get_referrers(*kinds) if id(type(thing)) in ids]
    having = [(one, map(type, vars(one).values())) for one in found if "param_groups" in vars(one)]
    stepping = [one for one, held in having if ids.isdisjoint(map(id, held))]  # the others wrap an optimizer
    own = {id(parameter) for parameter in model.parameters()}
    return [one for one in stepping if any(id(p) in own for group in one.param_groups for p in group["params"])]


def are_all(optimizers: Sequence[Optimizer], model: nn.Module) -> bool:
    """Returns whether ``optimizers`` hold all parameters of ``model`` that are trained, so that no other trains it.

    Only torch's own classes count. Any other class may hold an optimizer inside.
    """
    own = [optimizer for optimizer in optimizers if type(optimizer).__module__.startswith("torch.optim.")]
    held = {id(parameter) for one in own for group in one.param_groups for parameter in group["params"]}
    return bool(own) and all(id(p) in held for p in model.parameters() if p.requires_grad)


class KnownOptimizers:
    """The optimizers that the techniques of a run know, each named by its number in order of arrival."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._all: list[Optimizer] = []
        self._told: dict[int, Optimizer] = {}

    def told(self, optimizers: Iterable[Optimizer]) -> dict[str, Optimizer]:
        """Adds optimizers that were named explicitly. Returns the new ones."""
        new = self._added(told := list(optimizers))
        self._told |= {id(optimizer): optimizer for optimizer in told}
        return new

    def searched(self) -> dict[str, Optimizer]:
        """Adds the process's optimizers if the named ones do not train everything. Returns the new ones."""
        return {} if are_all([*self._told.values()], self._model) else self._added(living_optimizers(self._model))

    def _added(self, optimizers: list[Optimizer]) -> dict[str, Optimizer]:
        known = set(map(id, self._all))
        new = [optimizer for optimizer in optimizers if id(optimizer) not in known]
        named = {f"optimizer {index}": optimizer for index, optimizer in enumerate(new, start=len(self._all))}
        self._all += new
        return named


def _kinds_of(kind: type) -> list[type]:
    return [kind, *chain.from_iterable(map(_kinds_of, kind.__subclasses__()))]
