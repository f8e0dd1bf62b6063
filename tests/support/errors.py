"""How far two lists of tensors lie apart."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_accel.experiment.tolerance import deviation


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest norm of a difference over the norm of what it should be; infinite for a NaN where none belongs."""
    return deviation(actual, expected).noise
