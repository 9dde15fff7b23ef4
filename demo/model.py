"""One trunk, two heads: which digit is it, and what did it look like?"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from demo.data import CLASSES, PIXELS

_WIDTH = 96
_CODE = 32


class Block(nn.Module):
    """Pre-norm residual block. LayerNorm keeps its own weight for backward, Linear a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + hidden


class TwoHeads(nn.Module):
    """Images (batch, 64) to logits (batch, 10) and pixels (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(PIXELS, _WIDTH), Block(), Block(), nn.Linear(_WIDTH, _CODE)
        )
        self.digit = nn.Linear(_CODE, CLASSES)
        self.pixels = nn.Sequential(nn.Linear(_CODE, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, PIXELS))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        code = self.trunk(images)
        return self.digit(code), self.pixels(code)


def digit_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the classification head, in nats."""
    return functional.cross_entropy(logits, labels)


def pixel_loss(pixels: Tensor, images: Tensor) -> Tensor:
    """Mean squared error of the reconstruction head."""
    return functional.mse_loss(pixels, images)
