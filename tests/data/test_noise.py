"""The normal numbers are normal, unrelated for any two places and keys, and the same however they are computed."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import numpy as np
from scipy import stats

from lightning_accel.data import features
from lightning_accel.data.features import normal

pytestmark = pytest.mark.numbers

COUNT = 200_000
KEYS = [0, 1, 12345, 2**63, 2**64 - 1]


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """In standard deviations of what independent numbers show by chance."""
    return float(np.corrcoef(one, other)[0, 1] * np.sqrt(len(one)))


@pytest.mark.parametrize("key", KEYS)
def test_moments_and_distribution_are_those_of_the_normal_one(key: int) -> None:
    numbers = normal(np, key, (COUNT,))
    assert numbers.dtype == np.float32
    assert np.isfinite(numbers).all()
    assert stats.kstest(numbers.astype(np.float64), "norm").pvalue > 1e-4
    assert abs(numbers.mean()) < 4 / np.sqrt(COUNT)
    assert abs(numbers.var() - 1) < 4 * np.sqrt(2 / COUNT)
    assert abs(stats.skew(numbers)) < 4 * np.sqrt(6 / COUNT)
    assert abs(stats.kurtosis(numbers)) < 4 * np.sqrt(24 / COUNT)


def test_tails_are_as_heavy_as_they_should_be() -> None:
    numbers = np.abs(normal(np, 7, (2_000_000,)))
    for threshold in (2.0, 3.0, 4.0):
        expected = 2 * stats.norm.sf(threshold)
        assert stats.binomtest(int((numbers > threshold).sum()), numbers.size, expected).pvalue > 1e-4
    assert 4.7 < numbers.max() < 6.8


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 224])
def test_neighbours_are_unrelated(lag: int) -> None:
    numbers = normal(np, 3, (COUNT,))
    assert abs(correlation(numbers[:-lag], numbers[lag:])) < 4
    assert abs(correlation(numbers[:-lag] ** 2, numbers[lag:] ** 2)) < 4


@pytest.mark.parametrize("other", [1, 2, 3, 2**32, 2**63, 2**64 - 1])
def test_neighbouring_keys_give_unrelated_numbers(other: int) -> None:
    one, two = normal(np, 0, (COUNT,)), normal(np, other, (COUNT,))
    assert abs(correlation(one, two)) < 4
    assert abs(correlation(one**2, two**2)) < 4
    assert abs(correlation(one[1:], two[:-1])) < 4


def test_the_two_numbers_of_a_pair_are_unrelated() -> None:
    """Box and Muller's transform makes two of one draw: the first half of the numbers and the second."""
    first, second = normal(np, 5, (COUNT,)).reshape(2, -1)
    assert abs(correlation(first, second)) < 4
    assert abs(correlation(first**2, second**2)) < 4
    angle = np.arctan2(second, first) / (2 * np.pi) + 0.5
    assert stats.kstest(angle.astype(np.float64), "uniform").pvalue > 1e-4


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000, 1001])
@pytest.mark.parametrize("at_a_time", [1, 3, 499, 10**6])
def test_the_numbers_are_the_same_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, count: int, at_a_time: int
) -> None:
    at_once = normal(np, 99, (count,))
    monkeypatch.setattr(features, "_AT_A_TIME", at_a_time)
    assert np.array_equal(normal(np, 99, (count,)), at_once)


def test_the_same_key_gives_the_same_numbers_in_any_shape() -> None:
    flat = normal(np, 11, (24,))
    assert np.array_equal(normal(np, 11, (2, 3, 4)).reshape(-1), flat)
    assert not np.array_equal(normal(np, 12, (24,)), flat)


def test_no_number_comes_twice_as_often_as_it_should() -> None:
    _, counts = np.unique(normal(np, 1, (100_000,)), return_counts=True)
    assert counts.max() <= 5
