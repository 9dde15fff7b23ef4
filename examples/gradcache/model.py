"""Two towers, one for each half of an image, and the loss that pairs what they say."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.gradcache.digits import SIDE

_WIDTH = 96
_EMBEDDING = 32
_TEMPERATURE = 0.1


def _tower() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE // 2, _WIDTH),
        nn.LayerNorm(_WIDTH),
        nn.GELU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.GELU(),
        nn.Linear(_WIDTH, _EMBEDDING),
    )


class TwoTowers(nn.Module):
    """Images (batch, 8, 8) to embeddings (batch, 2, 32) of length 1: left halves, right halves."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _tower(), _tower()

    def forward(self, images: Tensor) -> Tensor:
        left, right = images.chunk(2, dim=2)
        return functional.normalize(torch.stack((self.left(left), self.right(right)), 1), dim=2)


def contrast(embeddings: Tensor) -> Tensor:
    """Symmetric InfoNCE: find each half's other one among all that are given."""
    left, right = embeddings.unbind(1)
    logits = left @ right.T / _TEMPERATURE
    partner = torch.arange(len(logits), device=logits.device)
    loss = functional.cross_entropy(logits, partner) + functional.cross_entropy(logits.T, partner)
    return loss / 2
