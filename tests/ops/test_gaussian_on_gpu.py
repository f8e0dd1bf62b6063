"""The same on a GPU: the numbers of the CPU, CuPy's arrays in and out, the same errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accel.ops import determinant, gaussian
from support.covariances import covariances, mirrored

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def arguments(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, mean = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 1, 5), (5,)))
    return {name: t.to(dtype) for name, t in {"x": x, "mean": mean, "cov": covariances(3, 5)}.items()}


@pytest.mark.parametrize("ask", [gaussian.log_prob, gaussian.whiten])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_densities_and_whitening_are_those_of_the_cpu(ask: Callable[..., Tensor], dtype: torch.dtype) -> None:
    given = arguments(dtype)
    found = ask(**{name: t.cuda() for name, t in given.items()})
    assert found.is_cuda
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}.get(found.dtype, torch.finfo(found.dtype).eps)
    torch.testing.assert_close(found.cpu(), ask(**given), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lu_wins", [True, False])
@pytest.mark.parametrize("shape", [(4,), (300, 4), (3, 64), (2, 200)])
def test_sqrt_det_and_its_gradient_are_those_of_the_cpu_by_both_ways(
    monkeypatch: pytest.MonkeyPatch, lu_wins: bool, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(determinant, "_lu_wins", {})
    monkeypatch.setattr(determinant, "_lu_is_faster", lambda cov: lu_wins)
    cov = (covariances(*shape) / 4 + torch.eye(shape[-1])).requires_grad_()
    on_gpu = cov.detach().cuda().requires_grad_()
    found, expected = gaussian.sqrt_det(on_gpu), gaussian.sqrt_det(cov)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-10, atol=0)
    found.log().sum().backward()
    expected.log().sum().backward()
    torch.testing.assert_close(on_gpu.grad.cpu(), cov.grad, rtol=1e-9, atol=1e-12)


def test_the_way_is_measured_once_on_the_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinant, "_lu_wins", {})
    for _ in range(2):
        gaussian.sqrt_det(covariances(8, 16).cuda())
    assert len(determinant._lu_wins) == 1


@pytest.mark.parametrize("bad", [[[1, 2], [2, 1]], [[1, 1], [1, 1]], [[-1, 0], [0, -1]]])
@pytest.mark.parametrize("ask", [gaussian.cholesky, gaussian.sqrt_det])
def test_what_is_not_positive_definite_is_named(ask: Callable[[Tensor], Tensor], bad: list[list[float]]) -> None:
    cov = torch.stack([torch.eye(2), torch.tensor(bad, dtype=torch.float32)]).cuda()
    with pytest.raises(ValueError, match=r"cov\[1\] is not positive definite"):
        ask(cov)
    if bad == [[1, 1], [1, 1]]:
        assert ask(cov, jitter=1e-4).isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (1, 1), (1, 0)])
@pytest.mark.parametrize("ask", [gaussian.cholesky, gaussian.sqrt_det])
def test_what_is_not_finite_is_named(ask: Callable[[Tensor], Tensor], value: float, place: tuple[int, int]) -> None:
    cov = torch.eye(2).repeat(3, 1, 1).cuda()
    cov[2][place] = cov[2][place[::-1]] = value
    with pytest.raises(ValueError, match=rf"cov\[2\] has {value} at"):
        ask(cov)


def test_samples_have_the_covariance_and_follow_the_generator() -> None:
    cov = covariances(5).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = gaussian.sample(torch.zeros_like(cov[0]), cov, 100_000, generator)
    assert (drawn.T.cov() - cov).abs().max() < 0.05 * cov.max()
    again = gaussian.sample(torch.zeros_like(cov[0]), cov, 100_000, generator.manual_seed(0))
    assert torch.equal(drawn, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    given = {name: t.cuda() for name, t in arguments(torch.float32).items()}

    def results() -> list[Tensor]:
        drawn = gaussian.sample(given["mean"], given["cov"], 3, torch.Generator("cuda").manual_seed(0))
        return [drawn, gaussian.log_prob(**given), gaussian.whiten(**given), gaussian.sqrt_det(given["cov"])]

    plain = results()
    with torch.autocast("cuda", dtype):
        cast = results()
    for one, other in zip(plain, cast, strict=True):
        assert other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_cupy_s_arrays_come_back_as_cupy_s(cupy: Any) -> None:
    given = arguments()
    found = gaussian.log_prob(**{name: cupy.asarray(t.numpy()) for name, t in given.items()})
    assert isinstance(found, cupy.ndarray)
    cupy.testing.assert_allclose(found, gaussian.log_prob(**given).numpy(), rtol=1e-12)
    assert isinstance(gaussian.sqrt_det(cupy.eye(3)), cupy.ndarray)


def test_cupy_s_generator_draws_for_cupy_s_arrays(cupy: Any) -> None:
    mean, cov = cupy.zeros(3), cupy.eye(3)
    drawn = gaussian.sample(mean, cov, 4, cupy.random.default_rng(5))
    cupy.testing.assert_array_equal(drawn, cupy.random.default_rng(5).standard_normal((4, 3)))
    cupy.random.seed(5)
    drawn = gaussian.sample(mean, cov, 4)
    cupy.random.seed(5)
    cupy.testing.assert_array_equal(drawn, cupy.random.standard_normal((4, 3)))
    with pytest.raises(TypeError, match="of CuPy"):
        gaussian.sample(mean, cov, 4, torch.Generator("cuda"))


def test_gradients_on_the_gpu_are_those_of_finite_differences() -> None:
    root = torch.randn(2, 3, 3, dtype=torch.float64, device="cuda", requires_grad=True)
    x = torch.randn(4, 1, 3, dtype=torch.float64, device="cuda", requires_grad=True)

    def everything(x: Tensor, root: Tensor) -> tuple[Tensor, ...]:
        cov = mirrored(root @ root.mT) + torch.eye(3, device="cuda")
        return gaussian.log_prob(x, x.mean(0), cov), gaussian.whiten(x, x.mean(0), cov), gaussian.sqrt_det(cov)

    assert torch.autograd.gradcheck(everything, (x, root))
