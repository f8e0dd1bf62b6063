"""A gradient scaler for float16 that serves several optimizers in one step and counts the steps it skips."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_accel.core.torch_private.training import optimizer_states


class CountingGradScaler(GradScaler):
    """A ``GradScaler`` for several optimizers in one step. It counts the steps it skips.

    It differs from torch's in four ways. None of them changes a program that uses torch's correctly.

    - :meth:`unscale_` may be called twice: clipping by hand and the optimizer's step both call it.
    - If no :meth:`update` follows an optimizer's step, the next :meth:`scale` updates the scale first.
    - If the scale changes, the gradients that are still scaled by the old one are scaled by the new one.
    - Skipped steps are counted on the device, without a synchronisation.
    """

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        super().__init__(device, **options)
        self.device = device  # the type of the one that computes
        self._optimizers: set[weakref.ref[Optimizer]] = set()
        self._skipped: Tensor | None = None

    @property
    def skipped_steps(self) -> int:
        """How many updates found an overflow and skipped their optimizer's step. Reading it synchronises the device."""
        return 0 if self._skipped is None else int(self._skipped.item())

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Registers optimizers before their first step, so that their gradients follow every change of the scale."""
        self._optimizers.update(map(weakref.ref, optimizers))

    @override
    def scale(self, outputs: Any) -> Any:
        if self._has_stepped():
            # Optimizers that are unscaled and have not stepped keep their state. Their overflow counts when they step.
            waiting = {key: state for key, state in self._states.items() if state["stage"] is OptState.UNSCALED}
            self._states.update({key: {**state, "found_inf_per_device": {}} for key, state in waiting.items()})
            self.update()
            self._states.update(waiting)
        return super().scale(outputs)

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        if self._is_scaled(optimizer) and _has_gradients(optimizer):
            super().unscale_(optimizer)
            self.watch([optimizer])

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not _has_gradients(optimizer):
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]  # nothing to unscale or to check
        self.watch([optimizer])
        return super().step(optimizer, *args, **kwargs)

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        found = [inf for state in self._states.values() for inf in state["found_inf_per_device"].values()]
        if not self.is_enabled() or (new_scale is None and not found):
            return
        optimizers = [one for ref in self._optimizers if (one := ref()) is not None and self._is_scaled(one)]
        groups = [group["params"] for one in optimizers for group in one.param_groups]
        scaled = [p.grad for parameters in groups for p in parameters if p.grad is not None]
        scale = self._scale  # which torch updates in place
        before = scale.clone() if scaled and scale is not None else None
        super().update(new_scale)
        if before is not None and scale is not None:
            for gradient in scaled:
                gradient.mul_((scale / before).to(gradient.device, non_blocking=True))
        if new_scale is None:
            overflow = functools.reduce(torch.maximum, (inf.to(found[0].device) for inf in found))
            self._skipped = overflow if self._skipped is None else self._skipped + overflow

    def finish_step(self) -> None:
        """Ends a training step: updates the scale and forgets what was unscaled without a step."""
        if self._has_stepped():
            self.update()
        self.forget()

    def forget(self) -> None:
        """Drops what a step left behind that did not reach its end."""
        self._states.clear()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_optimizers": set()}  # the references hold in this process only

    @property
    def _states(self) -> dict[int, dict[str, Any]]:
        """What torch knows of each optimizer since the latest update, by the optimizer's id."""
        return optimizer_states(self) if self.is_enabled() else {}

    def _is_scaled(self, optimizer: Optimizer) -> bool:
        return self._states.get(id(optimizer), {"stage": OptState.READY})["stage"] is OptState.READY

    def _has_stepped(self) -> bool:
        return any(state["stage"] is OptState.STEPPED for state in self._states.values())


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def check_optimizer(optimizer: Optimizer, precision: str) -> None:
    """Raises a ``ValueError`` for an optimizer that cannot work with a gradient scaler."""
    if precision == "16-mixed" and isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} with precision='16-mixed': it calls its closure several times a step, and"
            " the gradient scaler can neither unscale nor skip in between. Use precision='bf16-mixed' or '32-true'."
        )
