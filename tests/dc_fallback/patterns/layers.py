"""The model that every pattern is a variant of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH = 24, 16


class Block(nn.Module):
    """A layer with parameters of its own beside those of its children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(self.norm(x))) * self.scale


class Compiled(nn.Module):
    """Nothing is skipped."""

    layer_class: Any = nn.Linear
    layers_count = 4

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        sizes = (width, width) if self.layer_class is nn.Linear else (width,)
        self.layers = nn.ModuleList(self.layer_class(*sizes) for _ in range(self.layers_count))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.trunk(self.embed(tokens))
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), targets.flatten())
