"""Which tensors products and convolutions take as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_accel.evidence.roofline import odd_operand

aten = torch.ops.aten
PICTURES = torch.zeros(2, 3, 8, 6)
SERIES = torch.zeros(2, 8, 3)
MATRIX = torch.zeros(8, 6)


@pytest.mark.parametrize(
    ("operation", "operand"),
    [
        (aten.convolution.default, PICTURES),
        (aten.convolution.default, PICTURES.contiguous(memory_format=torch.channels_last)),
        (aten.convolution.default, torch.zeros(2, 8, 6, 3).permute(0, 3, 1, 2)),
        (aten.mm.default, MATRIX),
        (aten.mm.default, MATRIX.t()),
        (aten.mm.default, torch.zeros(8, 12)[:, :6]),
        (aten.bmm.default, SERIES.transpose(1, 2)),
        (aten.addmm.default, torch.zeros(6).expand(6)),
        (aten.mm.default, MATRIX.to_sparse()),
        (aten.add.Tensor, MATRIX[:, ::2]),
    ],
    ids=lambda one: "" if isinstance(one, Tensor) else str(one),
)
def test_what_is_dense_in_some_order_is_taken_as_it_is(operation: object, operand: Tensor) -> None:
    assert odd_operand(operation, [operand]) is None


@pytest.mark.parametrize(
    ("operation", "operand"),
    [
        (aten.convolution.default, PICTURES.transpose(2, 3)),
        (aten.convolution_backward.default, torch.zeros(()).expand(2, 3, 8, 6)),
        (aten.convolution.default, SERIES.transpose(1, 2)),
        (aten.mm.default, MATRIX[:, ::2]),
        (aten.bmm.default, PICTURES[0, :, ::2, ::2]),
    ],
    ids=lambda one: "" if isinstance(one, Tensor) else str(one),
)
def test_what_is_not_is_named(operation: object, operand: Tensor) -> None:
    assert odd_operand(operation, [operand]) is operand
