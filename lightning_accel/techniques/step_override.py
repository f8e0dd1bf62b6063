"""An optimizer of torch's that steps in another way, unseen: hooks, schedulers, copies and checkpoints see its own."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_accel.core.patch import AttributePatch, MethodPatch, Patch, applied
from lightning_accel.core.stepping import Group


class StandInSteps(Patch):
    """Has torch's step work on a stand-in, which shares all with the optimizer but its groups.

    The optimizer itself never has them, whatever a step raises. Pre-hooks may replace the arguments of a step, the
    first of which is the optimizer; hooks, and what learning rate schedulers wrap around the step, are called as ever.
    """

    yields_to_compilers = True  # which fuse the step themselves

    def __init__(self, site: str, change: str, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        super().__init__(site, change)
        self._optimizer, self._kind = optimizer, kind
        self._hooks: list[RemovableHandle] = []
        self._copied = MethodPatch(site, "copied as without us", optimizer, "__getstate__", self._with_own_states)

    @abstractmethod
    def _groups(self, optimizer: Optimizer) -> Iterable[Group]:
        """What torch's step is to work on, asked when gradients are there."""

    @abstractmethod
    def _own_states(self, group: Group, states: Mapping[Any, Any]) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        """Parameters of a group whose state, of these, is not as torch would have it, with the state that is."""

    @override
    def _apply(self) -> None:
        optimizer = self._optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_state_dict_post_hook(self._saved, prepend=True),
        ]
        self._copied.apply()

    @override
    @torch.inference_mode(False)
    def _undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._copied.undo()
        self._give_back(self._optimizer.param_groups)

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.yields_to_compilers and torch.compiler.is_compiling():
            return None
        closure = args[1] if len(args) > 1 else kwargs.pop("closure", None)
        replaced = args[0]  # the stand-in of another edit perhaps
        stand_in = object.__new__(self._kind)
        vars(stand_in).update(vars(replaced), stands_for=optimizer)  # and is none that somebody looks for

        def before_parameters_are_stepped() -> Any:
            loss = None if closure is None else closure()
            # Not sooner: Lightning computes the gradients in the closure.
            vars(stand_in).update(vars(replaced), stands_for=optimizer, param_groups=[*self._groups(replaced)])
            return loss

        return (stand_in, before_parameters_are_stepped, *args[2:]), kwargs

    def _with_own_states(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def getstate(optimizer: Optimizer) -> Any:
            own: dict[Tensor, Any] = {}
            for group in optimizer.param_groups:
                own.update(self._own_states(group, optimizer.state))
            states = copy.copy(optimizer.state)
            states.update(own)
            with applied(AttributePatch("", "own states", optimizer, "state", states if own else optimizer.state)):
                return original(optimizer)

        return getstate

    def _give_back(self, groups: Iterable[Group]) -> None:
        """Has the states of groups as torch keeps them."""
        states = self._optimizer.state
        for group in groups:
            for parameter, state in self._own_states(group, states):
                states[parameter].clear()
                states[parameter].update(state)

    def _saved(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Has a checkpoint hold the states as torch keeps them; those in use are left alone."""
        saved = state_dict["state"]
        for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            index = dict(zip(group["params"], packed["params"], strict=True))
            states = {parameter: saved[at] for parameter, at in index.items() if at in saved}
            for parameter, state in self._own_states(group, states):
                saved[index[parameter]] = state
