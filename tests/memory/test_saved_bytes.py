"""What a call keeps for its backward pass is counted to the byte, whoever keeps it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.memory.costs import kept_bytes
from lightning_accel.memory.recompute import Recomputation, recomputed

pytestmark = pytest.mark.numbers

SAMPLES, WIDTH, HIDDEN = 16, 8, 32
X, UP = 4 * SAMPLES * WIDTH, 4 * SAMPLES * HIDDEN  # bytes


class Block(nn.Module):
    """Keeps what it is given and what both products are computed from; results are its caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SAMPLES, WIDTH, requires_grad=True)


def test_activations_are_counted_and_neither_weights_nor_results(x: Tensor) -> None:
    block = Block()
    assert kept_bytes(block, block.forward, (x,), {}) == X + 2 * UP


@pytest.mark.parametrize(("mode", "kept"), [("full", X), ("selective", X + UP)])
def test_a_recomputed_call_keeps_what_it_does_not_compute_again(x: Tensor, mode: Recomputation, kept: int) -> None:
    block = Block()
    call = functools.partial(Block.forward, block)
    again = functools.partial(recomputed, block, lambda block, *args, **kwargs: call(*args, **kwargs), mode)
    assert kept_bytes(block, lambda *args, **kwargs: again(args, kwargs, has_statistics=False), (x,), {}) == kept


def test_without_gradients_nothing_is_kept() -> None:
    block = Block().requires_grad_(False)
    assert kept_bytes(block, block.forward, (torch.randn(SAMPLES, WIDTH),), {}) == 0


def test_the_block_and_the_random_state_are_left_as_they_were(x: Tensor) -> None:
    block = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout())
    state = torch.get_rng_state()
    kept_bytes(block, block.forward, (x,), {})
    assert torch.equal(torch.get_rng_state(), state)
    assert not block[0].running_mean.any()
