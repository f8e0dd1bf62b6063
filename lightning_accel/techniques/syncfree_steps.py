"""Optimizer steps under XLA: torch_xla's own, each parameter in one operation, with what changes kept on the device.

Torch's Adam computes with a count of steps that it keeps on the host: numbers that are sent to the device anew in every
step, and a dozen operations a parameter that XLA has to be told of. torch_xla brings Adam, AdamW and SGD that step in
one operation (``torch_xla.amp.syncfree``), made for gradient scalers, whose word ``found_inf`` is 0 here for good.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_accel.core.patch import Patch
from lightning_accel.core.stepping import Group, kind_of, own_choice, own_steps, step_of
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.step_override import StandInSteps

_MOST = "max_exp_avg_sq"  # torch_xla's Adam has it, empty, without amsgrad too


def step_syncfree(site: str, optimizer: Optimizer) -> Patch:
    """The edit that has an optimizer step as torch_xla's variant of it, or why there is none."""
    kind = kind_of(optimizer)
    if isinstance(kind, str):
        return Site(site, why_not=kind)
    if kind not in (Adam, AdamW, SGD):
        return Site(site, why_not=f"torch_xla has no step of {kind.__name__}: it has Adam, AdamW and SGD")
    reasons = [why_not(kind, group) for group in optimizer.param_groups]
    if all(reasons):
        return Site(site, why_not=reasons[0])
    return SyncfreeSteps(site, optimizer, kind)


def why_not(kind: type[Optimizer], group: Group) -> str:
    """Why a group of parameters is stepped as its user has it; empty: it can be stepped by torch_xla."""
    if not group["params"]:
        return "it has no parameters"
    if (chosen := own_choice(group)) is not None:
        return chosen
    if kind is SGD and not group["momentum"]:
        return "without momentum there is no state, and torch_xla's SGD would keep some"
    for name, value in group.items():
        if isinstance(value, Tensor) or (name == "betas" and any(isinstance(each, Tensor) for each in value)):
            return f"its {name} is a tensor"
    for parameter in group["params"]:
        if parameter.device.type != "xla":
            return f"a parameter is on {parameter.device.type}"
        if parameter.dtype is not torch.float32:
            return f"a parameter is of {str(parameter.dtype).removeprefix('torch.')}"
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            return "a gradient is sparse"
    return ""


class SyncfreeSteps(StandInSteps):
    """Has an optimizer step as torch_xla's variant of its class; its stand-in has none of these parameters."""

    def __init__(self, site: str, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        super().__init__(site, f"{kind.__name__} → torch_xla's, an operation for each parameter", optimizer, kind)
        self._found_inf: Tensor | None = None

    @override
    def _groups(self, optimizer: Optimizer) -> list[Group]:
        """Steps those that can be, and leaves the others to torch."""
        others = []
        for group in optimizer.param_groups:
            if why_not(self._kind, group):
                self._give_back([group])
                others.append(group)
                continue
            states = [optimizer.state[p] for p in group["params"] if p.grad is not None and optimizer.state.get(p)]
            for state in states:
                self._make_ready(state, group["params"][0].device)
            step = _syncfree_step(self._kind, group)
            step(SimpleNamespace(param_groups=[group], state=optimizer.state), None, self._zero(group))
        return others

    def _zero(self, group: Group) -> Tensor:
        if self._found_inf is None:
            self._found_inf = torch.zeros(()).to(group["params"][0].device)
        return self._found_inf

    def _make_ready(self, state: dict[str, Any], device: torch.device) -> None:
        """What torch's own step has left, or a checkpoint, as torch_xla's goes on from it."""
        if self._kind is SGD:
            # Its count only says whether there is a momentum yet.
            if "step" not in state and state.get("momentum_buffer") is not None:
                state["step"] = torch.ones(()).to(device)
            elif state.get("momentum_buffer", state) is None:
                del state["momentum_buffer"]
            return
        if state["step"].device.type != "xla":
            state["step"] = state["step"].to(device, torch.float32)
        if _MOST not in state:
            state[_MOST] = torch.empty(0).to(device)

    @override
    def _own_states(self, group: Group, states: Mapping[Any, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        if own_choice(group) is not None:
            return
        if self._kind is SGD:
            for parameter in group["params"]:
                if "step" in (state := states.get(parameter) or {}):
                    yield parameter, {name: value for name, value in state.items() if name != "step"}
            return
        extra = set() if group["amsgrad"] else {_MOST}
        for parameter, step in own_steps(group, states):
            kept = {name: value for name, value in states[parameter].items() if name not in extra}
            yield parameter, {**kept, "step": step}


def _syncfree_step(kind: type[Optimizer], group: Group) -> Callable[..., Any]:
    """Torch_xla's, without the hooks that it calls itself: torch's step has called them."""
    library: Any = importlib.import_module("torch_xla.amp.syncfree")
    if kind is SGD:
        return step_of(library.SGD)
    is_decoupled = group.get("decoupled_weight_decay", kind is AdamW)
    return step_of(library.AdamW if is_decoupled else library.Adam)
