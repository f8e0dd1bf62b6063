"""The figures of a part's trial: how far off, how fast, how large."""

from __future__ import annotations

import json
import math

import pytest

from lightning_accel.core.measured import Measurement, together


def test_an_error_is_told_in_spreads() -> None:
    assert Measurement(error=3e-6, spread=1e-6).error_spreads == pytest.approx(3.0)
    assert Measurement(error=3e-6, spread=1e-6, is_same=True).error_spreads == 0.0


def test_what_was_not_compared_has_no_error() -> None:
    assert Measurement(original_ms=2.0, candidate_ms=1.0).error_spreads is None


def test_figures_come_back_from_json() -> None:
    figures = Measurement(error=1e-6, spread=2e-6, is_same=False, original_bytes=4, candidate_bytes=1)
    assert Measurement.from_dict(json.loads(json.dumps(figures.to_dict()))) == figures


def test_what_is_not_known_here_is_passed_over_and_infinity_is_read_as_it_is_written() -> None:
    assert Measurement.from_dict({"error": "inf", "spread": 1.0, "warp": 9}) == Measurement(error=math.inf, spread=1.0)


def test_of_several_sites_the_worst_error_counts_and_times_add_up() -> None:
    sites = [
        Measurement(error=1e-6, spread=1e-6, is_same=False, original_ms=4.0, candidate_ms=2.0),
        Measurement(error=9e-6, spread=1e-5, is_same=False, original_ms=2.0, candidate_ms=1.0),
        Measurement(original_ms=5.0),  # whose candidate was not timed
    ]
    all_in_all = together(sites)
    assert (all_in_all.error, all_in_all.error_spreads) == (1e-6, pytest.approx(1.0))
    assert (all_in_all.original_ms, all_in_all.candidate_ms) == (6.0, 3.0)
    assert (all_in_all.original_bytes, all_in_all.candidate_bytes) == (None, None)


def test_all_are_the_same_to_the_bit_only_where_each_is() -> None:
    same, other = Measurement(error=0.0, spread=1e-6, is_same=True), Measurement(error=1e-6, spread=1e-6, is_same=False)
    assert together([same, same]).is_same
    assert not together([same, other]).is_same
    assert together([]) == Measurement()
