"""The model that every pattern is a variant of, and one way each of a frame to run eagerly."""

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


class Built(Compiled):
    """A frame that builds a module: Dynamo makes a graph of that, which has no inputs."""

    def trunk(self, x: Tensor) -> Tensor:
        return called(nn.Sequential(*self.layers), x)


@torch.compiler.disable
def called(module: nn.Module, x: Tensor) -> Tensor:
    """Call the module, in a function that Dynamo skips."""
    output: Tensor = module(x)
    return output


class LoopOfBlocks(Compiled):
    """A graph break inside a loop: Dynamo skips the whole forward, and compiles what it calls.

    The layers are of one class, more of them than Dynamo compiles a function for.
    """

    layer_class = Block
    layers_count = 10

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
            torch._dynamo.graph_break()
        return x


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
