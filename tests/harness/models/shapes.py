"""Models with the shapes that trouble a gather-again backward.

They take token ids (so the first layer's input needs no gradient), and hold layers that save their
leaf parameter for backward (Embedding, LayerNorm) beside those that save a view of it (Linear).
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, CLASSES = 12, 16, 4


class Losses(NamedTuple):
    """Two heads' outputs, as a namedtuple a user may return."""

    logits: Tensor
    rebuilt: Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TwoHeads(nn.Module):
    """One trunk, a classifier and a reconstruction head; returns a tuple.

    reentrant: of checkpoint(), under which its blocks are; None: under none.
    """

    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.classify = nn.Linear(WIDTH, CLASSES)
        self.rebuild = nn.Linear(WIDTH, WIDTH)

    def trunk(self, tokens: Tensor) -> Tensor:
        return self.through_blocks(self.embed(tokens))

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.recomputed(block, x)
        return x

    def recomputed(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        if self.reentrant is None:
            return module(*inputs)
        return checkpoint(module, *inputs, use_reentrant=self.reentrant)

    def heads(self, x: Tensor) -> Losses:
        return Losses(self.classify(x), self.rebuild(x))

    def forward(self, tokens: Tensor) -> Losses:
        return self.heads(self.trunk(tokens))


class DictOutput(TwoHeads):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return self.heads(self.trunk(tokens))._asdict()


class SharedBlock(TwoHeads):
    """One block called three times, twice in a row and once on a parallel branch."""

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        block = self.blocks[0]
        return self.blocks[1](block(block(x)) + block(x * 0.5))


class TiedEmbedding(TwoHeads):
    def __init__(self) -> None:
        super().__init__()
        self.rebuild = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.rebuild.weight = self.embed.weight

    def heads(self, x: Tensor) -> Losses:
        return Losses(self.classify(x), self.rebuild(0.1 * x))


class FrozenTrunk(TwoHeads):
    """The first block and the embedding's neighbours do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].norm.requires_grad_(False)


class Reentrant(TwoHeads):
    """Both blocks recompute in a nested graph task."""

    reentrant = True


class NonReentrant(TwoHeads):
    """Both blocks recompute inside the running graph task."""

    reentrant = False


class Named(nn.Module):
    """A block whose arguments all have names, as in the layers of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, *, hidden: Tensor) -> Tensor:
        return self.block(hidden)


class NamedArguments(NonReentrant):
    """A call by names has no input that DeepSpeed's hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.named = Named()

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.named(hidden=super().trunk(tokens))
        return checkpoint(self.named, hidden=x, use_reentrant=False)


class Experts(nn.Module):
    """A module for ``set_z3_leaf_modules``: which of its children run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) + 0.5 * self.experts[1](x)


class LeafModule(TwoHeads):
    leaf_classes = (Experts,)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Experts()


class Linears(nn.Module):
    """Nothing but Linear layers on float inputs; a single tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class FloatInput(TwoHeads):
    """Starts from features, so that a user can ask for gradients at the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)


class Critic(nn.Module):
    """Judges continuous inputs, and keeps what lies in its middle: for penalties on gradients."""

    middle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.judge = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.middle = self.blocks[0](x)
        return self.judge(self.blocks[1](self.middle))


class Judged(TwoHeads):
    """Has a head that judges where it does not train, as a metric or a value head does."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Losses:
        return super().heads(x if self.training else self.judge(x))
