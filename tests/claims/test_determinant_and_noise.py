"""Claims 16 and 17, about the determinant and Gaussian noise, at the smallest size; no time is asserted."""

from __future__ import annotations

import functools
import math

import pytest

pytest.importorskip("scipy")

import torch

from lightning_accel.claims import measure, row_16_sqrt_det, row_17_gaussian
from lightning_accel.claims.claim import Figure
from lightning_accel.experiment.time_calls import time_calls

pytestmark = pytest.mark.numbers


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LEAST_CALL_S", 1e-5)
    monkeypatch.setattr(measure, "time_calls", functools.partial(time_calls, most_s=0.01))


def test_claim_16_is_measured_for_one_matrix_and_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_16_sqrt_det, "SIZES", (4, 8))
    figures = list(row_16_sqrt_det.measure())
    judged = [figure.condition for figure in figures if figure.target is not None]
    assert judged == ["one 4x4"]
    assert {"one 8x8", "32 times 4x4", "32 times 8x8"} <= {figure.condition for figure in figures}
    assert all(0 < figure.low <= figure.value <= figure.high < math.inf for figure in figures)


@pytest.mark.parametrize(("det_ms", "says_so"), [(1.0, True), (3.0, False)])
def test_claim_16_says_where_lu_wins(monkeypatch: pytest.MonkeyPatch, det_ms: float, says_so: bool) -> None:
    times = {"det": [det_ms] * 7, "Cholesky": [2.0] * 7, "sqrt_det": [2.0] * 7}
    monkeypatch.setattr(row_16_sqrt_det, "timed_ms", lambda sides, seconds: times)
    figure = next(row_16_sqrt_det.measure())
    assert ("LU wins" in figure.note) == says_so


def test_the_sides_of_claim_16_compute_the_same() -> None:
    found = [side() for side in row_16_sqrt_det.sides(row_16_sqrt_det.covariances(3, 8)).values()]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=0)


def test_claim_17_holds_on_every_machine() -> None:
    figures = [found for found in row_17_gaussian.measure() if isinstance(found, Figure)]
    judged = {figure.condition: figure for figure in figures if figure.target is not None}
    assert len(judged) == 9
    assert {name for name, figure in judged.items() if not figure.is_met} == set()


def test_claim_17_sees_a_density_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    right = row_17_gaussian.gaussian.log_prob
    monkeypatch.setattr(row_17_gaussian.gaussian, "log_prob", lambda x, mean, cov: 1.001 * right(x, mean, cov))
    figures = [found for found in row_17_gaussian.measure() if isinstance(found, Figure)]
    missed = {figure.condition for figure in figures if figure.is_met is False}
    assert {"densities, float64", "densities, float32", "gradients of mean, float64"} <= missed
