"""√det against NumPy's; by Cholesky and by LU the same answers and the same errors, whichever the clock prefers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("hypothesis")

import numpy as np
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.ops import determinant, gaussian
from support.covariances import covariances, drawn_covariance, mirrored

pytestmark = pytest.mark.numbers


class _Names(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def factorisations(compute: Callable[[], object]) -> list[str]:
    with _Names() as names:
        compute()
    return [name for name in names.found if name in ("linalg_cholesky_ex", "linalg_lu_factor_ex")]


@pytest.fixture(autouse=True)
def _nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinant, "_lu_wins", {})


@pytest.fixture(params=["LU", "Cholesky"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the clock says; the rest is as it is."""
    monkeypatch.setattr(determinant, "_lu_is_faster", lambda cov: request.param == "LU")
    return str(request.param)


@settings(max_examples=25, deadline=None)
@given(drawn_covariance())
def test_it_is_the_root_of_numpy_s_determinant(cov: np.ndarray) -> None:
    np.testing.assert_allclose(gaussian.sqrt_det(cov), np.sqrt(np.linalg.det(cov)), rtol=1e-9)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (300, 4), (64,)])
def test_both_ways_give_the_same(faster: str, shape: tuple[int, ...]) -> None:
    cov = covariances(*shape) + 4 * torch.eye(shape[-1])  # of such, LU swaps no rows
    used = factorisations(lambda: gaussian.sqrt_det(cov))
    assert used == ["linalg_lu_factor_ex" if faster == "LU" else "linalg_cholesky_ex"]
    torch.testing.assert_close(gaussian.sqrt_det(cov), torch.linalg.det(cov).sqrt(), rtol=1e-12, atol=0)


def test_gradients_are_those_of_finite_differences_by_both_ways_and_twice(faster: str) -> None:
    root = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)

    def of_root(root: torch.Tensor) -> torch.Tensor:
        cov = root @ root.mT + 5 * torch.eye(3)
        return gaussian.sqrt_det(mirrored(cov))

    assert ("linalg_lu_factor_ex" in factorisations(lambda: of_root(root))) == (faster == "LU")
    assert torch.autograd.gradcheck(of_root, (root,))
    assert torch.autograd.gradgradcheck(of_root, (root,))


def test_gradients_go_through_the_jitter() -> None:
    root = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda root: gaussian.sqrt_det(root @ root.mT - 0.03 * torch.eye(3), jitter=1e-2), (root,)
    )


@pytest.mark.parametrize(
    "cov",
    [
        -np.eye(2),  # whose determinant is 1
        np.array([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]),  # and here, with rows swapped
        np.ones((3, 3)),
        np.zeros((2, 2)),
        np.array([[1, 2, 0], [2, 1, 0], [0, 0, -1.0]]),
    ],
)
def test_what_is_not_positive_definite_is_refused_by_both_ways(faster: str, cov: np.ndarray) -> None:
    batch = np.stack([np.eye(len(cov)), cov])
    with pytest.raises(ValueError, match=r"sqrt_det: cov\[1\] is not positive definite"):
        gaussian.sqrt_det(batch)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_by_both_ways(faster: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"sqrt_det: cov has {value} at \(2, 2\)"):
        gaussian.sqrt_det(np.diag([1, 1, value]))


def kernels(generator: torch.Generator) -> torch.Tensor:
    """Of a Gaussian kernel at three places each, some of them close to one another."""
    places = torch.rand(300, 3, 1, generator=generator)
    return torch.exp(-((places - places.mT) ** 2) / 8)


def with_a_combination(generator: torch.Generator) -> torch.Tensor:
    """The last feature is the mean of the others."""
    features = torch.randn(300, 4, 10, generator=generator)
    features = torch.cat([features, features.mean(1, keepdim=True)], 1)
    return mirrored(features @ features.mT)


@pytest.mark.parametrize("near_singular", [kernels, with_a_combination])
def test_what_lu_vouches_for_has_a_cholesky_factor(near_singular: Callable[[torch.Generator], torch.Tensor]) -> None:
    """Singular but for some roundings: whether that is an error must not depend on the clock."""
    cov = near_singular(torch.Generator().manual_seed(0))
    failed = torch.linalg.cholesky_ex(cov).info != 0
    assert failed.any()
    assert not any(determinant._by_lu(matrix) for matrix in cov[failed])


@pytest.mark.parametrize("is_exact", [True, False])
def test_what_lu_does_not_vouch_for_goes_to_cholesky_and_its_kind_with_it(
    monkeypatch: pytest.MonkeyPatch, is_exact: bool
) -> None:
    monkeypatch.setattr(determinant, "_lu_is_faster", lambda cov: True)
    swapped = torch.tensor([[1.0, 2.0], [2.0, 9.0]])
    if not is_exact:
        swapped = torch.tensor([[9.0, 2.0], [2.0 + 1e-6, 1.0]])
    lu, cholesky = "linalg_lu_factor_ex", "linalg_cholesky_ex"
    assert gaussian.sqrt_det(torch.eye(2)) == 1
    assert factorisations(lambda: gaussian.sqrt_det(swapped)) == ([lu, cholesky] if is_exact else [cholesky])
    torch.testing.assert_close(gaussian.sqrt_det(swapped), torch.tensor(5.0).sqrt())
    assert factorisations(lambda: gaussian.sqrt_det(torch.eye(2))) == ([cholesky] if is_exact else [lu])


def test_a_kind_is_measured_once() -> None:
    cov = covariances(5, 8) + 4 * torch.eye(8)
    first = factorisations(lambda: gaussian.sqrt_det(cov))
    assert first.count("linalg_lu_factor_ex") > 0 < first.count("linalg_cholesky_ex")
    assert len(factorisations(lambda: gaussian.sqrt_det(cov + torch.eye(8)))) == 1
    assert len(factorisations(lambda: gaussian.sqrt_det(cov[:4]))) == 1
    assert len(factorisations(lambda: gaussian.sqrt_det(cov[0]))) > 2


@pytest.mark.usefixtures("determinism_restored")
def test_deterministic_runs_ask_no_clock() -> None:
    torch.use_deterministic_algorithms(True)
    assert factorisations(lambda: gaussian.sqrt_det(torch.eye(300))) == ["linalg_cholesky_ex"]


def test_lu_is_not_asked_where_torch_s_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several large matrices, in several threads: https://github.com/pytorch/pytorch/issues/142815."""
    monkeypatch.setattr(determinant, "_lu_is_faster", lambda cov: True)
    cov = torch.eye(200).repeat(2, 1, 1)
    assert factorisations(lambda: gaussian.sqrt_det(cov)) == ["linalg_cholesky_ex"]
    assert factorisations(lambda: gaussian.sqrt_det(cov[0])) == ["linalg_lu_factor_ex"]


def test_a_product_within_range_is_found_though_its_parts_are_not(faster: str) -> None:
    variances = torch.tensor([1e30, 1e30, 1e30, 1e-30, 1e-30, 4e-30])
    torch.testing.assert_close(gaussian.sqrt_det(variances.diag()), torch.tensor(2.0), rtol=1e-4, atol=0)


def test_numbers_of_16_bits_give_float32() -> None:
    assert gaussian.sqrt_det(torch.eye(8, dtype=torch.float16) * 4000).item() == pytest.approx(4000**4)
    assert gaussian.sqrt_det(np.eye(2, dtype=np.float16)).dtype == np.float32


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (0, 0)])
def test_empty_batches_and_no_features_have_the_empty_product(shape: tuple[int, ...]) -> None:
    assert torch.equal(gaussian.sqrt_det(torch.empty(shape)), torch.ones(shape[:-2]))


def test_it_works_in_compiled_code() -> None:
    compiled = torch.compile(gaussian.sqrt_det, backend="eager")
    assert compiled(4 * torch.eye(2)).item() == pytest.approx(4)


@pytest.mark.parametrize(("size", "scale"), [(10, 1e9), (60, 30.0), (98, 8.2), (512, 1.5)])
@pytest.mark.parametrize("batch", [(), (8,)])
def test_a_product_that_leaves_the_range_on_its_way_keeps_its_digits(
    size: int, scale: float, batch: tuple[int, ...]
) -> None:
    """Half of the deviations are 1/scale and half scale: the root is 1, and on the way there far below."""
    half = torch.full((size // 2,), scale)
    cov = torch.diag(torch.cat([1 / half, half]).square()).expand(*batch, size, size).contiguous()
    assert (gaussian.sqrt_det(cov) - 1).abs().max() < 1e-3
