"""A model of which Dynamo compiles everything, half or nothing, and what it has compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import DTYPE, SEED

NOTHING, HALF, ALL = "nothing", "half", "all"


class Model(nn.Module):
    """Embedding, `layers` x (Linear + ReLU) and a head; its forward returns the loss."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        half = layers // 2
        self.lower = nn.ModuleList(nn.Linear(width, width) for _ in range(half))
        self.upper = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - half))
        self.head = nn.Linear(width, words)
        for layer in (*self.lower, *self.upper):
            # So that nothing fades on the way through the layers, down to gradients that are all
            # rounding.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self._through_upper(_through(self.lower, self.embedding(tokens)))
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())

    def _through_upper(self, hidden: Tensor) -> Tensor:
        return _through(self.upper, hidden)


def _through(layers: nn.ModuleList, hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = torch.relu(layer(hidden))
    return hidden


class _HalfSkipped(Model):
    _through_upper = torch.compiler.disable(Model._through_upper)


class _AllSkipped(Model):
    forward = torch.compiler.disable(Model.forward)


_MODELS: dict[str, Callable[..., Model]] = {NOTHING: Model, HALF: _HalfSkipped, ALL: _AllSkipped}
SKIPPED = tuple(_MODELS)


def model(skipped: str, layers: int, width: int, words: int, device: torch.device) -> Model:
    """The same weights at every call, however much is skipped."""
    torch.manual_seed(SEED)
    with device:
        made = _MODELS[skipped](layers, width, words)
    return made.to(DTYPE)


def graphs() -> int:
    """That Dynamo compiled in this process so far: nothing resets this counter."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
