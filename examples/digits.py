"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

SIDE, CLASSES = 8, 10
_BRIGHTEST = 16.0


def load() -> tuple[Tensor, Tensor]:
    """1797 images as (8, 8) in 0..1, and their labels."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / _BRIGHTEST, torch.tensor(data.target)
