"""Checks covariances and computes their Cholesky factors: the basis of all Gaussian functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_accel.ops.arrays import ArrayT, as_tensors

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ASYMMETRY = 1e-4  # share of two features' standard deviations; rounding in float32 leaves less
_JITTERS = 4  # number of tries, each with ten times as much


def cholesky(cov: ArrayT, *, jitter: float = 0.0, asker: str = "cholesky") -> ArrayT:
    """Returns the lower triangular ``L`` with ``L Lᵀ = cov``, for each covariance of a batch.

    Only the lower triangle of ``cov`` is used. The symmetry is checked first, to a ten-thousandth of the deviations of
    the two features. For large matrices the check takes a tenth of the time of factorising if the symmetry is exact,
    otherwise three tenths.

    A covariance is changed only on request. With ``jitter``, each covariance that is not positive definite, and no
    other, gets that share of the mean of its diagonal added to the diagonal; if that is not enough, 10, 100 and 1000
    times as much. Gradients include the added part.

    Args:
        cov: ``(..., D, D)``, floating point, of NumPy, CuPy or torch.
        jitter: A share of the mean of the diagonal, such as 1e-6; 0 adds nothing.
        asker: The function named in errors.

    Returns:
        ``(..., D, D)`` with the dtype of ``cov``. 16-bit inputs are computed in float32.

    Raises:
        TypeError: ``cov`` is not floating point.
        ValueError: ``cov`` is not square, symmetric, finite or positive definite. The error has the index of the first
            such covariance in the batch.
    """
    (tensor,), back = as_tensors(asker, cov=cov)
    (matrices,), _ = checked(asker, jitter, cov=tensor)
    return back(factorised(asker, matrices, jitter)[1].to(tensor.dtype))


def checked(asker: str, jitter: float, *, cov: Tensor, **others: Tensor) -> tuple[tuple[Tensor, ...], bool]:
    """Returns ``cov`` and the others in one dtype of 32 or 64 bits, and whether ``cov`` is exactly symmetric.

    Raises the errors of :func:`cholesky`, except for matrices that are not positive definite.
    """
    given = {"cov": cov, **others}
    for name, tensor in given.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{asker}({name}=...) holds {str(tensor.dtype).removeprefix('torch.')}. Allowed: float16, bfloat16,"
                f" float32, float64; convert it, or take the real part where {name} is complex."
            )
    share: Any = jitter
    if isinstance(share, bool) or not isinstance(share, float | int) or not 0 <= share <= 1:
        raise ValueError(f"{asker}(jitter={share!r}): give a share of the mean of the diagonal, a number from 0 to 1.")
    is_double = any(tensor.dtype == torch.float64 for tensor in given.values())
    tensors = tuple([tensor.to(torch.float64 if is_double else torch.float32) for tensor in given.values()])
    return tensors, _is_exactly_symmetric(asker, tensors[0], cov.dtype)


def factorised(asker: str, cov: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Returns symmetric matrices, with jitter if needed, and their Cholesky factors. ValueError if one has none."""
    matrices = cov
    factors, failed, is_well = _tried(matrices)
    if is_well:
        return matrices, factors
    _raise_if_not_finite(asker, cov.detach())
    share = torch.zeros_like(failed, dtype=cov.dtype)
    mean = diagonals(cov).mean(-1)
    for power in range(_JITTERS if jitter else 0):
        share = share.where(~failed, jitter * 10**power)
        matrices = cov + torch.diag_embed((share * mean)[..., None].expand(cov.shape[:-1]))
        factors, failed, is_well = _tried(matrices)
        if is_well:
            return matrices, factors
    raise _not_positive_definite(asker, cov.detach(), failed, jitter)


def diagonals(matrices: Tensor) -> Tensor:
    """``(..., D, D)`` → ``(..., D)``."""
    return matrices.diagonal(0, -2, -1)


def least_deviation(dtype: torch.dtype) -> float:
    """Returns the smallest allowed diagonal entry of a factor: its square is the smallest normal number.

    Below that, some libraries find a matrix not positive definite, and others return the digits that remain.
    """
    return float(torch.finfo(dtype).tiny ** 0.5)


def _is_exactly_symmetric(asker: str, cov: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether ``cov`` is exactly symmetric. ValueError if not even to the rounding of ``dtype``."""
    if cov.ndim < 2 or cov.shape[-1] != cov.shape[-2]:
        raise ValueError(f"{asker}: cov of shape {tuple(cov.shape)}. Give square matrices, (..., D, D).")
    if torch.equal(cov, cov.mT):
        return True
    cov = cov.detach()
    deviations = diagonals(cov).abs().sqrt()
    allowed = max(_ASYMMETRY, 4 * torch.finfo(dtype).eps) * deviations
    # Relative to the entries' scale, so that features in small and large units count alike.
    mirrored = (cov - cov.mT).abs_() <= allowed[..., :, None] * deviations[..., None, :]
    if mirrored.all():
        return False
    _raise_if_not_finite(asker, cov)
    *index, row, column = _first(~mirrored)
    entries = cov[(*index, row, column)].item(), cov[(*index, column, row)].item()
    raise ValueError(
        f"{asker}: {_name(index)} is not symmetric: at ({row}, {column}) and ({column}, {row}) it has {entries[0]:.6g}"
        f" and {entries[1]:.6g}. Give (cov + covᵀ) / 2, or L Lᵀ where this is a Cholesky factor L."
    )


def _tried(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the factors, which of them are invalid, and whether all are valid and finite."""
    factors, found = torch.linalg.cholesky_ex(matrices)
    deviations = diagonals(factors.detach())
    failed = (found != 0) | (deviations < least_deviation(matrices.dtype)).any(-1)
    return factors, failed, ~failed.any() & deviations.sum().isfinite()  # NaN and infinity end up on the diagonal


def _raise_if_not_finite(asker: str, cov: Tensor) -> None:
    is_finite = cov.isfinite()
    if not is_finite.all():
        *index, row, column = _first(~is_finite)
        raise ValueError(
            f"{asker}: {_name(index)} has {cov[(*index, row, column)].item()} at ({row}, {column}). Look for a division"
            " by zero, or an overflow, in what it was computed from."
        )


def _not_positive_definite(asker: str, cov: Tensor, failed: Tensor, jitter: float) -> ValueError:
    index = _first(failed)
    smallest = torch.linalg.eigvalsh(cov[tuple(index)].double().cpu())[0].item()
    others = f" and {int(failed.sum()) - 1} more of {failed.numel()}" if failed.sum() > 1 else ""
    found = f"{asker}: {_name(index)}{others} is not positive definite (smallest eigenvalue {smallest:.3g}"
    if jitter:
        most = jitter * 10 ** (_JITTERS - 1)
        return ValueError(
            f"{found}), nor is it with {most:.3g} times the mean of its diagonal added to it, the most that"
            f" jitter={jitter!r} adds. Give more, or look for an error in what it was computed from."
        )
    if smallest > 0:
        return ValueError(f"{found}) in {cov.dtype}: it is too small for it. Give float64, or features in other units.")
    return ValueError(
        f"{found}): features that are constant or a combination of others. Leave them out, or add a little to the"
        " diagonal, as jitter=1e-6 does in lightning_accel.ops.gaussian."
    )


def _first(mask: Tensor) -> list[int]:
    """Returns the index of the first true element."""
    index: list[int] = mask.nonzero()[0].tolist()
    return index


def _name(index: list[int]) -> str:
    return f"cov{index}" if index else "cov"
