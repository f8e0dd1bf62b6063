"""What ``self.log`` makes of a step that goes through its batch in parts, and so logs once for each."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Self

from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import logged_results
from lightning_accel.step.layers import Call, Layer


class SplitLogs(Layer):
    """Around the parts of one step: means, of the step as of the epoch, are over its samples, not over its parts."""

    name = "split"

    def __init__(self, trainer: Trainer) -> None:
        self._results: Any = logged_results(trainer)
        super().__init__([] if self._results is None else [(self._results, ("update_metrics",))])
        self._share = 1.0
        self._values: dict[str, tuple[Tensor, float]] = {}  # of the step so far: weighted sum, sum of weights
        self._part: dict[str, Tensor] = {}  # of the part under way

    def __enter__(self) -> Self:
        if self._results is not None:
            self._shown = self._results.batch, self._results.batch_size
            self.apply()
        return self

    def begin_part(self, part: Any, share: float) -> None:
        """Has what is logged next weigh as much as this part has samples."""
        self._end_part()
        self._share = share
        if self._results is not None:
            self._results.batch, self._results.batch_size = part, None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._results is None:
            return
        self._end_part()
        self.undo()
        self._results.batch, self._results.batch_size = self._shown
        if kind is None:
            for key, (total, weight) in self._values.items():
                # With no samples: the step's value becomes this one, and the epoch's stays as it is.
                self._results.update_metrics(key, total / weight, 0)

    def around_update_metrics(self, call: Call, key: str, value: Any, batch_size: int) -> None:
        call(key, value, batch_size)
        metric = self._results[key]
        if metric.is_tensor and metric.meta.on_step and metric.meta.is_mean_reduction:
            self._part[key] = value.detach()

    def _end_part(self) -> None:
        for key, value in self._part.items():
            total, weight = self._values.get(key, (0.0, 0.0))
            self._values[key] = total + value * self._share, weight + self._share
        self._part = {}
