"""What training itself changes: parameters, gradients, optimizers, schedules; kept before a step on trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accel.core.torch_private.tensors import version_of, versions_of
from lightning_accel.lightning.packages import LightningModule

MOST_BYTES = 1 << 28
"""Of parameters, of which three copies may be made: a step on trial must not be what exhausts the memory."""


class Trained:
    """Parameters, gradients, and the states of a module's optimizers and of their schedules as they are.

    With manual optimization, a step that raises may have stepped an optimizer, or several, before. Under Lightning's
    own loop, the optimizer's step is what raises.

    Args:
        module: Whose.
    """

    def __init__(self, module: LightningModule) -> None:
        self._optimizers: list[Optimizer] = list(module.trainer.optimizers)
        self._progress: Any = module.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        self._before_progress = self._progress.state_dict()
        self._parameters = [(p, p.data, p.detach().clone()) for p in module.parameters()]
        self._gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in module.parameters()]
        self._states = [_copied_state(one) for one in self._optimizers]
        self._schedules = [
            (vars(one.scheduler), dict(vars(one.scheduler))) for one in module.trainer.lr_scheduler_configs
        ]
        self._groups = [[dict(group) for group in one.param_groups] for one in self._optimizers]

    def restore(self) -> None:
        """Brings all of it back; values go into the very tensors that were there."""
        for parameter, data, value in self._parameters:
            parameter.data = data
            parameter.copy_(value)
        for parameter, gradient, its_value in self._gradients:
            parameter.grad = gradient
            if gradient is not None and its_value is not None:
                gradient.copy_(its_value)
        for optimizer, state, groups in zip(self._optimizers, self._states, self._groups, strict=True):
            optimizer.state.clear()
            optimizer.state.update({p: dict(_copied(values)) for p, values in state.items()})
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)
        for schedule, its_state in self._schedules:
            schedule.update(its_state)
        self._progress.load_state_dict(self._before_progress)


def trained_before(module: LightningModule) -> Trained | None:
    """What a module trains, as it is; None where there is no memory for it, or where it cannot be brought back."""
    trainer = module.trainer
    if not trainer.training or trainer.world_size > 1 or sum(p.nbytes for p in module.parameters()) > MOST_BYTES:
        return None
    try:
        return Trained(module)
    except Exception:  # an optimizer of another kind, a lazy parameter: the step is then repeated if it has not trained
        return None


def versions(parameters: Sequence[nn.Parameter], *, gradients: bool) -> list[Any]:
    """What differs once a parameter was written to or, with ``gradients``, got another gradient."""
    found: list[Any] = versions_of(parameters)
    return found + [_version_of_gradient(p) for p in parameters] if gradients else found


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that count what is written to them, as all do that were not made in inference mode."""
    return [p for p in module.parameters() if not p.is_inference()]


def _version_of_gradient(parameter: nn.Parameter) -> tuple[int, int]:
    return id(parameter.grad), -1 if parameter.grad is None else version_of(parameter.grad)


def _copied_state(optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
    return {parameter: dict(_copied(values)) for parameter, values in optimizer.state.items()}


def _copied(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value.clone() if isinstance(value, Tensor) else value) for name, value in values.items())
