"""Finds by trial which layers lose too much in INT8 or fail in it, and puts them back into float."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_accel.core.module_copies import exchanged
from lightning_accel.core.report import one_line
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.losses import percent, worst


@dataclass
class LayerTrial:
    """A model whose layers are switched between INT8 and float, in place."""

    model: nn.Module
    layers: Mapping[str, nn.Module]  # the float layers
    converted: Mapping[str, nn.Module]  # the same layers in INT8
    calls: Sequence[Arguments]
    expected: Sequence[Sequence[Tensor]]  # outputs of the float model

    def put(self, names: Iterable[str]) -> None:
        """Puts these layers into INT8 and all others into float."""
        chosen = {*names}
        pairs = [(self.layers[name], made, name in chosen) for name, made in self.converted.items()]
        self.model = exchanged(self.model, {a if is_in else b: b if is_in else a for a, b, is_in in pairs})

    def put_back(self, max_error: float) -> dict[str, str]:
        """Puts layers back, the worst alone first, until the error is allowed. Returns layer → reason."""
        if self._error()[0] <= max_error:
            return {}
        alone: dict[str, tuple[float, str]] = {}
        for name in self.converted:
            self.put([name])
            alone[name] = self._error()
        back: dict[str, str] = {}
        for name in sorted(alone, key=lambda one: alone[one][0], reverse=True):
            back[name] = alone[name][1]
            self.put(self.converted.keys() - back.keys())
            if self._error()[0] <= max_error:
                break
        return back

    def _error(self) -> tuple[float, str]:
        """Returns the error of the outputs, as a number and in words."""
        try:
            error = worst(self.model, self.calls, self.expected)
        except Exception as failure:  # the float model did not fail
            said = "with it in INT8 the model fails, as where something else reads its weight"
            return math.inf, f"{said}: {one_line(failure)}"
        if math.isinf(error):
            return error, "in INT8 it alone makes the outputs infinite, no numbers, or of other shapes"
        return error, f"in INT8 it alone has the outputs off by {percent(error)}"
