"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

SIDE, CLASSES = 8, 10
_BRIGHTEST = 16.0


def load() -> tuple[Tensor, Tensor]:
    """Return 1797 images of shape (8, 8), with values in 0..1, and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / _BRIGHTEST
    return images, torch.tensor(digits.target)
