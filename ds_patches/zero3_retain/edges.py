"""The autograd nodes at the inputs and outputs of a module. Plain PyTorch.

FSDP2 (``fully_shard``) too puts a pair of identity functions around a module; DeepSpeed has a
Function of its own for each module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch


class NoEdge:
    """Identity, for modules that gather nothing: no autograd node, no bookkeeping."""

    @staticmethod
    def apply(value: torch.Tensor) -> torch.Tensor:
        return value


class Edge:
    """Takes the place of DeepSpeed's Function at a module; a copy of the module shares it.

    call_of: returns the module call that a tensor of the forward belongs to.
    run_backward: is called with that call and a gradient, and returns the gradient.
    transforms: True if ``torch.func`` transforms may pass. PyTorch then inspects the Function's
        signature at every call, which takes the host twice as long as all the rest.
    """

    __slots__ = ("apply", "call_of", "run_backward")

    def __init__(
        self,
        call_of: Callable[[torch.Tensor], Any],
        run_backward: Callable[[Any, Any], Any],
        transforms: bool,
    ) -> None:
        self.call_of, self.run_backward = call_of, run_backward
        #: Returns a tensor with the edge in its graph. A partial, since Dynamo would compile a
        #: function of ours by itself.
        self.apply = partial((_TransformedFunction if transforms else _EdgeFunction).apply, self)

    def __deepcopy__(self, memo: Any) -> Edge:
        return self


class _EdgeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Edge, value: torch.Tensor) -> torch.Tensor:
        ctx.edge, ctx.call = edge, edge.call_of(value)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, ctx.edge.run_backward(ctx.call, grad)


class _TransformedFunction(_EdgeFunction):
    @staticmethod
    def forward(edge: Edge, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return value.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        edge, value = inputs
        ctx.edge, ctx.call = edge, edge.call_of(value)


# PyTorch reads the signature at every call of such a Function, and would build it each time.
_TransformedFunction.forward.__signature__ = signature(  # type: ignore[attr-defined]
    _TransformedFunction.forward
)


def is_edge(node: Any) -> bool:
    """Return True if an autograd node is an edge of a module."""
    return issubclass(getattr(node, "_forward_cls", object), _EdgeFunction)
