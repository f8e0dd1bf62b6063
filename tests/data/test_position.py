"""A batch's random numbers follow from its place in the run, and from nothing else."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from lightning_accel.data import Position


def numbers(position: Position, seed: int = 0, rank: int = 0, count: int = 4) -> tuple[float, ...]:
    return tuple(position.generator(seed, rank).random(count))


def test_the_same_place_has_the_same_numbers() -> None:
    place = Position(epoch=3, batch_idx=7, loader_idx=1)
    assert numbers(place, seed=5, rank=2) == numbers(Position(epoch=3, batch_idx=7, loader_idx=1), seed=5, rank=2)


def test_every_other_place_seed_and_rank_has_others() -> None:
    """0, 1 and 2 at each place of the five: a sum or a list joined without marks would confuse some of them."""
    seen = {
        numbers(Position(epoch=epoch, batch_idx=batch, loader_idx=loader), seed=seed, rank=rank)
        for seed, rank, epoch, loader, batch in itertools.product(range(3), repeat=5)
    }
    assert len(seen) == 3**5


@pytest.mark.parametrize("seed", [-1, 0, 2**32, 2**63, 2**64 - 1])
def test_every_seed_that_torch_takes_is_one(seed: int) -> None:
    assert numbers(Position(), seed) != numbers(Position(), seed + 7)


def test_seeds_that_differ_in_their_upper_half_have_other_numbers() -> None:
    assert numbers(Position(), 5) != numbers(Position(), 5 + 2**32)
    assert numbers(Position(), 5 + 2**32) != numbers(Position(), 5, rank=1)


def test_neighbouring_batches_and_ranks_are_unrelated() -> None:
    rows = [numbers(Position(batch_idx=batch), rank=rank, count=2000) for batch in range(8) for rank in range(2)]
    correlations = np.corrcoef(rows)[np.triu_indices(16, 1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(2000)


def test_ahead_counts_batches_of_the_same_epoch() -> None:
    place = Position(epoch=2, batch_idx=5, loader_idx=1)
    assert place.ahead(3) == Position(epoch=2, batch_idx=8, loader_idx=1)
    assert place.ahead(0) == place


def test_whether_it_is_trained_on_does_not_change_the_numbers() -> None:
    assert numbers(Position(training=True)) == numbers(Position(training=False))


def test_a_place_is_a_value() -> None:
    place = Position()
    assert place == Position(training=True, epoch=0, batch_idx=0, loader_idx=0)
    with pytest.raises(FrozenInstanceError):
        place.epoch = 1  # type: ignore[misc]
