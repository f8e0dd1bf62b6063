"""What is a covariance, and its Cholesky factor: the core of everything Gaussian."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_accel.ops.arrays import ArrayT, as_tensors

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ASYMMETRY = 1e-4  # of two features' standard deviations: more than rounding in float32 leaves
_JITTERS = 4  # of one size, of ten times that, and so on


def cholesky(cov: ArrayT, *, jitter: float = 0.0, asker: str = "cholesky") -> ArrayT:
    """The lower triangular ``L`` with ``L Lᵀ = cov``, for each covariance of a batch.

    Of ``cov`` the lower triangle counts; that the upper one mirrors it, to a ten-thousandth of the deviations of the
    two features, is checked first. Where it does to the bit, that takes a tenth of the time of factorising large
    matrices, else three tenths.

    Nothing is added to a covariance unless it is asked for. With ``jitter``, those of the batch that are not positive
    definite, and only those, get that share of the mean of their own diagonal added to it; then, while that is not
    enough, 10, 100 and 1000 times as much. Gradients are those of what was added, too.

    Args:
        cov: ``(..., D, D)``, floating point, of NumPy, CuPy or torch.
        jitter: A share of the mean of the diagonal, such as 1e-6; 0: nothing is ever added.
        asker: Whose covariance it is, for what errors say.

    Returns:
        ``(..., D, D)`` of the dtype of ``cov``; those of 16 bits are computed in float32.

    Raises:
        TypeError: ``cov`` is not floating point.
        ValueError: It is not square, not symmetric, not finite or not positive definite: with the index of the first
            such covariance in the batch.
    """
    (tensor,), back = as_tensors(asker, cov=cov)
    (matrices,), _ = checked(asker, jitter, cov=tensor)
    return back(factorised(asker, matrices, jitter)[1].to(tensor.dtype))


def checked(asker: str, jitter: float, *, cov: Tensor, **others: Tensor) -> tuple[tuple[Tensor, ...], bool]:
    """``cov`` and the others in one dtype of 32 or 64 bits, and whether ``cov`` is symmetric to the last bit.

    The errors are those of :func:`cholesky`, but for what is not positive definite.
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
    """Symmetric matrices with jitter where need be, and their Cholesky factors; a ValueError where one has none."""
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
    """The smallest entry that the diagonal of a factor may have: its square is the smallest normal number.

    Below, some processors' libraries find a matrix not positive definite, others return what is left of its digits.
    """
    return float(torch.finfo(dtype).tiny ** 0.5)


def _is_exactly_symmetric(asker: str, cov: Tensor, dtype: torch.dtype) -> bool:
    """Of covariances that were of ``dtype``; raises a ValueError where they are not even symmetric to its rounding."""
    if cov.ndim < 2 or cov.shape[-1] != cov.shape[-2]:
        raise ValueError(f"{asker}: cov of shape {tuple(cov.shape)}. Give square matrices, (..., D, D).")
    if torch.equal(cov, cov.mT):
        return True
    cov = cov.detach()
    deviations = diagonals(cov).abs().sqrt()
    allowed = max(_ASYMMETRY, 4 * torch.finfo(dtype).eps) * deviations
    # By the entries' own scale: features in small units count as much as those in large ones.
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
    """The factors, which of them are none, and whether all are some, of finite numbers."""
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
    """The index of the first element that is set."""
    index: list[int] = mask.nonzero()[0].tolist()
    return index


def _name(index: list[int]) -> str:
    return f"cov{index}" if index else "cov"
