"""Real data for the rows that ask for accuracy: scikit-learn's handwritten digits, which come with the package."""

from __future__ import annotations

import torch
from torch.utils.data import Subset, TensorDataset, random_split

from lightning_accel.claims.claim import NotHereError

_TRAINING_SHARE = 0.6


def digits(seed: int) -> tuple[Subset[tuple[torch.Tensor, ...]], Subset[tuple[torch.Tensor, ...]]]:
    """The 1,797 images, three in five to train on and the others to test on, so that one counts little.

    Args:
        seed: Decides the split.

    Returns:
        Two sets of images, float32 of shape (1, 8, 8) within 0 and 1, with labels, int64 from 0 to 9.

    Raises:
        NotHereError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise NotHereError(
            "scikit-learn, whose handwritten digits are the data, is not installed: pip install scikit-learn"
        ) from None
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(found.target, dtype=torch.int64))
    generator = torch.Generator().manual_seed(seed)
    training, testing = random_split(dataset, [_TRAINING_SHARE, 1 - _TRAINING_SHARE], generator)
    return training, testing
