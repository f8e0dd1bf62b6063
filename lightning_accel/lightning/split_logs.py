"""``self.log`` in a step that processes its batch in parts and so logs once for each part."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Self

from lightning_accel.lightning.packages import Trainer
from lightning_accel.lightning.private import logged_results
from lightning_accel.step.layers import Call, Layer


class SplitLogs(Layer):
    """A layer around the parts of one step that makes the step's and the epoch's means weigh samples, not parts."""

    name = "split"

    def __init__(self, trainer: Trainer) -> None:
        self._results: Any = logged_results(trainer)
        super().__init__([] if self._results is None else [(self._results, ("update_metrics",))])
        self._share = 1.0
        self._values: dict[str, tuple[Tensor, float]] = {}  # weighted sum and sum of weights of the step so far
        self._part: dict[str, Tensor] = {}  # values of the current part

    def __enter__(self) -> Self:
        if self._results is not None:
            self._shown = self._results.batch, self._results.batch_size
            self.apply()
        return self

    def begin_part(self, part: Any, share: float) -> None:
        """Weights the values logged next by this part's share of the samples."""
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
                # A batch size of 0 sets the step's value and leaves the epoch's unchanged.
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
