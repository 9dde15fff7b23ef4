"""What the scripts train: the models of other tests, and variants that keep or hide something."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.dc_fallback.patterns.frames import Disabled
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


class Sometimes(TwoHeads):
    """A scale for each head, of which a batch may use one alone."""

    used = (True, True)

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))

    def trunk(self, tokens: Tensor) -> Tensor:
        x = super().trunk(tokens)
        for scale, used in zip(self.scales, self.used, strict=True):
            x = x * scale if used else x
        return x


class LowRank(nn.Module):
    """A frozen Linear, and what is trained in its place."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(TwoHeads):
    """A frozen trunk with low-rank adapters, as peft makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        for block in self.blocks:
            block.norm.requires_grad_(False)
            block.up, block.down = LowRank(block.up), LowRank(block.down)


class CheckpointedAdapted(Adapted):
    """The same, recomputed."""

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class TwoBranches(TwoHeads):
    """Each head has a trunk of its own."""

    def forward(self, tokens: Tensor) -> Losses:
        x = self.embed(tokens)
        return Losses(self.classify(self.blocks[0](x)), self.rebuild(self.blocks[1](x)))


class CompiledBlock(TwoHeads):
    """One block is compiled by its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].compile(backend="aot_eager")


class Critic(nn.Module):
    """Judges continuous inputs, so that a penalty on their gradient can be had."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.judge = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        judged: Tensor = self.judge(self.blocks(x))
        return judged


class RecomputedMethod(Disabled):
    """A method that reads a parameter of its module is recomputed in a skipped frame."""

    @torch.compiler.disable
    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.project, x, layer, use_reentrant=False)
        return checkpoint(self.weigh, x, use_reentrant=False)

    def project(self, x: Tensor, layer: nn.Linear) -> Tensor:
        return F.gelu(layer(x))

    def weigh(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight.T @ self.head.weight)


class OwnCompile(Disabled):
    """A layer of a skipped frame is compiled by its owner."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.layers[1].compile(backend="eager")


def build(name: str) -> nn.Module:
    """A model from a fixed seed: one of these, of eager tests, or of another part's."""
    if name == "streams":
        from tests.stream_safety import cases

        return cases.model()
    if name.startswith("patterns."):
        from tests.dc_fallback import patterns

        kind = name.removeprefix("patterns.")
        if kind in {variant.__name__ for variant in (RecomputedMethod, OwnCompile)}:
            return build(kind)
        return patterns.build(kind)
    torch.manual_seed(7)
    return (globals().get(name) or getattr(models, name))()  # type: ignore[no-any-return]
