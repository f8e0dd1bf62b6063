"""Square roots of covariance determinants, by Cholesky or LU, whichever is faster on this machine."""

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
# A multiple of the rounding error of D numbers. Of 288,000 nearly singular matrices (low rank, kernels, one small
# eigenvalue) none that Cholesky refuses passed. Kahan's matrix (1966), singular without a small pivot, may pass.
_MARGIN = 100
_MOST_COLUMNS = 128  # in a batch of matrices

Kind = tuple[torch.device, torch.dtype, int, int]
_lu_wins: dict[Kind, bool] = {}


def sqrt_det(cov: ArrayT, *, jitter: float = 0.0) -> ArrayT:
    """Returns ``√det(cov)`` of each covariance of a batch: the volume over which its distribution spreads.

    LU does twice the arithmetic of Cholesky, but libraries often run it faster. So the first call for a kind of
    covariances (device, dtype, D, batch size to a power of two) times both on its own input, and later calls use the
    faster one. With torch 2.13 and MKL on two AMD cores, LU was up to 1.5 times as fast for batches of 64x64 and for
    single matrices from 256x256 on; Cholesky was faster for the rest. ``lightning-accel claims --row 16`` measures it.

    Both agree up to rounding. LU is used only for exactly symmetric covariances, and accepted if no row was swapped and
    all pivots are clearly positive. Everything else goes to Cholesky, and so does its kind from then on. Deterministic
    runs (``torch.use_deterministic_algorithms``) always use Cholesky. Gradients are ``½ √det(cov) cov⁻¹`` either way.

    Args:
        cov: ``(..., D, D)``, floating point, of NumPy, CuPy or torch.
        jitter: See :func:`lightning_accel.ops.gaussian.cholesky`, also for errors.

    Returns:
        ``(...)``; float64 for float64, otherwise float32.
    """
    (tensor,), back = as_tensors("sqrt_det", cov=cov)
    (matrices,), is_exact = checked("sqrt_det", jitter, cov=tensor)
    quickly = matrices.numel() and not torch.compiler.is_compiling()  # each number that is read would break the graph
    root = _quickly(matrices.detach(), is_exact) if quickly else None
    if root is None:
        # The slow path: errors, jitter, and logarithms if intermediate products leave the dtype's range.
        matrices, factors = factorised("sqrt_det", matrices, jitter)
        factors = factors.detach()
        root = _Root(_through_logarithms(diagonals(factors)), lambda: factors)
    if not (matrices.requires_grad and torch.is_grad_enabled()):
        return back(root.value)
    value: Tensor = _SqrtDet.apply(matrices, root.value, root.factors())  # type: ignore[no-untyped-call]
    return back(value)


class _Root(NamedTuple):
    """√det, ``(...)``, and the Cholesky factors, ``(..., D, D)``, of which only the lower triangles are valid."""

    value: Tensor
    factors: Callable[[], Tensor]


def _quickly(cov: Tensor, is_exact: bool) -> _Root | None:
    """Uses the faster method; None if it does not find ``cov`` positive definite or leaves the range of the dtype."""
    count = cov.shape[:-2].numel()
    kind = (cov.device, cov.dtype, cov.shape[-1], count.bit_length())
    # Torch calls MKL's LU from several threads at once. After torch.set_num_threads() that gives wrong numbers from 150
    # columns on: https://github.com/pytorch/pytorch/issues/142815
    lu_is_right = count == 1 or cov.device.type != "cpu" or cov.shape[-1] <= _MOST_COLUMNS
    if not is_exact or not lu_is_right or torch.are_deterministic_algorithms_enabled():
        return _by_cholesky(cov)
    if kind not in _lu_wins:
        _lu_wins[kind] = _lu_is_faster(cov)
    root = _by_lu(cov) if _lu_wins[kind] else None
    if root is None:
        # Inputs of a kind tend to be alike: trying LU first would waste time at every call.
        _lu_wins[kind] = False
        root = _by_cholesky(cov)
    return root


def _by_cholesky(cov: Tensor) -> _Root | None:
    factors, found = torch.linalg.cholesky_ex(cov)
    return _rooted(diagonals(factors), lambda: factors) if _extremes(found)[1] == 0 else None


def _by_lu(cov: Tensor) -> _Root | None:
    """Uses LU with partial pivoting; None also if this does not prove that all matrices are positive definite.

    Without row swaps, a symmetric matrix is ``L D Lᵀ`` with the pivots in ``D``. It has as many positive pivots as
    positive eigenvalues (Sylvester's law of inertia). Pivots so small that rounding may have made them positive are
    left to Cholesky.
    """
    # LAPACK is column-major: the transpose, which is the same matrix, is copied without reordering.
    factors, rows, _ = torch.linalg.lu_factor_ex(cov.mT)
    size = cov.shape[-1]
    pivots = diagonals(factors)
    unswapped = torch.arange(1, size + 1, dtype=rows.dtype, device=rows.device)
    least = _MARGIN * size * torch.finfo(cov.dtype).eps * diagonals(cov)
    if not ((rows == unswapped) & (pivots > least)).all():
        return None
    return _rooted(pivots.sqrt(), lambda: (factors * pivots.rsqrt()[..., None]).mT)


def _rooted(deviations: Tensor, factors: Callable[[], Tensor]) -> _Root | None:
    """Returns the products of the deviations ``(..., D)``; None if one is too small or not finite."""
    least, most = _extremes(deviations)
    if not (least_deviation(deviations.dtype) <= least and most < math.inf):
        return None
    limits, size = torch.finfo(deviations.dtype), deviations.shape[-1]
    lowest, highest = size * math.log(min(least, 1)), size * math.log(max(most, 1))
    stays_within = lowest > math.log(limits.tiny) and highest < math.log(limits.max)
    return _Root(deviations.prod(-1) if stays_within else _through_logarithms(deviations), factors)


def _through_logarithms(deviations: Tensor) -> Tensor:
    """Returns products through logarithms, if intermediate ones would leave the dtype's range and lose digits."""
    return deviations.log().sum(-1).exp()


def _extremes(values: Tensor) -> tuple[float, float]:
    """Returns minimum and maximum; NaN if a value is NaN."""
    if values.numel() <= _FEW:  # for 4x4 matrices, aminmax alone takes longer than the factorisation
        numbers = values.reshape(-1).tolist()
        return (min(numbers), max(numbers)) if not math.isnan(sum(numbers)) else (math.nan, math.nan)
    least, most = values.aminmax()
    return least.item(), most.item()


def _lu_is_faster(cov: Tensor) -> bool:
    """Times both methods in turns. Returns False if one of them fails."""
    if _by_lu(cov) is None or _by_cholesky(cov) is None:
        return False
    ways = {"cholesky": lambda: nullcontext(lambda: _by_cholesky(cov)), "lu": lambda: nullcontext(lambda: _by_lu(cov))}
    return fastest(time_calls(ways, cov.device, rounds=_ROUNDS, most_s=_TIMED_S)) == "lu"


class _SqrtDet(torch.autograd.Function):
    """√det with its gradient in closed form: 0.4 to 0.8 times the time of differentiating the factorisation."""

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
        if torch.is_grad_enabled():  # for second derivatives: autograd treats the saved factors as constants
            factors = torch.linalg.cholesky(cov)
        inverse = torch.cholesky_inverse(factors)
        return (0.5 * gradient * root)[..., None, None] * inverse, None, None
