"""Covariances for tests: well conditioned, float64, of any batch shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

BATCHES = [(), (1,), (3,), (2, 3)]


def covariances(*shape: int, seed: int = 0) -> Tensor:
    """``(*shape, D)`` becomes ``(*shape, D, D)``: correlated features with standard deviations around 1."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64)
    return 0.5 * torch.eye(shape[-1], dtype=torch.float64) + mirrored(factors @ factors.mT / shape[-1])


def mirrored(matrices: Tensor) -> Tensor:
    """Symmetric to the bit, as a product of matrices need not be."""
    return matrices.tril() + matrices.tril(-1).mT


def drawn_covariance() -> Any:
    """Hypothesis's batches of covariances, of 1 to 5 features in units that differ by up to a hundred."""
    from hypothesis import strategies as st  # not on every machine with a GPU

    def scaled(batch: tuple[int, ...], scales: list[float], seed: int) -> np.ndarray:
        return covariances(*batch, len(scales), seed=seed).numpy() * scales * np.array(scales)[:, None]

    scales = st.lists(st.floats(0.1, 10), min_size=1, max_size=5)
    return st.builds(scaled, st.sampled_from(BATCHES), scales, st.integers(0, 2**32))
