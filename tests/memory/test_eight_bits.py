"""Tensors in 8 bits: torchao's codes, found in one pass."""

from __future__ import annotations

import pytest
import torch

from lightning_accel.memory import eight_bits

pytest.importorskip("torchao", reason="optimizer states in 8 bits are torchao's")
pytestmark = pytest.mark.numbers


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_are_those_of_torchao(signed: bool) -> None:
    values = torch.randn(64, 256) * torch.logspace(-8, 4, 64)[:, None]
    values = values if signed else values.square()
    ours, theirs = (eight_bits.zeros_like(values, signed=signed) for _ in range(2))
    eight_bits.write(ours, values)
    theirs.copy_(values)
    assert torch.equal(ours.scale, theirs.scale)
    # A value half way between two codes may be rounded to either.
    differing = (ours.codes.int() - theirs.codes.int()).abs()
    assert differing.max() <= 1
    assert differing.count_nonzero() <= 2


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_read_is_near_what_was_written(signed: bool) -> None:
    """Half of the codes lie in the decade below a block's largest value: values there are off by 7% at most."""
    values = torch.randn(32, 256)
    values = values if signed else values.square()
    packed = eight_bits.zeros_like(values, signed=signed)
    eight_bits.write(packed, values)
    read = eight_bits.read(packed, values)
    assert float((read - values).norm() / values.norm()) < 0.02
    assert torch.equal(read.sign()[values.abs() > 1e-3], values.sign()[values.abs() > 1e-3])


def test_zeros_stay_zeros() -> None:
    packed = eight_bits.zeros_like(torch.ones(4096), signed=True)
    assert not eight_bits.read(packed, torch.ones(4096)).any()
    eight_bits.write(packed, torch.zeros(4096))
    assert not eight_bits.read(packed, torch.ones(4096)).any()


def test_what_is_no_number_is_not_hidden() -> None:
    values = torch.ones(4096)
    values[7] = float("nan")
    packed = eight_bits.zeros_like(values, signed=True)
    eight_bits.write(packed, values)
    assert eight_bits.read(packed, values)[:256].isnan().all()
    assert not eight_bits.read(packed, values)[256:].isnan().any()


def test_an_element_takes_a_byte_and_a_block_four_more() -> None:
    packed = eight_bits.zeros_like(torch.ones(1 << 16), signed=True)
    table = 256 * 4
    assert eight_bits.packed_bytes(packed) == (1 << 16) + 4 * 256 + table


def test_it_is_read_in_the_layout_that_is_wanted() -> None:
    weight = torch.randn(16, 16, 4, 4).to(memory_format=torch.channels_last)
    packed = eight_bits.zeros_like(weight, signed=True)
    eight_bits.write(packed, weight)
    read = eight_bits.read(packed, weight)
    assert read.stride() == weight.stride()
    assert float((read - weight).norm() / weight.norm()) < 0.02


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(4096), True),
        (torch.ones(4096, dtype=torch.bfloat16), True),
        (torch.ones(4095), False),
        (torch.ones(4097), False),
        (torch.ones(4096, dtype=torch.float64), False),
        (torch.ones(4096, dtype=torch.complex64), False),
        (torch.ones(64, 64).to_sparse(), False),
    ],
    ids=["float32", "bfloat16", "small", "no whole blocks", "float64", "complex", "sparse"],
)
def test_which_tensors_can_be(tensor: torch.Tensor, expected: bool) -> None:
    assert eight_bits.is_possible(tensor) is expected
