"""Noise by its statistics, whitening against SciPy, windows against torch's own, and what a user's function may do."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest

pytest.importorskip("scipy")

import numpy as np
import torch
from scipy import linalg, stats
from torch import Tensor

from lightning_accel.data import GaussianNoise, Map, Position, Preprocess, SlidingWindow, Transform, Whiten

pytestmark = pytest.mark.numbers

EVALUATION = Position(training=False)
COV = ((2.0, 0.6, 0.0), (0.6, 1.0, -0.3), (0.0, -0.3, 0.5))


def applied(transform: Transform, batch: Any, position: Position | None = None, seed: int = 0) -> Any:
    return Preprocess([transform], seed=seed)(batch, position)


def covariance(rows: Tensor) -> Tensor:
    return torch.cov(rows.double().T)


def correlated(*shape: int) -> Tensor:
    """Rows of three features with a mean and a covariance of their own."""
    factor = torch.tensor(linalg.cholesky(COV, lower=True), dtype=torch.float32)
    return torch.randn(*shape, 3) @ factor.T + torch.tensor([10.0, -3.0, 0.5])


# -- GaussianNoise -----------------------------------------------------------------------------------------------------


def test_noise_is_normal_with_the_standard_deviation() -> None:
    noise = applied(GaussianNoise(0.3), torch.full((500, 200), 5.0)) - 5
    assert stats.kstest(noise.flatten().double() / 0.3, "norm").pvalue > 1e-4


@pytest.mark.parametrize(
    ("shape", "features"), [((50_000, 3), 1), ((500, 100, 3), 2), ((50, 3, 30, 33), 1), ((50, 30, 33, 3), 3)]
)
def test_noise_of_a_covariance_has_it_over_the_features(shape: tuple[int, ...], features: int) -> None:
    noise = applied(GaussianNoise(cov=COV), torch.zeros(shape))
    measured = covariance(noise.movedim(features, -1).reshape(-1, 3))
    assert (measured - torch.tensor(COV, dtype=torch.float64)).abs().max() < 0.06


def test_samples_and_calls_have_noise_of_their_own() -> None:
    chain = Preprocess([GaussianNoise(1.0), GaussianNoise(1.0)], seed=0)
    noise = torch.cat([chain(torch.zeros(8, 3000), Position(batch_idx=index)) for index in range(2)])
    correlations = np.corrcoef(noise.numpy())[np.triu_indices(16, 1)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(3000)
    assert abs(noise.var() - 2) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_noise_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert applied(GaussianNoise(0.1), torch.zeros(4, 5, dtype=dtype)).dtype == dtype


def test_there_is_no_noise_in_evaluation() -> None:
    data = torch.rand(4, 5)
    assert torch.equal(applied(GaussianNoise(1.0), data, EVALUATION), data)


@pytest.mark.parametrize(
    "settings", [{}, {"std": 1.0, "cov": COV}, {"std": -1.0}, {"std": float("nan")}, {"std": "1e-3"}, {"std": True}]
)
def test_noise_of_no_meaning_is_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"GaussianNoise\(std="):
        GaussianNoise(**settings)


@pytest.mark.parametrize(
    ("cov", "complaint"),
    [([[1, 2, 3]], "square"), ([[1, 0.5], [0.2, 1]], "not symmetric"), ([[1, 1], [1, 1]], "not positive definite")],
)
def test_what_is_no_covariance_is_refused_at_once(cov: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"GaussianNoise: cov.*{complaint}"):
        GaussianNoise(cov=cov)


def test_a_covariance_for_other_features_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"for 3 features, and the data has 4"):
        applied(GaussianNoise(cov=COV), torch.zeros(2, 4))


def test_integers_are_refused_with_the_mend() -> None:
    with pytest.raises(TypeError, match=r"GaussianNoise: the numbers are uint8.*Put Normalize before it"):
        applied(GaussianNoise(1.0, key="x"), {"x": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)})


# -- Whiten ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3000,), (3000, 4)])
def test_whitened_features_have_mean_zero_and_the_identity_for_covariance(shape: tuple[int, ...]) -> None:
    data = correlated(*shape)
    white = applied(Whiten.fit([data], eps=0), data)
    for step in white.reshape(3000, -1, 3).unbind(1):
        assert step.mean(0).abs().max() < 1e-4
        torch.testing.assert_close(covariance(step), torch.eye(3, dtype=torch.float64), atol=1e-3, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_whitened_over_their_channels(channels: int) -> None:
    images = correlated(50, 8, 9).movedim(-1, channels)
    white = applied(Whiten.fit([images], eps=0), images)
    rows = white.movedim(channels, -1).reshape(-1, 3)
    torch.testing.assert_close(covariance(rows), torch.eye(3, dtype=torch.float64), atol=1e-3, rtol=0)


def test_whitening_is_what_scipy_s_cholesky_makes_it() -> None:
    data = correlated(500)
    mean, cov = data.double().mean(0).numpy(), np.cov(data.double().numpy().T)
    centred = data.double().numpy() - mean
    expected = linalg.solve_triangular(linalg.cholesky(cov, lower=True), centred.T, lower=True).T
    actual = applied(Whiten.fit([data], eps=0), data).double()
    torch.testing.assert_close(actual, torch.from_numpy(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(600,), (600, 4), (600, 5, 6)])
def test_fitted_in_batches_is_fitted_at_once(shape: tuple[int, ...]) -> None:
    data = correlated(*shape) + 1000
    at_once = Whiten.fit([data])
    in_batches = Whiten.fit([(batch, torch.zeros(len(batch)).long()) for batch in data.split([1, 99, 250, 250])])
    np.testing.assert_allclose(in_batches.mean, at_once.mean, rtol=1e-10)
    np.testing.assert_allclose(in_batches.cov, at_once.cov, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-3, 1e-6])
def test_features_of_a_small_unit_are_whitened_as_those_of_a_large_one(scale: float) -> None:
    data = torch.randn(2000, 2) * torch.tensor([1.0, scale])
    white = applied(Whiten.fit([data]), data)
    torch.testing.assert_close(covariance(white), torch.eye(2, dtype=torch.float64), atol=0.02, rtol=0)


@pytest.mark.parametrize("data", [torch.ones(20, 2), torch.randn(20, 1).repeat(1, 2), torch.randn(1, 3)])
def test_features_without_an_inverse_are_whitened_to_finite_numbers(data: Tensor) -> None:
    assert applied(Whiten.fit([data]), data).isfinite().all()


def test_whitening_acts_in_evaluation_too() -> None:
    data = correlated(50)
    assert torch.equal(applied(Whiten.fit([data]), data, EVALUATION), applied(Whiten.fit([data]), data))


def test_a_batch_of_no_samples_does_not_spoil_the_fit() -> None:
    data = correlated(50)
    assert Whiten.fit([data[:0], data]).mean == pytest.approx(Whiten.fit([data]).mean)


def test_fitting_takes_no_integers_that_applying_would_not_take() -> None:
    """A loader gives uint8; in the chain, after Normalize, the numbers are others: it would be whitened wrongly."""
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"Whiten.fit: .*uint8"):
        Whiten.fit([images], key=())
    with pytest.raises(TypeError, match=r"Whiten.fit: .*uint8"):
        Whiten.fit([{"x": images}], key="x")


def test_fitting_on_nothing_or_on_different_features_is_refused() -> None:
    with pytest.raises(ValueError, match="no batch"):
        Whiten.fit([])
    with pytest.raises(ValueError, match="different shapes"):
        Whiten.fit([torch.rand(4, 3), torch.rand(4, 2)])


def test_the_time_step_whose_covariance_has_no_inverse_is_named() -> None:
    with pytest.raises(ValueError, match=r"Whiten: cov\[1\] is not positive definite"):
        Whiten(mean=np.zeros((2, 2)), cov=[np.eye(2), np.ones((2, 2))])


def test_data_of_another_shape_than_fitted_on_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Whiten: fitted on \(N, 4, 3\), given \(2, 5, 3\)"):
        applied(Whiten.fit([correlated(9, 4)]), torch.rand(2, 5, 3))


# -- SlidingWindow -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trailing", [(), (3,), (3, 2)])
@pytest.mark.parametrize(("size", "step"), [(1, 1), (4, 1), (4, 3), (3, 4), (10, 1), (10, 7)])
def test_windows_are_those_of_torch_in_the_same_memory(size: int, step: int, trailing: tuple[int, ...]) -> None:
    data = torch.rand(2, 10, *trailing)
    windows = applied(SlidingWindow(size, step), data)
    assert torch.equal(windows, data.unfold(1, size, step).movedim(-1, 2))
    assert windows.data_ptr() == data.data_ptr()
    assert windows.untyped_storage().nbytes() <= data.untyped_storage().nbytes()


def test_windows_of_bfloat16_are_views_too() -> None:
    data = torch.rand(2, 10, 3).bfloat16()
    windows = applied(SlidingWindow(4), data)
    assert windows.dtype == torch.bfloat16
    assert windows.data_ptr() == data.data_ptr()


def test_windows_longer_than_the_sequence_are_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match=r"SlidingWindow\(size=11\).*\(2, 10\) has length 10"):
        applied(SlidingWindow(11), torch.rand(2, 10))


def test_windows_over_something_without_time_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SlidingWindow.*\(8,\)"):
        applied(SlidingWindow(2, key="x"), {"x": torch.rand(8)})


@pytest.mark.parametrize("setting", [{"size": 0}, {"size": 2.0}, {"size": 2, "step": 0}, {"size": True}])
def test_windows_of_no_meaning_are_refused_at_once(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"SlidingWindow\((size|step)="):
        SlidingWindow(**setting)


# -- Map ---------------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


def test_a_function_gets_numpy_and_the_whole_batch_in_the_tensors_own_memory() -> None:
    seen: list[Any] = []
    batch = Pair(torch.rand(4, 3), [torch.arange(4), "name"])

    def look(xp: Any, given: Any) -> Any:
        seen.extend([xp, given])
        return given

    result = applied(Map(look), batch)
    assert seen[0] is np
    assert type(seen[1]) is Pair
    assert seen[1].x.ctypes.data == batch.x.data_ptr() == result.x.data_ptr()
    assert result.y[0].data_ptr() == batch.y[0].data_ptr()
    assert result.y[1] == "name"


def test_a_function_of_one_part_gets_that_part() -> None:
    batch = {"x": torch.ones(4, 3), "more": (torch.zeros(4), None)}
    result = applied(Map(lambda xp, part: part + xp.arange(4, dtype=part.dtype), key=("more", 0)), batch)
    assert result["more"][0].tolist() == [0, 1, 2, 3]
    assert result["x"] is batch["x"]
    assert batch["more"][0].tolist() == [0, 0, 0, 0]


def test_a_function_may_return_another_structure() -> None:
    result = applied(
        Map(lambda xp, pair: {"x": pair[0][:, ::-1], "twice": [pair[1] * 2]}), (torch.eye(3), torch.ones(3))
    )
    assert torch.equal(result["x"], torch.eye(3).flip(1))
    assert torch.equal(result["twice"][0], torch.full((3,), 2.0))


def test_what_a_function_writes_into_the_batch_is_written() -> None:
    def write(xp: Any, x: Any) -> Any:
        x[:, 0] = 7
        return x

    data = torch.zeros(2, 2)
    assert applied(Map(write), data).tolist() == data.tolist() == [[7, 0], [7, 0]]


@pytest.mark.parametrize("training", [True, False])
def test_a_function_for_training_only_is_left_out_elsewhere(training: bool) -> None:
    data = torch.zeros(3)
    for training_only in (True, False):
        transform = Map(lambda xp, x: x + 1, training_only=training_only)
        result = applied(transform, data, Position(training=training))
        assert result.sum() == (3 if training or not training_only else 0)


def returned_half_of_the_labels(xp: Any, pair: Any) -> Any:
    return pair[0], pair[1][:2]


def returned_half_of_the_images(xp: Any, pair: Any) -> Any:
    return pair[0][:2], pair[1]


@pytest.mark.parametrize("fn", [returned_half_of_the_images, returned_half_of_the_labels])
def test_a_function_that_changes_the_batch_size_of_any_part_is_an_error_that_names_it(fn: Any) -> None:
    with pytest.raises(ValueError, match=rf"Map\({fn.__name__}\) was given 4 samples and returned 2"):
        applied(Map(fn), (torch.rand(4, 3), torch.arange(4)))


def test_something_that_is_not_per_sample_may_come_first() -> None:
    result = applied(Map(lambda xp, pair: {"scale": xp.ones(3), "x": pair[0]}), (torch.rand(4, 3), torch.arange(4)))
    assert result["scale"].shape == (3,)


def test_a_function_that_returns_nothing_is_an_error_that_says_so() -> None:
    with pytest.raises(TypeError, match=r"Map\(.*\) returned None: it has to return the batch"):
        applied(Map(lambda xp, x: None), torch.rand(4))


def test_an_error_of_the_function_s_own_comes_through_unchanged() -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        applied(Map(lambda xp, x: 1 / 0), torch.rand(4))


def test_what_is_no_function_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="Map"):
        Map("numpy.abs")  # type: ignore[arg-type]
