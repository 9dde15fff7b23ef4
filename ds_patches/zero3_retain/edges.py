"""The autograd nodes at the inputs and outputs of a module. Plain PyTorch.

The idea of a pair of identity functions around a module is FSDP2's (``fully_shard``) as much as
DeepSpeed's, which has a Function of its own for each module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch


class NoEdge:
    """In place of both edges where there is nothing to gather: no node, no bookkeeping."""

    @staticmethod
    def apply(value: torch.Tensor) -> torch.Tensor:
        return value


class Edge:
    """Stands where DeepSpeed has a Function of a module; as that, the same in a copy of the module.

    call_of: returns the call of the module that a tensor belongs to, in its forward.
    run_backward: gets that call and the gradient, and returns the gradient.
    transforms: whether those of ``torch.func`` may pass. PyTorch then inspects the Function's
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
        #: Takes a tensor, and returns it with the edge in its graph. No function of ours, which
        #: Dynamo would compile by itself.
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


# PyTorch asks for it at every call of such a Function, and would make it anew.
_TransformedFunction.forward.__signature__ = signature(  # type: ignore[attr-defined]
    _TransformedFunction.forward
)


def is_edge(node: Any) -> bool:
    """Return True if a node of a graph is an edge of a module."""
    return type(node).__name__ in _NODES


#: PyTorch calls the node of a Function after it.
_NODES = {f"{function.__name__}Backward" for function in (_EdgeFunction, _TransformedFunction)}
