"""Small models, and batches for them.

Most take token ids (so the first layer's input needs no gradient), hold layers that save their leaf
parameter for backward (Embedding, LayerNorm) beside those that save a view of it (Linear), and are
built from a seed, so that two instances are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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
    """One trunk, a classifier and a reconstruction head; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.classify = nn.Linear(WIDTH, CLASSES)
        self.rebuild = nn.Linear(WIDTH, WIDTH)

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

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
    """The embedding's weight is the reconstruction head's too."""

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

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class NonReentrant(Reentrant):
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
    """What is called by names has no input that DeepSpeed's hooks see."""

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
    """The middle of the trunk is a z3 leaf module."""

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


class Deep(TwoHeads):
    """Eight blocks, so that what a patch does for each parameter is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))


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


class Auxiliary(TwoHeads):
    """Its forward keeps a loss aside, which is no output."""

    aux: Tensor

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        self.aux = x.square().mean()
        return self.blocks[1](x)


class Sometimes(TwoHeads):
    """Two scales, of which a batch may use one alone, on a rank or on all."""

    used = (True, True)

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))

    def trunk(self, tokens: Tensor) -> Tensor:
        x = super().trunk(tokens)
        for scale, used in zip(self.scales, self.used, strict=True):
            x = x * scale if used else x
        return x


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


class Unused(TwoHeads):
    """A layer that no loss reaches, in the middle of the flat order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Block())

    def trunk(self, tokens: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](self.embed(tokens)))


class Widening(TwoHeads):
    """The reconstruction head is reached by the first of each three backwards alone."""

    calls = 0

    def heads(self, x: Tensor) -> Losses:
        self.calls += 1
        return Losses(self.classify(x), self.rebuild(x) if self.calls % 3 == 1 else x)


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
        judged: Tensor = self.judge(self.blocks[1](self.middle))
        return judged


class PlainCritic(nn.Module):
    """Saves nothing but views of weights, and what the Tanh has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        judged: Tensor = self.layers(x)
        return judged


# --- Models that raise ---------------------------------------------------------------------------


class Boom(RuntimeError):
    """What they raise."""


class RaiseInBackward(torch.autograd.Function):
    """Identity; its backward raises while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if RaiseInBackward.armed:
            raise Boom("half way")
        return grad


def backward_that_raises(trainer: Any, loss: Tensor) -> None:
    RaiseInBackward.armed = True
    try:
        trainer.backward(loss, retain_graph=True)
    except Boom:
        return
    finally:
        RaiseInBackward.armed = False
    raise AssertionError("the backward was meant to raise")


class Fragile(TwoHeads):
    """Raises between its two blocks: half the parameters have their gradients by then."""

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.blocks[1](RaiseInBackward.apply(self.blocks[0](x)))


class RaiseInForward(nn.Module):
    armed = False

    def forward(self, x: Tensor) -> Tensor:
        if RaiseInForward.armed:
            raise Boom("in the forward")
        return x


class Breakable(Fragile):
    """Raises half way through its forward, or half way through its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm = nn.Sequential(self.blocks[1].norm, RaiseInForward())


# --- Starts and batches --------------------------------------------------------------------------


def build(model: str | type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model from a fixed seed, where DeepSpeed trains.

    model: of those above, or ``patterns.*`` of dc_fallback's, or that for streams.
    """
    if model == "streams":
        from tests.stream_safety import cases

        return cases.model()
    if isinstance(model, str) and model.startswith("patterns."):
        from tests.dc_fallback import patterns

        return patterns.build(model.removeprefix("patterns."))
    torch.manual_seed(7)
    found: Any = globals()[model] if isinstance(model, str) else model
    made: nn.Module = found().to(device(), dtype)
    return made


def device() -> torch.device:
    """This rank's: the CPU in the suite, a GPU under :mod:`tests.training.on_gpus`."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def batch(step: int, micro: int = 0, size: int = 6) -> tuple[Tensor, Tensor]:
    """Tokens `[size]` and classes `[size]` of this rank; others get other ones."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens = torch.randint(VOCABULARY, (size,), generator=generator)
    return tokens.to(device()), (tokens % CLASSES).to(device())


def losses(
    outputs: Losses | dict[str, Tensor] | tuple[Tensor, ...], classes: Tensor
) -> list[Tensor]:
    """A classification and a reconstruction loss over the two heads."""
    logits, rebuilt = outputs.values() if isinstance(outputs, dict) else outputs
    return [F.cross_entropy(logits.float(), classes), rebuilt.float().square().mean()]


def both_losses(trainer: Any, step: int, micro: int = 0) -> list[Tensor]:
    """A forward over a batch of this rank's, and the losses of both heads."""
    tokens, classes = batch(step, micro)
    return losses(trainer(tokens), classes)


def loss_of(trainer: Any, step: int, micro: int = 0, only: slice = slice(None)) -> Tensor:
    """The same, added up."""
    total: Tensor = sum(both_losses(trainer, step, micro)[only])  # type: ignore[assignment]
    return total


def features(step: int) -> Tensor:
    """Continuous inputs `[6, WIDTH]` that want a gradient, for a critic."""
    tokens, _ = batch(step)
    at = torch.arange(WIDTH, dtype=torch.float32, device=tokens.device)
    return torch.sin(tokens[:, None] * 0.7 + at).requires_grad_()
