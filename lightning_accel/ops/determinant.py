"""The square root of a covariance's determinant: by Cholesky or by LU, whichever this machine does sooner."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.experiment.screening import fastest
from lightning_accel.experiment.time_calls import time_calls
from lightning_accel.ops.arrays import ArrayT, as_tensors
from lightning_accel.ops.cholesky import checked, diagonals, factorised, least_deviation

_ROUNDS, _TIMED_S = 10, 0.05
_FEW = 32
# In roundings of D numbers. Of 288,000 matrices near singular (of low rank, of kernels, with one small eigenvalue) none
# that Cholesky refuses got past it; Kahan's (1966), singular without a small pivot, may.
_MARGIN = 100
_MOST_COLUMNS = 128  # of several matrices at once

Kind = tuple[torch.device, torch.dtype, int, int]
_lu_wins: dict[Kind, bool] = {}


def sqrt_det(cov: ArrayT, *, jitter: float = 0.0) -> ArrayT:
    """``√det(cov)`` of each covariance of a batch: the volume by which its distribution is spread.

    LU does twice the arithmetic of Cholesky, and libraries often do it better. So the first call for covariances of a
    kind (device, dtype, D, size of the batch to a power of two) times both on what it was given; later ones take what
    was faster. With torch 2.13 and MKL on two AMD cores, LU was up to 1.5 times as fast for batches of 64x64 and for
    single matrices from 256x256 on, Cholesky was faster for the rest; ``lightning-accel claims --row 16`` measures it.

    The way makes no difference but of rounding. LU vouches for covariances that are symmetric to the bit, where it had
    to swap no row and all pivots are clearly positive; everything else goes to Cholesky, and its kind with it from then
    on. Deterministic runs (``torch.use_deterministic_algorithms``) take Cholesky always. Gradients are
    ``½ √det(cov) cov⁻¹`` by either way.

    Args:
        cov: ``(..., D, D)``, floating point, of NumPy, CuPy or torch.
        jitter: See :func:`lightning_accel.ops.gaussian.cholesky`, also for what is raised.

    Returns:
        ``(...)``; float64 for float64, else float32.
    """
    (tensor,), back = as_tensors("sqrt_det", cov=cov)
    (matrices,), is_exact = checked("sqrt_det", jitter, cov=tensor)
    quickly = matrices.numel() and not torch.compiler.is_compiling()  # which would break off at each number looked at
    root = _quickly(matrices.detach(), is_exact) if quickly else None
    if root is None:
        # With errors, jitter, and logarithms for what leaves the dtype's range on its way to a product within it.
        matrices, factors = factorised("sqrt_det", matrices, jitter)
        factors = factors.detach()
        root = _Root(_through_logarithms(diagonals(factors)), lambda: factors)
    if not (matrices.requires_grad and torch.is_grad_enabled()):
        return back(root.value)
    value: Tensor = _SqrtDet.apply(matrices, root.value, root.factors())  # type: ignore[no-untyped-call]
    return back(value)


class _Root(NamedTuple):
    """√det, ``(...)``, and the Cholesky factors, ``(..., D, D)``, of which only the lower triangles count."""

    value: Tensor
    factors: Callable[[], Tensor]


def _quickly(cov: Tensor, is_exact: bool) -> _Root | None:
    """By the faster way, where it finds ``cov`` positive definite and stays within the range of the dtype."""
    count = cov.shape[:-2].numel()
    kind = (cov.device, cov.dtype, cov.shape[-1], count.bit_length())
    # Torch calls MKL's LU from several threads at once, which from 150 columns on gives wrong numbers, once
    # torch.set_num_threads has been called: https://github.com/pytorch/pytorch/issues/142815
    lu_is_right = count == 1 or cov.device.type != "cpu" or cov.shape[-1] <= _MOST_COLUMNS
    if not is_exact or not lu_is_right or torch.are_deterministic_algorithms_enabled():
        return _by_cholesky(cov)
    if kind not in _lu_wins:
        _lu_wins[kind] = _lu_is_faster(cov)
    root = _by_lu(cov) if _lu_wins[kind] else None
    if root is None:
        # What is of one origin tends to be alike: both ways would be gone, again and again.
        _lu_wins[kind] = False
        root = _by_cholesky(cov)
    return root


def _by_cholesky(cov: Tensor) -> _Root | None:
    factors, found = torch.linalg.cholesky_ex(cov)
    return _rooted(diagonals(factors), lambda: factors) if _extremes(found)[1] == 0 else None


def _by_lu(cov: Tensor) -> _Root | None:
    """By LU with partial pivoting; None, too, where it does not show that all are positive definite.

    Without a row swapped, a symmetric matrix is ``L D Lᵀ``, with the pivots for ``D``: as many of them are positive as
    of its eigenvalues (Sylvester's law of inertia). Pivots that are small enough for rounding to have made them
    positive are Cholesky's to judge.
    """
    # LAPACK goes by columns: the transpose, which is the same matrix, is copied as it lies.
    factors, rows, _ = torch.linalg.lu_factor_ex(cov.mT)
    size = cov.shape[-1]
    pivots = diagonals(factors)
    unswapped = torch.arange(1, size + 1, dtype=rows.dtype, device=rows.device)
    least = _MARGIN * size * torch.finfo(cov.dtype).eps * diagonals(cov)
    if not ((rows == unswapped) & (pivots > least)).all():
        return None
    return _rooted(pivots.sqrt(), lambda: (factors * pivots.rsqrt()[..., None]).mT)


def _rooted(deviations: Tensor, factors: Callable[[], Tensor]) -> _Root | None:
    """The products of the deviations ``(..., D)``; None where one is too small, or not finite."""
    least, most = _extremes(deviations)
    if not (least_deviation(deviations.dtype) <= least and most < math.inf):
        return None
    limits, size = torch.finfo(deviations.dtype), deviations.shape[-1]
    lowest, highest = size * math.log(min(least, 1)), size * math.log(max(most, 1))
    stays_within = lowest > math.log(limits.tiny) and highest < math.log(limits.max)
    return _Root(deviations.prod(-1) if stays_within else _through_logarithms(deviations), factors)


def _through_logarithms(deviations: Tensor) -> Tensor:
    """The products: for those that would leave the dtype's range on their way, and come back without their digits."""
    return deviations.log().sum(-1).exp()


def _extremes(values: Tensor) -> tuple[float, float]:
    """The least and the most of them; NaN where one is."""
    if values.numel() <= _FEW:  # of 4x4 matrices, aminmax alone would take longer than the factorisation
        numbers = values.reshape(-1).tolist()
        return (min(numbers), max(numbers)) if not math.isnan(sum(numbers)) else (math.nan, math.nan)
    least, most = values.aminmax()
    return least.item(), most.item()


def _lu_is_faster(cov: Tensor) -> bool:
    """Times both ways, in turns; False where one of them fails."""
    if _by_lu(cov) is None or _by_cholesky(cov) is None:
        return False
    ways = {"cholesky": lambda: nullcontext(lambda: _by_cholesky(cov)), "lu": lambda: nullcontext(lambda: _by_lu(cov))}
    return fastest(time_calls(ways, cov.device, rounds=_ROUNDS, most_s=_TIMED_S)) == "lu"


class _SqrtDet(torch.autograd.Function):
    """√det with its gradient in closed form: 0.4 to 0.8 of the time that differentiating the factorisation takes."""

    @override
    @staticmethod
    def forward(ctx: Any, cov: Tensor, root: Tensor, factors: Tensor) -> Tensor:
        root = root.view_as(root)
        ctx.save_for_backward(cov, factors, root)
        return root

    @override
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cov, factors, root = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself, and these are constants to autograd
            factors = torch.linalg.cholesky(cov)
        inverse = torch.cholesky_inverse(factors)
        return (0.5 * gradient * root)[..., None, None] * inverse, None, None
