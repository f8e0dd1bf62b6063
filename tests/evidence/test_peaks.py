"""The machine's peaks, which are measured in a moment on any machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.evidence import peaks
from lightning_accel.evidence.peaks import measure_peaks

CPU = torch.device("cpu")


class Products(TorchDispatchMode):
    """Notes the sizes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[torch.dtype, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.sizes.setdefault(args[0].dtype, set()).add(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peaks._SIZE, "cpu", 32)
    monkeypatch.setattr(peaks, "_LEAST_SIZE", 16)


@pytest.mark.parametrize(("most_s", "sizes"), [(60.0, {16, 32}), (0.0, {16})])
def test_matrices_grow_until_the_next_product_would_take_too_long(
    most_s: float, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without bfloat16 takes a hundred times as long for products of it."""
    monkeypatch.setattr(peaks, "_MOST_S", most_s)
    with Products() as products:
        measured = measure_peaks(CPU)
    assert products.sizes == {torch.float32: sizes, torch.bfloat16: sizes}
    assert min(measured.float32_flops, measured.bfloat16_flops, measured.bytes_per_sec) > 0
