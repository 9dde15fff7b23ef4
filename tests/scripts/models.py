"""What the scripts train: the models of other tests, and variants that keep or hide something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zero3_retain import models
from tests.zero3_retain.models import CLASSES, VOCABULARY, WIDTH, Block, Losses, TwoHeads, batch

__all__ = ["CLASSES", "VOCABULARY", "WIDTH", "batch", "build", "loss_of", "losses"]
losses = models.losses


def loss_of(trainer: Any, step: int, micro: int = 0) -> Tensor:
    """A forward over a batch of this rank's; the sum of both heads' losses."""
    tokens, classes = batch(step, micro)
    first, second = losses(trainer(tokens), classes)
    return first + second


class Deep(TwoHeads):
    """Eight blocks, so that what a patch does for each parameter is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))


class Auxiliary(TwoHeads):
    """Its forward keeps a loss aside."""

    aux: Tensor

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        self.aux = x.square().mean()
        return self.blocks[1](x)


def build(name: str) -> nn.Module:
    """A model from a fixed seed: one of these, of eager tests, or of another part's."""
    if name == "streams":
        from tests.stream_safety import cases

        return cases.model()
    if name.startswith("patterns."):
        from tests.dc_fallback import patterns

        return patterns.build(name.removeprefix("patterns."))
    torch.manual_seed(7)
    return (globals().get(name) or getattr(models, name))()  # type: ignore[no-any-return]


__all__ += ["Auxiliary", "Deep", "Losses"]
