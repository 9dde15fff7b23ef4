"""The handwritten digits that come with scikit-learn, and the share of one rank in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from torch import Tensor

PIXELS = 64
CLASSES = 10
TEST_IMAGES = 360
_BRIGHTEST = 16.0


@dataclass(frozen=True)
class Digits:
    """Images as (count, 64) in 0..1, labels as (count,) in 0..9."""

    images: Tensor
    labels: Tensor

    def share(self, order: Tensor, batch: int, rank: int, ranks: int) -> Iterator[Digits]:
        """The batches of one rank in one epoch; every rank gets equally many, all of one size."""
        steps = len(order) // (batch * ranks)
        for step in order[: steps * batch * ranks].view(steps, ranks, batch):
            yield Digits(self.images[step[rank]], self.labels[step[rank]])


def load() -> tuple[Digits, Digits]:
    """The images to train on and those to test on; the split is always the same."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        torch.tensor(images, dtype=torch.float32) / _BRIGHTEST,
        torch.tensor(labels, dtype=torch.long),
        test_size=TEST_IMAGES,
        stratify=labels,
        random_state=0,
    )
    train_images, test_images, train_labels, test_labels = parts
    return Digits(train_images, train_labels), Digits(test_images, test_labels)
