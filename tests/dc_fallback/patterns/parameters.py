"""Parameters that are used in more than one place, in another way, or not trained."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.dc_fallback.patterns.frames import WIDTH, Block, Compiled, Disabled


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


class RecomputedMethod(Disabled):
    """A method that reads a parameter of its module is recomputed in a skipped frame."""

    @torch.compiler.disable
    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.project, x, layer, use_reentrant=False)
        return checkpoint(self.weigh, x, use_reentrant=False)

    def project(self, x: Tensor, layer: torch.nn.Linear) -> Tensor:
        return F.gelu(layer(x))

    def weigh(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight.T @ self.head.weight)


class OwnCompile(Disabled):
    """A layer of a skipped frame is compiled by its owner."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.layers[1].compile(backend="eager")
