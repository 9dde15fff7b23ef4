"""A model of which Dynamo compiles everything, half or nothing, and what it has compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import DTYPE, SEED

NOTHING, HALF, ALL = "nothing", "half", "all"
COUNTS = ("graphs", "frames", "graph_breaks")


class Model(nn.Module):
    """Embedding, `layers` x (Linear + ReLU) and a head; its forward returns the loss."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lower = nn.ModuleList(nn.Linear(width, width) for _ in range(layers // 2))
        self.upper = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - layers // 2))
        self.head = nn.Linear(width, words)
        for layer in (*self.lower, *self.upper):
            # So that nothing fades on the way through the layers, down to gradients that are all
            # rounding.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self._through_upper(self._through_lower(self.embedding(tokens)))
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())

    def _through_lower(self, hidden: Tensor) -> Tensor:
        for layer in self.lower:
            hidden = torch.relu(layer(hidden))
        return hidden

    def _through_upper(self, hidden: Tensor) -> Tensor:
        for layer in self.upper:
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


def dynamo_counts() -> dict[str, int]:
    """Of this process so far: nothing resets these counters."""
    from torch._dynamo.utils import counters

    counts = counters["stats"]["unique_graphs"], counters["frames"]["ok"]
    return dict(zip(COUNTS, (*counts, sum(counters["graph_break"].values())), strict=True))
