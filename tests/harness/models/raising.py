"""Models that raise, in a forward or half way through a backward."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.models.shapes import TwoHeads


class Boom(RuntimeError):
    """The error that these models raise."""


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
