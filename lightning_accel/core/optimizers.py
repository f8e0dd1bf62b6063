"""Which optimizers train a model, for those who are not told."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer


def holds_parameters(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether ``optimizer`` steps at least one parameter of ``model``."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def living_optimizers(model: nn.Module) -> list[Optimizer]:
    """The optimizers in this process that hold a parameter of ``model``.

    Looks through everything that the garbage collector tracks: a tenth of a second in a large program. Wrappers, such
    as Lightning's and Accelerate's, which are optimizers by their class, are passed over for what they wrap, and so
    are what stands for another.
    """
    kinds = _kinds_of(Optimizer)
    # By their types' ids: isinstance() would ask proxies for their class, and a set of types for their hashes, and so
    # run somebody's code.
    ids = set(map(id, kinds))
    # What is of a class refers to it; to have all objects listed and to look at each takes twice as long.
    found: list[Any] = [thing for thing in gc.get_referrers(*kinds) if id(type(thing)) in ids]
    stepping = [optimizer for optimizer in found if "param_groups" in vars(optimizer) and not _wraps_another(optimizer)]
    return [optimizer for optimizer in stepping if holds_parameters(optimizer, model)]


def are_all(optimizers: Sequence[Optimizer], model: nn.Module) -> bool:
    """Whether nobody else trains ``model``: these have every parameter that is trained, and wrap no others.

    Of torch's own classes that is known; any other may step one that it holds somewhere.
    """
    own = [optimizer for optimizer in optimizers if type(optimizer).__module__.startswith("torch.optim.")]
    held = {id(parameter) for one in own for group in one.param_groups for parameter in group["params"]}
    return bool(own) and all(id(p) in held for p in model.parameters() if p.requires_grad)


class KnownOptimizers:
    """The optimizers that the techniques of a run know, each by a name in the order of their coming."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._all: list[Optimizer] = []
        self._told: dict[int, Optimizer] = {}

    def told(self, optimizers: Iterable[Optimizer]) -> dict[str, Optimizer]:
        """Adds optimizers that somebody has named; returns those that are new."""
        new = self._added(told := list(optimizers))
        self._told |= {id(optimizer): optimizer for optimizer in told}
        return new

    def searched(self) -> dict[str, Optimizer]:
        """Adds those that the process has, if what was named is not all; returns those that are new."""
        return {} if are_all([*self._told.values()], self._model) else self._added(living_optimizers(self._model))

    def _added(self, optimizers: list[Optimizer]) -> dict[str, Optimizer]:
        known = set(map(id, self._all))
        new = [optimizer for optimizer in optimizers if id(optimizer) not in known]
        named = {f"optimizer {index}": optimizer for index, optimizer in enumerate(new, start=len(self._all))}
        self._all += new
        return named


def _kinds_of(kind: type) -> list[type]:
    return [kind, *chain.from_iterable(map(_kinds_of, kind.__subclasses__()))]


def _wraps_another(optimizer: Optimizer) -> bool:
    return any(issubclass(type(value), Optimizer) for value in vars(optimizer).values())
