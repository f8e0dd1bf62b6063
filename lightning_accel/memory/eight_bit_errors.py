"""Measures during the run how much 8-bit moments, and Adam updates that use them, differ from float ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accel.memory import eight_bits

_MEASURED_AT = frozenset(10**exponent for exponent in range(8))


class Errors:
    """Measures at steps 1, 10, 100 and so on, and at the step after each. Does nothing at other steps.

    Moments: the relative error of rounding, in the norm, over all parameters. Update: the error of one parameter's next
    update that is due to rounded moments, with the same gradient.
    """

    def __init__(self) -> None:
        self._is_rounding, self._is_updating = False, False
        self._moments: dict[str, list[tuple[Tensor, Tensor]]] = {}
        # A parameter whose moments were also kept in floats for one step, and these.
        self._witness: tuple[Tensor, Mapping[str, Tensor]] | None = None
        self._update: float | None = None

    def begin(self, step: int) -> None:
        """Announces the step of the run that begins, counted from 1."""
        self._is_rounding, self._is_updating = step in _MEASURED_AT, step - 1 in _MEASURED_AT
        if self._is_rounding:
            self._moments, self._witness, self._update = {}, None, None

    def before(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        floats: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        """Called before a step of these parameters, whose moments were read from 8 bits."""
        if not self._is_updating or self._witness is None or getattr(optimizer, "grad_scale", None) is not None:
            return
        witness, exact = self._witness
        for parameter, moments in zip(parameters, floats, strict=True):
            if parameter is witness and parameter.grad is not None:
                by_floats, by_bits = (_update(m, parameter.grad, group) for m in (exact, moments))
                self._update = _relative(by_bits - by_floats, by_floats)

    def after(
        self, parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]], floats: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Called after the moments were rounded."""
        if not self._is_rounding:
            return
        for state, moments in zip(states, floats, strict=True):
            for name, exact in moments.items():
                rounded = eight_bits.read(state[name], exact)
                norms = (rounded - exact).float().square().sum(), exact.float().square().sum()
                self._moments.setdefault(name, []).append(norms)
        if self._witness is None:
            smallest = min(range(len(parameters)), key=lambda at: parameters[at].numel())
            self._witness = parameters[smallest], floats[smallest]

    def line(self, step: int) -> str | None:
        """Returns the new measurements in one line; None if there is nothing new."""
        if not self._is_updating or not self._moments:
            return None
        off = []
        for name, label in (("exp_avg", "the first moment"), ("exp_avg_sq", "the second")):
            errors, norms = zip(*self._moments[name], strict=True)
            off.append(f"{label} by {_relative(torch.stack(errors).sum().sqrt(), torch.stack(norms).sum().sqrt()):.2%}")
        if self._update is not None:
            off.append(f"an update by {self._update:.2%}")
        self._moments, self._witness = {}, None
        return f"rounding puts off {', '.join(off)} (at step {step - 1})"


def _update(moments: Mapping[str, Tensor], gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Returns Adam's direction, without the bias corrections, which are the same for both."""
    beta1, beta2 = group["betas"]
    first = moments["exp_avg"].float().lerp(gradient.float(), 1 - beta1)
    second = moments["exp_avg_sq"].float().lerp(gradient.float().square(), 1 - beta2)
    direction: Tensor = first / (second.sqrt() + group["eps"])
    return direction


def _relative(error: Tensor, norm: Tensor) -> float:
    return float(error.float().norm() / norm.float().norm().clamp(min=torch.finfo(torch.float32).tiny))
