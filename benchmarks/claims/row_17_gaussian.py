"""multivariate normal sampling and density through Cholesky, with autograd.

Claimed: same numbers as NumPy
Holds: the factorisation is the same; what differs is the rounding of the dtype
Holds when: in the other cases the dtype's rounding is more than was allowed
No longer holds: the dtype's rounding is more than was allowed

Measured against NumPy and SciPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd import gradcheck
from torch.distributions import MultivariateNormal

from lightning_accel.claims.claim import Figure, Missing, Target, claim_in, counted
from lightning_accel.claims.measure import device, speedup, timed_ms
from lightning_accel.ops import gaussian

CLAIM = claim_in(__doc__, row=17)
FEATURES, POINTS = 16, 1000
ALLOWED = {torch.float64: 1e-11, torch.float32: 1e-4}


def measure() -> Iterator[Figure | Missing]:
    draw = np.random.default_rng(0)
    samples = draw.standard_normal((2 * FEATURES, FEATURES))
    mean, cov = draw.standard_normal(FEATURES), samples.T @ samples / len(samples)
    x = gaussian.sample(mean, cov, POINTS, np.random.default_rng(1))
    noise = np.random.default_rng(1).standard_normal(x.shape)
    yield error("samples, float64", x, mean + noise @ np.linalg.cholesky(cov).T, torch.float64)
    densities, of_mean, of_cov = by_numpy(x, mean, cov)
    for dtype in ALLOWED:
        name = str(dtype).removeprefix("torch.")
        given = [torch.from_numpy(array).to(device(), dtype).requires_grad_() for array in (x, mean, cov)]
        density = gaussian.log_prob(given[0], given[1], given[2])
        gradients = torch.autograd.grad(density.sum(), given[1:])
        yield error(f"densities, {name}", density, densities, dtype)
        yield error(f"gradients of mean, {name}", gradients[0], of_mean, dtype)
        yield error(f"gradients of covariance, {name}", gradients[1], of_cov, dtype)
    yield against_finite_differences()
    try:
        from scipy.stats import multivariate_normal
    except ImportError:
        yield Missing("densities against SciPy", "pip install scipy")
    else:
        theirs = multivariate_normal(mean, cov).logpdf(x)
        yield error("densities against SciPy, float64", gaussian.log_prob(x, mean, cov), theirs, torch.float64)
    points, center, spread = (torch.from_numpy(array).to(device(), torch.float32) for array in (x, mean, cov))
    times = timed_ms(
        {
            "torch": lambda: MultivariateNormal(center, spread).log_prob(points),
            "ours": lambda: gaussian.log_prob(points, center, spread),
        },
        seconds=1,
    )
    yield speedup("densities, time of torch.distributions over ours", times["torch"], times["ours"])


def by_numpy(x: Any, mean: Any, cov: Any) -> tuple[Any, Any, Any]:
    """Log-densities at ``x``, ``(N, D)``, in float64 and without a Cholesky factor; and the gradients of their sum."""
    inverse, off = np.linalg.inv(cov), x - mean
    densities = -0.5 * (np.einsum("ni,ij,nj->n", off, inverse, off) + np.linalg.slogdet(2 * np.pi * cov)[1])
    of_cov = 0.5 * (inverse @ off.T @ off @ inverse - len(x) * inverse)
    return densities, (off @ inverse).sum(0), of_cov


def error(condition: str, found: Any, expected: Any, dtype: torch.dtype) -> Figure:
    """The largest difference, relative to the largest number."""
    found = np.asarray(torch.as_tensor(found).detach().double().cpu())
    relative = float(np.abs(found - expected).max() / np.abs(expected).max())
    return counted(condition, relative, "error", Target("at most", ALLOWED[dtype]))


def against_finite_differences() -> Figure:
    """1 where ``gradcheck`` finds a gradient that is none, of densities, samples or √det; else 0."""
    root = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 1, 3, dtype=torch.float64, requires_grad=True)

    def everything(x: torch.Tensor, root: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cov = root @ root.mT + torch.eye(3)
        drawn = gaussian.sample(x, cov, 2, torch.Generator().manual_seed(0))
        return gaussian.log_prob(x, x.mean(0), cov), drawn, gaussian.sqrt_det(cov)

    agree = gradcheck(everything, (x, root), raise_exception=False)
    return counted("gradcheck", float(not agree), "error", Target("at most", 0), note="0: passes, 1: does not")
