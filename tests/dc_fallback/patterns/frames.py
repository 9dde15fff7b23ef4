"""One way each of a frame to run eagerly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dc_fallback.patterns.layers import Block, Compiled


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
