"""Multivariate normal distributions: samples, densities, √det and whitening, all by one Cholesky factorisation.

``mean`` is ``(..., D)``, ``cov`` is ``(..., D, D)``. Their batch dimensions, and those of ``x``, broadcast. Each
function accepts and returns arrays of NumPy, CuPy or torch. Tensors keep their gradients, also through samples (Kingma
and Welling, "Auto-Encoding Variational Bayes", 2014). 16-bit inputs are computed in float32, whatever autocast is
active (except for gradients, if ``backward`` itself is called under autocast). Samples and whitened numbers have the
widest dtype of the inputs. Densities and determinants are at least float32, since they are sums and products over all
features, which 16 bits cannot hold.

``jitter`` is that of :func:`cholesky`: without it no covariance is changed, and one that is not positive definite
raises an error with its index in the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_accel.ops.arrays import ArrayT, as_tensors, library_of
from lightning_accel.ops.cholesky import checked, cholesky, diagonals, factorised
from lightning_accel.ops.determinant import sqrt_det

__all__ = ["cholesky", "log_prob", "sample", "sqrt_det", "whiten"]


def sample(mean: ArrayT, cov: ArrayT, n: int, generator: Any = None, *, jitter: float = 0.0) -> ArrayT:
    """Draws ``mean + L ε``, with ``L Lᵀ = cov`` and ``ε`` standard normal.

    Args:
        mean: ``(..., D)``.
        cov: ``(..., D, D)``.
        n: The number of samples for each distribution.
        generator: Of the arrays' library: ``torch.Generator``, ``numpy.random.Generator``, ``cupy.random.Generator``;
            None for the library's global one.
        jitter: See :func:`cholesky`.

    Returns:
        ``(n, ..., D)``, with the wider dtype of the two.

    Raises:
        TypeError: ``generator`` is of another library, or an array is not floating point.
        ValueError: ``n`` is not a number of samples, shapes do not fit, or as in :func:`cholesky`.
    """
    count: Any = n
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
        raise ValueError(f"sample(n={n!r}): give a number of samples, 0 or more.")
    (given_mean, given_cov), back = as_tensors("sample", mean=mean, cov=cov)
    factors, (means,) = _prepared("sample", jitter, given_cov, mean=given_mean)
    batch = np.broadcast_shapes(means.shape[:-1], factors.shape[:-2])
    noise = _standard_normal((*batch, int(n), means.shape[-1]), factors, library_of(mean), generator)
    # Autocast would multiply in 16 bits.
    with torch.autocast(factors.device.type, enabled=False):
        samples = means[..., None, :] + noise @ factors.mT
    return back(samples.movedim(-2, 0).to(torch.promote_types(given_mean.dtype, given_cov.dtype)))


def log_prob(x: ArrayT, mean: ArrayT, cov: ArrayT, *, jitter: float = 0.0) -> ArrayT:
    """Returns the logarithm of the density at ``x``: ``-½ |L⁻¹ (x - mean)|² - Σ log Lᵢᵢ - ½ D log 2π``.

    Args:
        x: ``(..., D)``.
        mean: ``(..., D)``.
        cov: ``(..., D, D)``.
        jitter: See :func:`cholesky`.

    Returns:
        The broadcast batch dimensions of the three; float64 if one of them is, otherwise float32.

    Raises:
        TypeError: An array is not floating point.
        ValueError: Shapes do not fit, or as in :func:`cholesky`.
    """
    factors, white, _, back = _whitened("log_prob", x, mean, cov, jitter)
    log_sqrt_det = diagonals(factors).log().sum(-1)
    return back(-0.5 * (white.square().sum(-1) + white.shape[-1] * math.log(2 * math.pi)) - log_sqrt_det)


def whiten(x: ArrayT, mean: ArrayT, cov: ArrayT, *, jitter: float = 0.0) -> ArrayT:
    """Returns ``L⁻¹ (x - mean)`` with ``L Lᵀ = cov``: samples of that distribution become standard normal.

    Arguments and errors are those of :func:`log_prob`.

    Returns:
        The broadcast batch dimensions of the three, and ``D``; with the widest dtype of the three.
    """
    _, white, dtype, back = _whitened("whiten", x, mean, cov, jitter)
    return back(white.to(dtype))


def _whitened(
    asker: str, x: ArrayT, mean: ArrayT, cov: ArrayT, jitter: float
) -> tuple[Tensor, Tensor, torch.dtype, Callable[[Tensor], ArrayT]]:
    """Returns Cholesky factors, whitened points, the widest input dtype, and the conversion back to the library."""
    given, back = as_tensors(asker, x=x, mean=mean, cov=cov)
    factors, (points, means) = _prepared(asker, jitter, given[2], x=given[0], mean=given[1])
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in given))
    return factors, _solved(factors, points - means), dtype, back


def _prepared(asker: str, jitter: float, cov: Tensor, **points: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the Cholesky factors of ``cov`` and points that fit, in one dtype of 32 or 64 bits."""
    (matrices, *others), _ = checked(asker, jitter, cov=cov, **points)
    try:
        np.broadcast_shapes(cov.shape[:-2], *(tensor.shape[:-1] for tensor in points.values()))
        fits = all(tensor.shape[-1:] == cov.shape[-1:] for tensor in points.values())
    except ValueError:
        fits = False
    if not fits:
        given = ", ".join(f"{name} of shape {tuple(tensor.shape)}" for name, tensor in {**points, "cov": cov}.items())
        raise ValueError(
            f"{asker}: {given} do not fit. Give (..., D), for cov (..., D, D), with batch dimensions that broadcast."
        )
    return factorised(asker, matrices, jitter)[1], tuple(others)


def _solved(factors: Tensor, points: Tensor) -> Tensor:
    """Returns ``L⁻¹ p`` for each point, ``(..., D)``.

    Points that share a factor are solved together, as rows of a matrix. Broadcasting would copy the factor for each.
    """
    batch = np.broadcast_shapes(factors.shape[:-2], points.shape[:-1])
    own = (1,) * (len(batch) - factors.ndim + 2) + factors.shape[:-2]
    # First the dimensions with separate factors, then those that share one.
    order = sorted(range(len(batch)), key=lambda axis: own[axis] == 1)
    each = [batch[axis] for axis in order if own[axis] != 1]
    features = points.shape[-1]
    rows = points.expand(*batch, features).permute(*order, -1)
    white: Tensor = torch.linalg.solve_triangular(
        factors.mT.reshape(*each, features, features),
        rows.reshape(*each, math.prod(rows.shape[len(each) : -1]), features),
        upper=True,
        left=False,
    )
    return white.reshape(rows.shape).permute(*sorted(range(len(batch)), key=order.__getitem__), -1)


def _standard_normal(shape: tuple[int, ...], like: Tensor, library: str | None, generator: Any) -> Tensor:
    """Draws with ``library``, so that its seeds apply, in the dtype and on the device of ``like``."""
    drawn: Any
    if generator is not None and _library_of_generator(generator) != library:
        raise TypeError(
            f"sample(generator=...) is a {type(generator).__module__}.{type(generator).__qualname__}, and mean and cov"
            f" are of {library}. Give a generator of {library}, or None for its global one."
        )
    if library == "torch":
        drawn = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
    elif library == "NumPy":
        drawn = (generator or np.random).standard_normal(shape)
    else:
        import cupy

        with cupy.cuda.Device(like.device.index):
            drawn = (generator or cupy.random).standard_normal(shape)
    return as_tensors("sample", noise=drawn)[0][0].to(like.dtype)


def _library_of_generator(generator: object) -> str | None:
    if isinstance(generator, torch.Generator):
        return "torch"
    if isinstance(generator, np.random.Generator | np.random.RandomState):
        return "NumPy"
    return "CuPy" if type(generator).__module__.partition(".")[0] == "cupy" else None
