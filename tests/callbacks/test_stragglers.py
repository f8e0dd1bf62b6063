"""Ranks beside each other."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accel.callbacks import Stragglers
from lightning_accel.callbacks._interval import RankEpoch, compare_ranks


def compared(*ranks: tuple[float | None, float | None, float | None]) -> Stragglers | None:
    """Each rank's time of every step, its time before every backward pass, and its wait for data; None is none."""
    return compare_ranks([rank_epoch(*rank) for rank in ranks])


def rank_epoch(step_ms: float | None, before_backward_ms: float | None, data_wait_ms: float | None) -> RankEpoch:
    others: dict[str, Any] = dict.fromkeys(RankEpoch.__dataclass_fields__, 1.0)
    lists = {
        "step_ms": [] if step_ms is None else [step_ms] * 3,
        "before_backward_ms": [] if before_backward_ms is None else [before_backward_ms] * 2,
    }
    return RankEpoch(**{**others, **lists, "data_wait_ms": data_wait_ms})


def test_the_slowest_rank_is_shown_beside_the_mean() -> None:
    ranks = compared((350, None, 0), (412, None, 0), (351, None, 0))
    assert ranks is not None
    assert ranks.slowest_rank == 1
    assert ranks.metrics() == {"step_ms_p95_slowest_rank": 412}
    assert ranks.line() == "slowest rank 1: p95 412 ms (mean of ranks 371 ms)"


def test_the_rank_that_is_held_up_is_not_the_one_that_holds_up() -> None:
    """Rank 0 waits for data; in the steps, which are without that, the others wait for rank 0."""
    ranks = compared((50, 120, 84), (140, 30, 1), (130, 30, 2))
    assert ranks is not None
    assert (ranks.slowest_rank, ranks.latest_rank) == (1, 0)
    assert ranks.metrics() == {"step_ms_p95_slowest_rank": 140, "before_backward_ms_p95_latest_rank": 120}
    assert ranks.line() == (
        "slowest rank 1: p95 140 ms (mean of ranks 107 ms), latest at backward rank 0: p95 120 ms"
        " (mean of ranks 60 ms), its data wait 84 ms (mean of ranks 29 ms)"
    )


def test_a_wait_that_is_not_known_is_left_out() -> None:
    ranks = compared((50, 120, 84), (140, 30, None))
    assert ranks is not None
    assert ranks.data_wait_ms is None
    assert ranks.line().endswith("latest at backward rank 0: p95 120 ms (mean of ranks 75 ms)")


@pytest.mark.parametrize("ranks", [[(50, 120, 84)], [(50, 120, 84), (None, None, 0)]])
def test_a_single_rank_and_ranks_without_steps_are_not_compared(ranks: Any) -> None:
    assert compared(*ranks) is None


def test_a_rank_is_known_by_its_95th_percentiles() -> None:
    steps = [float(step) for step in range(101)]
    first = rank_epoch(1, 1, 3)
    second = RankEpoch(**{**vars(first), "step_ms": steps, "before_backward_ms": [2 * step for step in steps]})
    ranks = compare_ranks([first, second])
    assert ranks is not None
    assert (ranks.step_ms_p95, ranks.before_backward_ms_p95) == pytest.approx((95, 190))
