"""Which layers lose too much in smaller numbers, or cannot be had in them: found by trial, and put back into float."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from lightning_accel.core.report import one_line
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.int8 import exchanged, without_deprecations
from lightning_accel.deploy.losses import percent, worst


class LayerTrial:
    """A model of which layers are in INT8 or in float, and what that costs.

    The model is edited in place; what it is then, :attr:`model` has.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        converted: Mapping[str, nn.Module],
        calls: Sequence[Arguments],
        expected: Sequence[Sequence[Tensor]],
    ) -> None:
        self.model = model
        self._layers, self._converted = layers, converted
        self._calls, self._expected = calls, expected
        self._failure = ""

    def put(self, names: Iterable[str]) -> None:
        """Has these layers in INT8, and all others in float."""
        chosen = set(names)
        pairs = [(self._layers[name], converted, name in chosen) for name, converted in self._converted.items()]
        self.model = exchanged(self.model, {a if is_in else b: b if is_in else a for a, b, is_in in pairs})

    def put_back(self, max_error: float) -> dict[str, str]:
        """Layer → why it is in float again: the fewest, taken in the order of what they lose, that bring it below."""
        if self._error() <= max_error:
            return {}
        alone, why = {}, {}
        for name in self._converted:
            self.put([name])
            alone[name] = self._error()
            why[name] = self._reason(alone[name])
        back: dict[str, str] = {}
        for name in sorted(alone, key=lambda one: alone[one], reverse=True):
            back[name] = why[name]
            self.put(self._converted.keys() - back.keys())
            if self._error() <= max_error:
                break
        return back

    def _error(self) -> float:
        try:
            with without_deprecations():
                found = worst(self.model, self._calls, self._expected)
        except Exception as error:  # in float it did not fail
            self._failure = one_line(error)
            return math.inf
        self._failure = ""
        return found

    def _reason(self, error: float) -> str:
        if self._failure:
            return f"with it in INT8 the model fails, as where something else reads its weight: {self._failure}"
        if math.isinf(error):
            return "in INT8 it alone makes the outputs infinite, no numbers, or of other shapes"
        return f"in INT8 it alone has the outputs off by {percent(error)}"
