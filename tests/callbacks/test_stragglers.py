"""Ranks beside each other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_accel.callbacks._stragglers import compare_ranks, rank_row

pytestmark = pytest.mark.numbers


def rows(*ranks: tuple[float, float, float]) -> Tensor:
    """Each rank's p95 of its steps and of what comes before its backward passes, and its wait for data."""
    return torch.tensor(ranks)


def test_the_slowest_rank_is_shown_beside_the_mean() -> None:
    ranks = compare_ranks(rows((350, math.nan, 0), (412, math.nan, 0), (351, math.nan, 0)))
    assert ranks is not None
    assert ranks.slowest_rank == 1
    assert ranks.metrics() == {"step_ms_p95_slowest_rank": 412}
    assert ranks.line() == "slowest rank 1: p95 412 ms (mean of ranks 371)"


def test_the_rank_that_is_held_up_is_not_the_one_that_holds_up() -> None:
    """Rank 0 waits for data; in the steps, which are without that, the others wait for rank 0."""
    ranks = compare_ranks(rows((50, 120, 84), (140, 30, 1), (130, 30, 2)))
    assert ranks is not None
    assert (ranks.slowest_rank, ranks.latest_rank) == (1, 0)
    assert ranks.metrics() == {"step_ms_p95_slowest_rank": 140, "before_backward_ms_p95_latest_rank": 120}
    assert ranks.line() == (
        "slowest rank 1: p95 140 ms (mean of ranks 106.7), latest at backward rank 0: p95 120 ms (mean of ranks 60),"
        " its data wait 84 ms (mean of ranks 29)"
    )


def test_a_wait_that_is_not_known_is_left_out() -> None:
    ranks = compare_ranks(rows((50, 120, 84), (140, 30, math.nan)))
    assert ranks is not None
    assert ranks.data_wait_ms is None
    assert ranks.line().endswith("latest at backward rank 0: p95 120 ms (mean of ranks 75)")


@pytest.mark.parametrize("ranks", [rows((50, 120, 84)), rows((50, 120, 84), (math.nan, math.nan, 0))])
def test_a_single_rank_and_ranks_without_steps_are_not_compared(ranks: Tensor) -> None:
    assert compare_ranks(ranks) is None


def test_a_rank_is_known_by_its_95th_percentiles() -> None:
    steps = torch.arange(101.0)
    row = rank_row(steps, 2 * steps, 3.0)
    torch.testing.assert_close(row, torch.tensor([[95.0, 190.0, 3.0]]))


def test_a_rank_without_steps_or_backward_passes_says_so() -> None:
    assert rank_row(torch.tensor([]), torch.tensor([]), 3.0)[0, :2].isnan().all()
