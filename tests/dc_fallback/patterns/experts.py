"""Layers of which each rank uses other parts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dc_fallback.patterns.frames import WIDTH, Block, Compiled


class Experts(nn.Module):
    """Which of them run, and how often, differs by rank; a ZeRO-3 leaf module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.detach().float().sum(-1) * 50).long().remainder(4)
        chosen[..., 0] = 0  # each rank uses some expert
        outputs = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = chosen == index
            outputs = outputs.index_put((rows,), self.experts[index](x[rows]))
        return outputs


class Leaf(Compiled):
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
        outputs = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = chosen == index
            outputs = outputs.index_put((rows,), self.act(F.linear(x[rows], self.weight[index])))
        return outputs


class FusedExperts(Compiled):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.layers[1] = Fused(width)
