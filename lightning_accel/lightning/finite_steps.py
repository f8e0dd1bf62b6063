"""Whether a step in bfloat16 has a loss and gradients that are finite.

Next to 1, bfloat16 has steps of 2**-8. So ``log(1 - p)`` becomes infinite, and so does the gradient of
``sqrt(1 - cos**2)``, where float32 gives ordinary numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from lightning_accel.techniques.mixed_precision import Autocast

NOT_FINITE = "a loss or a gradient was not finite in bfloat16"

_MOST_PARAMETERS = 4  # whose gradients are read: what is not finite reaches all layers before it
_MOST_NUMBERS = 1 << 14  # in one of them
_MOST_FUTILE = 3


class FiniteSteps:
    """Reads the losses, and the gradients of a few small parameters, of steps in a bfloat16 that this library chose.

    On a GPU, to read a number is to wait for the device. There the first, second, fourth, eighth … step is read.
    """

    def __init__(self, module: nn.Module, precision: Autocast) -> None:
        self._module, self._precision = module, precision
        self._steps = self._futile = 0

    def reads(self) -> bool:
        """Returns whether the step that comes next is to be read."""
        if self._futile >= _MOST_FUTILE or not self._precision.is_ours:
            return False
        self._steps += 1
        return self._precision.device == "cpu" or self._steps.bit_count() == 1

    def is_finite(self, outputs: Any) -> bool:
        """Returns whether the loss among the outputs of a step is finite, or is none that can be read."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        return not (isinstance(loss, Tensor) and loss.numel() == 1) or math.isfinite(loss.item())

    def has_finite_gradients(self) -> bool:
        """Returns whether the gradients of the parameters that are read are finite."""
        return all(math.isfinite(p.grad.sum().item()) for p in self._parameters if p.grad is not None)

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        small = [p for p in self._module.parameters() if p.requires_grad and p.numel() <= _MOST_NUMBERS]
        return small[:: max(1, len(small) // _MOST_PARAMETERS)][:_MOST_PARAMETERS]

    def was_futile(self) -> None:
        """Notes that float32 did not make a step finite, either. After three of these, no more steps are read."""
        self._futile += 1
