"""Claims 6, 7, 12 and 13, about arrays and streams: both sides of each comparison give the same numbers.

What needs a GPU runs on this CPU in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_accel.claims import row_06_cupy_product, row_07_contiguous, row_12_sliding_products, row_13_streams
from lightning_accel.claims.claim import Figure, NotHereError, verdict_of
from lightning_accel.data import tensor_arrays

pytestmark = pytest.mark.numbers

CPU = torch.device("cpu")


def figures_of(found: Iterator[Figure]) -> dict[str, Figure]:
    return {figure.condition: figure for figure in found}


def once(sides: dict[str, Callable[[], Any]], **_: Any) -> dict[str, list[float]]:
    """In the place of a measurement: every side is called, and all are equally fast."""
    for side in sides.values():
        side()
    return dict.fromkeys(sides, [1.0] * 3)


# -- 6: CuPy's product -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is something to measure")
def test_without_a_gpu_claim_6_says_what_it_takes() -> None:
    with pytest.raises(NotHereError, match="needs a CUDA device and CuPy"):
        list(row_06_cupy_product.measure())


def test_without_cupy_claim_6_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: a GPU without CuPy."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(row_06_cupy_product, "why_no_cupy", lambda device: "CuPy is not installed: pip install it")
    with pytest.raises(NotHereError, match="needs CuPy beside the GPU: CuPy is not installed: pip install it"):
        list(row_06_cupy_product.measure())


def test_the_product_is_timed_with_and_without_the_way_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_06_cupy_product, "interleaved_ms", once)
    found = figures_of(row_06_cupy_product.products(32, CPU))
    assert [figure.target is None for figure in found.values()] == [False, True]


def test_what_lies_elsewhere_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_06_cupy_product.copied(CPU) == 0
    as_array = tensor_arrays.NumpyArrays.array
    monkeypatch.setattr(tensor_arrays.NumpyArrays, "array", lambda self, tensor: as_array(self, tensor).copy())
    assert row_06_cupy_product.copied(CPU) == 1


# -- 7: contiguous tensors ---------------------------------------------------------------------------------------------


def test_layouts_hold_as_many_numbers_in_other_orders() -> None:
    layouts = row_07_contiguous.layouts_of(torch.randn(4, 4))
    assert {layout.shape for layout in layouts.values()} == {(4, 4)}
    assert [layout.stride() for layout in layouts.values()] == [(4, 1), (1, 4), (8, 2)]


def test_every_operation_is_timed_on_what_is_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SIZE", "WIDE", "CHANNELS", "SIDE"):
        monkeypatch.setattr(row_07_contiguous, name, 8)
    monkeypatch.setattr(row_07_contiguous, "timed_ms", once)
    found = list(row_07_contiguous.measure())
    assert len(found) == 7
    # Where all are equally fast, what holds of the claim is that element-wise work does not mind.
    assert [figure.condition for figure in found if figure.is_met] == [
        "the tensor is transposed: element-wise",
        "the tensor has gaps: element-wise",
    ]
    assert verdict_of(found)[0] == "holds when"


# -- 12: products of sliding windows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["NumPy", "torch"])
def test_the_three_ways_give_the_same_products(make: Any) -> None:
    a, b = np.random.standard_normal((3, 8)), np.random.standard_normal((8, 50))
    loop, batched, ours = (way() for way in row_12_sliding_products.ways(make(a), make(b)).values())
    assert ours.shape == batched.shape == (31, 3, 20)
    np.testing.assert_allclose(ours, np.stack([np.asarray(product) for product in loop]), atol=1e-12)
    np.testing.assert_allclose(ours, batched, atol=1e-12)


def test_the_ratios_are_those_of_the_ways_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        row_12_sliding_products, "timed_ms", lambda ways, **_: {"loop": [8], "batched": [2], "ours": [1]}
    )
    found = figures_of(row_12_sliding_products.measure())
    assert [figure.value for figure in found.values()] == [4, 8, 2] * 2
    assert verdict_of(list(found.values()))[0] == "holds"


# -- 13: streams -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is something to measure")
def test_without_a_gpu_claim_13_says_what_it_takes() -> None:
    with pytest.raises(NotHereError, match="needs a CUDA device"):
        list(row_13_streams.measure())


def test_each_way_trains_on_every_batch_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_13_streams, "interleaved_ms", once)
    monkeypatch.setattr(row_13_streams, "STEPS", 3)
    seen = []
    step = row_13_streams.training_step(CPU)

    def recorded(device: torch.device) -> Callable[[row_13_streams.Batch], None]:
        return lambda batch: (seen.append(int(batch[0].sum())), step(batch))[1]

    monkeypatch.setattr(row_13_streams, "training_step", recorded)
    batches = row_13_streams.make_batches(2, 16)
    found = list(row_13_streams.epochs(batches, CPU, rounds=1))
    assert seen == [int(images.sum()) for images, _ in batches] * 3
    assert [figure.is_met for figure in found] == [False, True]
