"""Claims 9, 11, 14 and 15, about memory, at small sizes: the bytes that they count are the bytes that are held."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_accel.claims import (
    row_09_inplace_memory,
    row_11_checkpointing,
    row_14_sparse_conversion,
    row_15_sparse_relu,
)
from lightning_accel.claims.measure import peak_bytes, timed_ms

MIB = 1 << 20


def test_a_peak_has_the_memory_of_torch_and_of_numpy() -> None:
    def call() -> tuple[Any, Any]:
        return torch.empty(MIB, dtype=torch.uint8), np.empty(2 * MIB, np.uint8)

    assert 3 * MIB <= peak_bytes(call) < 3.1 * MIB


def test_an_operation_in_place_saves_its_result_and_an_out_that_has_to_be_held_saves_nothing() -> None:
    found = {figure.condition: figure.value for figure in row_09_inplace_memory.operations()}
    assert found["the operation is relu"] == found["the operation adds a number"] == 0.5
    assert found["the operation adds a tensor"] == pytest.approx(1 / 3)


@pytest.mark.medium
def test_a_training_step_in_place_takes_less_where_its_activations_save_what_they_were_given() -> None:
    fresh, inplace = (
        row_09_inplace_memory.peak_step_bytes(row_09_inplace_memory.training_step(torch.nn.LeakyReLU, on))
        for on in (False, True)
    )
    assert inplace < fresh


def test_checkpointing_is_counted_after_the_forward_pass_and_at_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"BLOCKS": 3, "BATCH": 1, "LENGTH": 64, "WIDTH": 64}.items():
        monkeypatch.setattr(row_11_checkpointing, name, size)
    (saved, peak), (few, low) = (row_11_checkpointing.Training(mode).bytes() for mode in ("off", "full"))
    outputs = 3 * 64 * 64 * 4
    assert outputs <= few < 1.5 * outputs < saved / 4  # of the blocks; and the state of the random generator
    assert few < low < peak
    assert saved < peak


@pytest.mark.parametrize("row", [row_14_sparse_conversion, row_15_sparse_relu])
def test_sparse_rows_have_figures_of_every_density(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row, "SIZE", 128)
    monkeypatch.setattr(row, "timed_ms", lambda sides, seconds: timed_ms(sides, seconds=0))
    figures = list(row.measure())
    for share in ("50.0%", "10.0%", "1.0%", "0.1%"):
        assert any(share in figure.condition and figure.target is not None for figure in figures)
