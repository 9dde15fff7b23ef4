"""The handwritten digits that come with scikit-learn, in batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

SIDE = 8
_BRIGHTEST = 16.0


def batches(steps: int, size: int, seed: int = 0) -> Iterator[Tensor]:
    """Images as (size, 8, 8) in 0..1; no image is in a batch twice. Alike on all ranks."""
    images = torch.tensor(load_digits().images, dtype=torch.float32) / _BRIGHTEST
    assert size <= len(images), f"there are {len(images)} images, not {size}"
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield images[torch.randperm(len(images), generator=generator)[:size]]
