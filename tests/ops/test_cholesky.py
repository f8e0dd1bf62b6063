"""The Cholesky factor against NumPy's, what is no covariance refused by name, and jitter only where it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("hypothesis")

import numpy as np
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_accel.ops import gaussian
from support.covariances import covariances, drawn_covariance

pytestmark = pytest.mark.numbers

EYE = np.eye(2)
SINGULAR = np.ones((2, 2))


@settings(max_examples=25, deadline=None)
@given(drawn_covariance())
def test_it_is_numpy_s(cov: np.ndarray) -> None:
    np.testing.assert_allclose(gaussian.cholesky(cov), np.linalg.cholesky(cov), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_factor_keeps_the_dtype_and_is_as_exact_as_it_can_hold(dtype: torch.dtype) -> None:
    cov = covariances(4, 3).to(dtype)
    factor = gaussian.cholesky(cov)
    assert factor.dtype == dtype
    exact = torch.linalg.cholesky(cov.double())
    # Half a unit in the last place of the dtype, and a rounding or so for each of the features where it is computed.
    off = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(factor.double(), exact, rtol=0, atol=off * exact.abs().max().item())


@pytest.mark.parametrize("layout", ["Fortran", "strided", "reversed", "read-only"])
def test_the_layout_does_not_matter(layout: str) -> None:
    cov = covariances(3, 4).numpy()
    if layout == "Fortran":
        given_cov = np.asfortranarray(cov)
    elif layout == "strided":
        given_cov = np.repeat(np.repeat(cov, 2, axis=1), 3, axis=2)[:, ::2, ::3]
    elif layout == "reversed":
        given_cov = cov[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]
    else:
        given_cov = cov.copy()
        given_cov.flags.writeable = False
    np.testing.assert_array_equal(gaussian.cholesky(given_cov), gaussian.cholesky(cov))


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (1, 1), (3, 0, 1, 1)])
def test_empty_batches_and_no_features_have_factors_of_their_shape(shape: tuple[int, ...]) -> None:
    cov = torch.full(shape, 4.0)
    assert torch.equal(gaussian.cholesky(cov), cov / 2)


def test_gradients_are_those_of_finite_differences() -> None:
    root = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda root: gaussian.cholesky(root @ root.mT + torch.eye(3)), (root,))


# -- What is no covariance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 3, 2)])
def test_what_is_not_square_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"cholesky: cov of shape \(.*\). Give square matrices"):
        gaussian.cholesky(np.ones(shape))


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.complex64, np.complex128])
def test_numbers_that_are_not_floating_point_are_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=rf"cholesky\(cov=...\) holds {np.dtype(dtype)}. Allowed: float16"):
        gaussian.cholesky(np.eye(2, dtype=dtype))


def test_a_factor_given_for_a_covariance_is_not_symmetric() -> None:
    """The commonest mistake; by its lower triangle alone, it would pass for another covariance."""
    factor = torch.tensor([[1.0, 0.0], [0.5, 2.0]])
    with pytest.raises(ValueError, match=r"cov\[1\] is not symmetric: at \(0, 1\) and \(1, 0\) it has 0 and 0.5.*L Lᵀ"):
        gaussian.cholesky(torch.stack([torch.eye(2), factor]))


def test_features_in_small_units_have_to_be_symmetric_too() -> None:
    with pytest.raises(ValueError, match=r"not symmetric: at \(1, 2\)"):
        gaussian.cholesky(np.array([[1, 0, 0], [0, 1e-12, 5e-13], [0, 4e-13, 1e-12]]))


def test_what_rounding_leaves_is_symmetric_and_the_lower_triangle_counts() -> None:
    cov = torch.tensor([[1.0, 0.3 + 1e-6], [0.3, 2.0]])
    assert torch.equal(gaussian.cholesky(cov), torch.linalg.cholesky(torch.tensor([[1.0, 0.3], [0.3, 2.0]])))


def test_the_one_that_is_not_positive_definite_is_named_by_its_place_in_the_batch() -> None:
    cov = np.broadcast_to(EYE, (3, 2, 2, 2)).copy()
    cov[2, 0] = [[1, 2], [2, 1]]
    with pytest.raises(ValueError, match=r"cholesky: cov\[2, 0\] is not positive definite \(smallest eigenvalue -1\)"):
        gaussian.cholesky(cov)
    cov[2, 1] = SINGULAR
    with pytest.raises(ValueError, match=r"cov\[2, 0\] and 1 more of 6 is not positive definite.*jitter=1e-6"):
        gaussian.cholesky(cov)


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("jitter", [0.0, 1e-3])
def test_what_is_not_finite_is_named_wherever_it_is(
    place: tuple[int, int], value: float, mirrored: bool, jitter: float
) -> None:
    cov = np.stack([EYE, EYE])
    cov[1][place] = value
    if mirrored:
        cov[1][place[::-1]] = value
    with pytest.raises(ValueError, match=rf"cov\[1\] has {value} at \("):
        gaussian.cholesky(cov, jitter=jitter)


# -- Jitter ------------------------------------------------------------------------------------------------------------


def test_jitter_is_added_to_those_that_need_it_and_to_no_other() -> None:
    good = covariances(3, 2)
    cov = torch.stack([good[0], 3 * torch.ones(2, 2, dtype=torch.float64), good[1], good[2]])
    factors = gaussian.cholesky(cov, jitter=1e-4)
    assert torch.equal(factors[[0, 2, 3]], gaussian.cholesky(good))
    torch.testing.assert_close(factors[1] @ factors[1].mT - cov[1], 3e-4 * torch.eye(2, dtype=torch.float64))


def test_jitter_grows_by_tens_until_it_is_enough() -> None:
    cov = np.diag([1.0, 1.0, -0.05]) + 0.0
    factor = gaussian.cholesky(cov, jitter=1e-3)
    np.testing.assert_allclose(factor @ factor.T, cov + 0.1 * 1.95 / 3 * np.eye(3))


def test_jitter_that_is_not_enough_is_an_error_that_says_how_much_there_was() -> None:
    with pytest.raises(ValueError, match=r"smallest eigenvalue -0.5\), nor is it with 0.001 times the mean"):
        gaussian.cholesky(np.diag([1, -0.5]), jitter=1e-6)


def test_gradients_go_through_the_jitter() -> None:
    root = torch.randn(2, 3, 2, dtype=torch.float64)
    root = torch.cat([root, torch.zeros(2, 3, 1)], -1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda root: gaussian.cholesky(root @ root.mT - 0.03 * torch.eye(3), jitter=1e-2), (root,)
    )


@pytest.mark.parametrize("jitter", [-1e-6, np.nan, np.inf])
@pytest.mark.parametrize("ask", [gaussian.cholesky, gaussian.sqrt_det])
def test_jitter_that_is_no_share_is_refused_where_it_is_not_needed_too(ask: Any, jitter: float) -> None:
    with pytest.raises(ValueError, match=rf"{ask.__name__}\(jitter=.*give a share"):
        ask(EYE, jitter=jitter)


def test_what_was_given_is_not_changed() -> None:
    cov: Tensor = torch.ones(2, 2)
    gaussian.cholesky(cov, jitter=1e-3)
    assert torch.equal(cov, torch.ones(2, 2))


@pytest.mark.parametrize("jitter", [True, None, "1e-6", [1e-6], -1e-6, 1e300, float("nan"), torch.tensor(1e-6)])
def test_jitter_of_no_meaning_is_refused(jitter: Any) -> None:
    with pytest.raises(ValueError, match=r"cholesky\(jitter=.*a number from 0 to 1"):
        gaussian.cholesky(torch.ones(2, 2), jitter=jitter)


@pytest.mark.parametrize("scale", [1e-38, 1e-44])
@pytest.mark.parametrize("ask", [gaussian.cholesky, gaussian.sqrt_det])
def test_a_covariance_too_small_for_its_dtype_is_called_that(ask: Any, scale: float) -> None:
    """Some libraries would factorise what is left of its digits, others would find it not positive definite."""
    with pytest.raises(ValueError, match=r"in torch.float32: it is too small for it. Give float64"):
        ask(torch.tensor([[1.0, 0.9], [0.9, 1.0]]) * scale)


def test_a_covariance_of_the_smallest_normal_numbers_has_a_factor() -> None:
    tiny = torch.finfo(torch.float32).tiny
    assert torch.equal(gaussian.cholesky(tiny * torch.eye(2)), tiny**0.5 * torch.eye(2))
