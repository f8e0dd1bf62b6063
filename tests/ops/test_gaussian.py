"""Densities against SciPy's, whitening against a solved system, samples by their statistics."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("hypothesis")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, multivariate_normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.ops import gaussian
from support.covariances import covariances, drawn_covariance, mirrored

pytestmark = pytest.mark.numbers

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Batch dimensions of x, mean and cov, as they may meet.
BROADCAST = [
    ((), (), ()),
    ((7,), (), ()),
    ((), (3,), (3,)),
    ((7, 1), (3,), (3,)),
    ((7, 3), (1,), (3,)),
    ((5, 7), (), (5, 1)),
    ((5, 7, 3), (7, 1), (5, 1, 3)),
    ((2, 4), (3, 1, 1), (4,)),
    ((0,), (), ()),
    ((7, 0), (), (1, 0)),
    ((0, 2), (2,), (2,)),
]


def points(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- Densities and whitening -------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(cov=drawn_covariance(), seed=st.integers(0, 2**32))
def test_the_density_is_scipy_s(cov: np.ndarray, seed: int) -> None:
    size = cov.shape[-1]
    spread = np.sqrt(np.diagonal(cov, axis1=-2, axis2=-1))
    x, mean = points(4, size, seed=seed).numpy(), points(size, seed=seed + 1).numpy()
    x, mean = 3 * x.reshape(4, *(1,) * (cov.ndim - 2), size) * spread, mean * spread.max()
    expected = np.empty(x.shape[:-1])
    for index in np.ndindex(expected.shape):
        expected[index] = multivariate_normal(mean, cov[index[1:]]).logpdf(x[index])
    np.testing.assert_allclose(gaussian.log_prob(x, mean, cov), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("x_batch", "mean_batch", "cov_batch"), BROADCAST)
@pytest.mark.parametrize("features", [1, 3])
def test_batch_dimensions_broadcast(x_batch: Any, mean_batch: Any, cov_batch: Any, features: int) -> None:
    x, mean = points(*x_batch, features), points(*mean_batch, features, seed=2)
    cov = covariances(*cov_batch, features)
    factor = torch.linalg.cholesky(cov)
    expected = torch.linalg.solve(factor, (x - mean)[..., None])[..., 0]
    torch.testing.assert_close(gaussian.whiten(x, mean, cov), expected)
    assert gaussian.log_prob(x, mean, cov).shape == expected.shape[:-1]
    density = gaussian.log_prob(np.asarray(x), np.asarray(mean), np.asarray(cov))
    assert isinstance(density, np.ndarray)
    np.testing.assert_array_equal(density, gaussian.log_prob(x, mean, cov).numpy())


def test_whitening_undoes_what_sampling_did() -> None:
    mean, cov = points(5), covariances(5)
    drawn = gaussian.sample(mean, cov, 1000, torch.Generator().manual_seed(0))
    noise = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(gaussian.whiten(drawn, mean, cov), noise)


def test_a_covariance_that_many_points_share_is_not_repeated() -> None:
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
            return result

    with Largest() as largest:
        gaussian.log_prob(points(50, 3, 8), points(8), covariances(3, 8))
    assert largest.elements == 50 * 3 * 8


@pytest.mark.parametrize("features", [0, 1])
def test_one_feature_and_none_at_all_have_a_density(features: int) -> None:
    x = torch.zeros(2, features)
    expected = -0.5 * features * np.log(2 * np.pi)
    density = gaussian.log_prob(x, x, torch.eye(features))
    torch.testing.assert_close(density, torch.full((2,), expected, dtype=torch.float32))


@pytest.mark.parametrize("layout", ["Fortran", "strided", "reversed"])
def test_the_layout_does_not_matter(layout: str) -> None:
    change = {
        "Fortran": np.asfortranarray,
        "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
        "reversed": lambda array: array[..., ::-1].copy()[..., ::-1],
    }[layout]
    arrays = [points(6, 4).numpy(), points(4).numpy(), covariances(6, 4).numpy()]
    changed = [change(array) for array in arrays]
    np.testing.assert_allclose(gaussian.log_prob(*changed), gaussian.log_prob(*arrays), rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_of_the_dtype_that_is_promised_and_as_exact(dtype: torch.dtype) -> None:
    x, mean, cov = (t.to(dtype) for t in (points(20, 4), points(4, seed=2), covariances(4)))
    full = torch.float64 if dtype == torch.float64 else torch.float32
    expected = gaussian.log_prob(x.double(), mean.double(), cov.double())
    density, white = gaussian.log_prob(x, mean, cov), gaussian.whiten(x, mean, cov)
    assert (density.dtype, white.dtype, gaussian.sample(mean, cov, 2).dtype) == (full, dtype, dtype)
    # Of numbers as they came in, nothing is lost to 16 bits.
    torch.testing.assert_close(density.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_widest_dtype_counts() -> None:
    x, mean, cov = points(4).half(), points(4).float(), covariances(4)
    assert gaussian.log_prob(x, mean, cov).dtype == torch.float64
    assert gaussian.whiten(x, mean, cov.float()).dtype == torch.float32
    assert gaussian.whiten(x, mean.half(), cov.half()).dtype == torch.float16


def test_autocast_changes_nothing() -> None:
    x, mean, cov = points(6, 4).float(), points(4).float(), covariances(4).float().requires_grad_()
    cov = mirrored(cov)

    def results() -> list[Tensor]:
        drawn = gaussian.sample(mean, cov, 3, torch.Generator().manual_seed(0))
        parts = [drawn, gaussian.log_prob(x, mean, cov), gaussian.whiten(x, mean, cov)]
        return [*parts, gaussian.sqrt_det(cov), gaussian.cholesky(cov)]

    plain = results()
    with torch.autocast("cpu", torch.bfloat16):
        cast = results()
    for one, other in zip(plain, cast, strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one, other)
    for one, other in zip(plain, cast, strict=True):
        one_gradient, other_gradient = (torch.autograd.grad(t.sum(), cov, retain_graph=True)[0] for t in (one, other))
        assert torch.equal(one_gradient, other_gradient)


# -- Samples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["torch", "NumPy"])
def test_samples_have_the_mean_and_the_covariance_of_their_distribution(library: str) -> None:
    count = 50_000
    mean, cov = 10 * points(2, 3), covariances(2, 3)
    if library == "torch":
        drawn = gaussian.sample(mean, cov, count, torch.Generator().manual_seed(3))
    else:
        drawn = torch.from_numpy(gaussian.sample(mean.numpy(), cov.numpy(), count, np.random.default_rng(3)))
    assert drawn.shape == (count, 2, 3)
    for index in range(2):
        rows = drawn[:, index]
        assert (rows.mean(0) - mean[index]).abs().max() < 5 * (cov[index].diagonal().max() / count) ** 0.5
        assert (rows.T.cov() - cov[index]).abs().max() < 5 * cov[index].diagonal().max() * (2 / count) ** 0.5
    white = gaussian.whiten(drawn, mean, cov)
    assert kstest(white.flatten().numpy(), "norm").pvalue > 1e-4
    assert np.corrcoef(white.flatten(1).T.numpy())[np.triu_indices(6, 1)].max() < 5 / count**0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_generator_or_the_global_seed_makes_samples_repeatable(dtype: torch.dtype) -> None:
    mean, cov = torch.zeros(3, dtype=dtype), torch.eye(3, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    first = gaussian.sample(mean, cov, 4, generator)
    assert not torch.equal(first, gaussian.sample(mean, cov, 4, generator))
    assert torch.equal(first, gaussian.sample(mean, cov, 4, generator.manual_seed(5)))
    torch.manual_seed(5)
    assert torch.equal(first, gaussian.sample(mean, cov, 4))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_s_seeds_hold_for_numpy_s_arrays(dtype: Any) -> None:
    mean, cov = np.zeros(3, dtype), np.eye(3, dtype=dtype)
    drawn = gaussian.sample(mean, cov, 4, np.random.default_rng(5))
    assert drawn.dtype == dtype
    np.testing.assert_array_equal(drawn, np.random.default_rng(5).standard_normal((4, 3)).astype(dtype))
    np.random.seed(5)
    expected = np.random.RandomState(5).standard_normal((4, 3)).astype(dtype)
    np.testing.assert_array_equal(gaussian.sample(mean, cov, 4), expected)


@pytest.mark.parametrize(("mean", "cov"), [((3,), (2, 3)), ((2, 3), (3,)), ((2, 1, 3), (4, 3)), ((0, 3), (3,))])
@pytest.mark.parametrize("n", [0, 1, np.int64(5)])
def test_there_are_n_samples_of_each_distribution(mean: tuple[int, ...], cov: tuple[int, ...], n: int) -> None:
    drawn = gaussian.sample(points(*mean), covariances(*cov), n)
    assert drawn.shape == (n, *np.broadcast_shapes(mean[:-1], cov[:-1]), 3)


@pytest.mark.parametrize("n", [-1, 2.0, True, "3"])
def test_what_is_no_number_of_samples_is_refused(n: Any) -> None:
    with pytest.raises(ValueError, match=r"sample\(n=.*\): give a number of samples"):
        gaussian.sample(np.zeros(2), np.eye(2), n)


@pytest.mark.parametrize("generator", [np.random.default_rng(0), np.random, 0])
def test_a_generator_of_another_library_is_refused(generator: Any) -> None:
    with pytest.raises(TypeError, match=r"sample\(generator=...\) is .*, and mean and cov are of torch"):
        gaussian.sample(torch.zeros(2), torch.eye(2), 3, generator)
    with pytest.raises(TypeError, match=r"torch.*Generator, and mean and cov are of NumPy"):
        gaussian.sample(np.zeros(2), np.eye(2), 3, torch.Generator())


# -- Gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["log_prob", "whiten", "sample"])
def test_gradients_are_those_of_finite_differences(of: str) -> None:
    x, mean, root = (points(4, 1, 3), points(2, 3, seed=2), points(2, 3, 3, seed=3))

    def compute(x: Tensor, mean: Tensor, root: Tensor) -> Tensor:
        cov = root @ root.mT + torch.eye(3)
        if of == "sample":
            return gaussian.sample(mean, cov, 2, torch.Generator().manual_seed(0)) + 0 * x.sum()
        return getattr(gaussian, of)(x, mean, cov)

    assert torch.autograd.gradcheck(compute, tuple(t.requires_grad_() for t in (x, mean, root)))


# -- Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "mean", "cov"),
    [
        ((3,), (2,), (3, 3)),
        ((2,), (2,), (3, 3)),
        ((), (3,), (3, 3)),
        ((4, 3), (2, 3), (3, 3)),
        ((4, 3), (3,), (2, 3, 3)),
    ],
)
@pytest.mark.parametrize("ask", [gaussian.log_prob, gaussian.whiten])
def test_shapes_that_do_not_fit_are_all_named(ask: Any, x: Any, mean: Any, cov: Any) -> None:
    arrays = np.zeros(x), np.zeros(mean), np.broadcast_to(np.eye(3), cov)
    with pytest.raises(ValueError, match=r"do not fit. Give \(..., D\)") as caught:
        ask(*arrays)
    for name, shape in {"x": x, "mean": mean, "cov": cov}.items():
        assert f"{name} of shape {shape}" in str(caught.value)


def test_samples_of_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample: mean of shape \(2, 3\), cov of shape \(4, 3, 3\) do not fit"):
        gaussian.sample(torch.zeros(2, 3), covariances(4, 3).float(), 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["x", "mean", "cov"])
def test_numbers_that_are_not_floating_point_are_refused(name: str, dtype: torch.dtype) -> None:
    arrays = {"x": torch.zeros(2), "mean": torch.zeros(2), "cov": torch.eye(2)}
    arrays[name] = arrays[name].to(dtype)
    with pytest.raises(TypeError, match=rf"log_prob\({name}=...\) holds {str(dtype)[6:]}"):
        gaussian.log_prob(**arrays)


def test_arrays_of_several_libraries_are_refused() -> None:
    with pytest.raises(TypeError, match="x of torch, mean of NumPy"):
        gaussian.log_prob(torch.zeros(2), np.zeros(2), np.eye(2))  # type: ignore[type-var]


@pytest.mark.parametrize("ask", ["sample", "log_prob", "whiten", "sqrt_det", "cholesky"])
def test_every_function_says_which_covariance_has_no_factor_and_takes_jitter(ask: str) -> None:
    cov = np.stack([np.eye(2), np.ones((2, 2))])
    arguments = {
        "sample": (np.zeros(2), cov, 1),
        "log_prob": (np.zeros(2), np.zeros(2), cov),
        "whiten": (np.zeros(2), np.zeros(2), cov),
    }.get(ask, (cov,))
    with pytest.raises(ValueError, match=rf"^{ask}: cov\[1\] is not positive definite"):
        getattr(gaussian, ask)(*arguments)
    assert np.isfinite(getattr(gaussian, ask)(*arguments, jitter=1e-6)).all()
