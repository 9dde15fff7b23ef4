"""Models that keep or hide something, use a part of themselves, or are not all trained."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.models.shapes import (
    WIDTH,
    Block,
    Losses,
    TiedEmbedding,
    TwoHeads,
)


class Deep(TwoHeads):
    """Eight blocks, so that what a patch does for each parameter is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))


class TwoBranches(TwoHeads):
    def forward(self, tokens: Tensor) -> Losses:
        x = self.embed(tokens)
        return Losses(self.classify(self.blocks[0](x)), self.rebuild(self.blocks[1](x)))


class CompiledBlock(TwoHeads):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].compile(backend="aot_eager")


class Auxiliary(TwoHeads):
    """Its forward keeps a loss aside, which is no output."""

    aux: Tensor

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        self.aux = x.square().mean()
        return self.blocks[1](x)


class LeadingToEachOther(TwoHeads):
    """As transformers' models: a loss made of logits, which come of hidden states, all returned."""

    def forward(self, tokens: Tensor, classes: Tensor) -> Any:  # type: ignore[override]
        hidden = [self.embed(tokens)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        logits, rebuilt = self.heads(F.gelu(hidden[-1]))
        loss = F.cross_entropy(logits.float(), classes)
        return {
            "loss": loss,
            "rest": (logits, hidden, Losses(rebuilt, hidden[-1])),  # one of them twice
        }


@dataclass
class Heads:
    logits: Any
    rebuilt: Any


class InADataclass(TwoHeads):
    def forward(self, tokens: Tensor) -> Heads:  # type: ignore[override]
        return Heads(*self.heads(self.trunk(tokens)))


class Either(nn.Module):
    """Scales by one of two parameters, or by both: gathered alike on all ranks, used otherwise."""

    used = (True, True)

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for scale, used in zip(self.scales, self.used, strict=True):
            x = x * scale if used else x
        return x


class Uneven(TwoHeads):
    """A rank may leave one of two parameters out, which a module in the middle has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Either())


class Router(nn.Module):
    """Each batch goes through one of four experts, that of its first token."""

    tokens = 1  # by which a batch is routed

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        for hit in sorted({*(tokens[: self.tokens] % 4).tolist()}):
            x = x + self.experts[hit](x)
        return x


class Routed(TwoHeads):
    """A routed layer in the middle: ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        return self.blocks[1](self.route(x, tokens))

    def route(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.recomputed(self.router, x, tokens)


class RoutedTwice(Routed):
    def route(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.router(self.router(x, tokens), tokens)


class RoutedUnevenly(Routed):
    """Batches go through one to three experts. With gloo, ranks of stock end each other there."""

    def __init__(self) -> None:
        super().__init__()
        self.router.tokens = 3


class RoutedReentrant(Routed):
    """The routed layer runs again in the backward, in one of its own."""

    reentrant = True


class RoutedNonReentrant(Routed):
    reentrant = False


class Unused(TwoHeads):
    """A layer that no loss reaches, in the middle of the flat order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Block())

    def trunk(self, tokens: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](self.embed(tokens)))


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

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(self.depth))
        self.embed.requires_grad_(False)
        for block in self.blocks:
            block.norm.requires_grad_(False)
            block.up, block.down = LowRank(block.up), LowRank(block.down)


class AdaptedToTheInputs(Adapted):
    """The embedding is trained as well: what goes into each block needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(True)


class CheckpointedAdapted(Adapted):
    """The same, recomputed, with the inputs of its blocks made to need a gradient."""

    reentrant = False

    def trunk(self, tokens: Tensor) -> Tensor:
        return self.through_blocks(self.embed(tokens).requires_grad_())


class DeepAdapted(CheckpointedAdapted):
    """Eight blocks, so that it is seen for how long one of them is held."""

    depth = 8


class DeepReentrantAdapted(DeepAdapted):
    reentrant = True


class SavedModule(nn.Module):
    """Trains a copy of a module, and hands out its attributes, as PEFT's ``modules_to_save``."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.copies = nn.ModuleDict({"default": deepcopy(original)})
        self.original = original.requires_grad_(False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("copies", "original"):
                raise
            return getattr(self.copies["default"], name)

    def forward(self, x: Tensor) -> Any:
        return self.copies["default"](x)


class SavedModules(Adapted):
    """Adapters, and heads that are trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.classify = SavedModule(self.classify)
        self.rebuild = SavedModule(self.rebuild)


class SharedTwelveTimes(TwoHeads):
    """One block applied twelve times, each time recomputed in a graph task of its own."""

    reentrant = True

    def through_blocks(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = 0.5 * self.recomputed(self.blocks[0], x)
        return self.recomputed(self.blocks[1], x)


class HeadRecomputed(TiedEmbedding):
    """A tied head whose two chunks are recomputed: its weight has gradients inside and outside."""

    reentrant = True

    def heads(self, x: Tensor) -> Losses:
        rebuilt = [self.recomputed(self.rebuild, part) for part in (0.1 * x).chunk(2)]
        return Losses(self.classify(x), torch.cat(rebuilt))


class HeadFirst(TiedEmbedding):
    """The tied weight gets its gradient of the head first, and then of a recomputed block."""

    reentrant = True

    def trunk(self, tokens: Tensor) -> Tensor:
        return super().trunk(tokens) + 0.1 * self.recomputed(self.project, self.embed(tokens))

    def project(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) @ self.rebuild.weight.t() @ self.rebuild.weight


class ReturnsAScale(nn.Module):
    """Returns a parameter beside its output, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).sin(), self.scale
