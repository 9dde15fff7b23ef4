"""Models that Dynamo cannot compile whole, one for each way of a frame to run eagerly.

Each takes token ids and targets and returns its loss, and is built from a seed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class Broken(Compiled):
    """Nothing is skipped, and there are two graphs."""

    layer_class: Any = Block

    def logits(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().logits(x)


class Disabled(Compiled):
    """A method under ``torch.compiler.disable``; the first and the last layer are compiled."""

    @torch.compiler.disable
    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x)


class Loop(Compiled):
    """A graph break inside a loop: Dynamo skips the whole forward, and compiles what it calls."""

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
            torch._dynamo.graph_break()
        return x


class LoopOfBlocks(Loop):
    """The same over layers of one class, more of them than Dynamo compiles a function for."""

    layer_class = Block
    layers_count = 10


class While(Compiled):
    """How often a layer runs depends on the data."""

    def trunk(self, x: Tensor) -> Tensor:
        turn = 0
        while turn < 3 and x.float().norm() > 0:
            x = F.gelu(self.layers[turn % 2](x))
            turn += 1
        return self.layers[3](self.layers[2](x))


class Evaluated(Disabled):
    """Compiled whole in evaluations, and not in training."""

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x) if self.training else Compiled.trunk(self, x)


class Whole(Compiled):
    """The whole forward runs eagerly."""

    @torch.compiler.disable
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().forward(tokens, targets)


class Mixed(Compiled):
    """Compiled, broken, disabled and compiled again."""

    layer_class = Block

    def trunk(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        x = self.aside(self.layers[1](x))
        return self.layers[3](x)

    @torch.compiler.disable
    def aside(self, x: Tensor) -> Tensor:
        return self.layers[2](x)


class TiedToSkipped(Compiled):
    """The embedding is used in a compiled frame, and as the head in a skipped one."""

    @torch.compiler.disable
    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x * 0.3, self.embed.weight) + self.head(x)


class TiedGraphs(Compiled):
    """The embedding is used in two graphs, with a break between them."""

    def logits(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.linear(x * 0.3, self.embed.weight) + self.head(x)


class Shared(Compiled):
    """One layer three times, in a compiled and a skipped frame."""

    def trunk(self, x: Tensor) -> Tensor:
        return self.again(F.gelu(self.layers[0](x)))

    @torch.compiler.disable
    def again(self, x: Tensor) -> Tensor:
        return self.layers[0](F.gelu(self.layers[0](x))) + self.layers[1](x)


class Frozen(Disabled):
    """Frozen parameters in both kinds of frame, and below trained ones."""

    layer_class = Block

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.embed.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].up.weight.requires_grad_(False)


class Experts(nn.Module):
    """Which of them run, and how often, differs by rank; a ZeRO-3 leaf module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.detach().float().sum(-1) * 50).long().remainder(4)
        chosen[..., 0] = 0  # each rank uses some expert
        found = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            mine = chosen == index
            found = found.index_put((mine,), self.experts[index](x[mine]))
        return found


class Leaf(Compiled):
    """Experts that are gathered together, in a frame that Dynamo cannot compile."""

    leaf_classes = (Experts,)

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.layers[1] = Experts(width)


class Activation(nn.Module):
    """A function that Dynamo looks at by itself, where nothing around it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Fused(nn.Module):
    """The experts in one parameter, which is read once for each expert that was hit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.act = Activation()
        self.weight = nn.Parameter(torch.randn(4, width, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.detach().float().sum(-1) * 50).long().remainder(4)
        found = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            mine = chosen == index
            found = found.index_put((mine,), self.act(F.linear(x[mine], self.weight[index])))
        return found


class FusedExperts(Compiled):
    """As in transformers 5."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.layers[1] = Fused(width)


class Recomputed(Compiled):
    """Layers of a skipped frame that the backward runs again."""

    layer_class = Block
    reentrant = False

    @torch.compiler.disable
    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class RecomputedReentrant(Recomputed):
    reentrant = True


class External(Compiled):
    """The root of the model reads its layers' parameters itself."""

    @torch.compiler.disable
    def trunk(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.layers[0].weight.square().mean()
        for layer in self.layers:
            x = F.gelu(F.linear(x, layer.weight, layer.bias)) + scale
        return x


class Gathers(Disabled):
    """The model gathers by itself what ZeRO-3 would."""

    def trunk(self, x: Tensor) -> Tensor:
        return self.gathered(x)

    @torch.compiler.disable
    def gathered(self, x: Tensor) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters

        layer = self.layers[0]
        partitioned = hasattr(next(self.parameters()), "ds_id")
        # One parameter each: up to 0.19.7 several at a time are not awaited on gloo.
        for params in ([layer.weight], layer.bias):
            with GatheredParameters(params, enabled=partitioned):
                x = F.gelu(layer(x))
        for layer in self.layers[1:]:
            x = F.gelu(layer(x))
        return x


class QwenMoe(nn.Module):
    """A small Qwen2-MoE of transformers, whose experts run in a loop over those that were hit."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

        config = Qwen2MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=width,
            moe_intermediate_size=width,
            shared_expert_intermediate_size=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
        )
        config._experts_implementation = "eager"
        self.model = Qwen2MoeForCausalLM(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


#: Every pattern that the patch promises; the stand-in and real GPUs run them all.
ALL = [
    Compiled,
    Broken,
    Disabled,
    Loop,
    LoopOfBlocks,
    While,
    Whole,
    Mixed,
    TiedToSkipped,
    TiedGraphs,
    Shared,
    Frozen,
    Leaf,
    FusedExperts,
    Recomputed,
    RecomputedReentrant,
    External,
    Gathers,
]


def build(pattern: str, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(1234)
    model: nn.Module = globals()[pattern](width)
    return model


def skip_whole(model: nn.Module) -> None:
    """Have the whole forward run eagerly."""
    kind = type(model)
    forward = torch.compiler.disable(kind.forward)
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def batch(step: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one micro batch, other ones on each rank."""
    source = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    tokens = torch.randint(0, VOCABULARY, (4, 6), generator=source)
    return tokens, (3 * tokens + 1) % VOCABULARY
