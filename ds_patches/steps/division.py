"""Gradients are divided by the micro steps once: where they are reduced.

From 0.18.3 on DeepSpeed divides a plain ``loss.backward()`` at the engine's outputs. A loss can go
past them, by a weight or by ``engine.module(x)``, or pass several that lead to one another. Each
gradient passes a reduce bucket, so here the sum of a step divides there, by `divisor_of`.
``engine.backward(loss)`` divides the loss, and so does ``engine.scale(loss)`` if it scales it.

What leaves an engine by an input is not reduced: the leaves that lead to the input divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from ds_patches.core import engines
from ds_patches.steps.graph_task import NO_TASK, accumulates, current_task_id, with_graphs
from ds_patches.upstream import engine as upstream_engine

#: In the metadata of an autograd node: it made an output of an engine, or divides for a leaf.
_KNOWN = "ds_patches.division"


#: The engines whose ``backward`` runs, the innermost last.
engine_backwards: list[Any] = []


class _Scaled:
    """The graph task that began at a loss of ``engine.scale``."""

    task = NO_TASK


def is_divided() -> bool:
    """Return True if the gradients of the running backward come divided."""
    return bool(engine_backwards) or _Scaled.task == current_task_id() != NO_TASK


def divisor_of(engine: Any) -> int:
    """Return by how much the gradients of the backward that begins are still to be divided."""
    if is_divided() or not upstream_engine.divides_plain_backwards(engine):
        return 1
    return int(engine.gradient_accumulation_steps())


def divided_backward(
    run: Callable[..., Any],
    engine: Any,
    loss: torch.Tensor,
    retain_graph: bool = False,
    scale_wrt_gas: bool = True,
) -> Any:
    """Run ``engine.backward``, which `run` is, and divide its loss, as DeepSpeed does not.

    Outputs of a forward from before the patch have hooks that know of `scale_wrt_gas` alone. The
    engine keeps it for plain backwards that follow.
    """
    try:
        if scale_wrt_gas:
            loss = loss / engine.gradient_accumulation_steps()
        run(loss, retain_graph, scale_wrt_gas=False)
        return loss
    finally:
        upstream_engine.set_scale_wrt_gas(engine, scale_wrt_gas)


def divide_scaled(engine: Any, loss: torch.Tensor, is_nested: Callable[[], bool]) -> None:
    """Divide the gradient of a loss of ``engine.scale``: undivided, half precision may overflow."""

    def divide(gradient: torch.Tensor) -> torch.Tensor:
        if is_nested() or not accumulates():
            return gradient
        divisor = divisor_of(engine)
        _Scaled.task = current_task_id()
        return gradient / divisor

    loss.register_hook(unserializable_hook(divide))  # type: ignore[no-untyped-call]


def divide_leaves(inputs: Any, outputs: list[torch.Tensor], divisor: Callable[[], int]) -> None:
    """Have the leaves divide that lead to the inputs of a forward, but for those of engines.

    Their gradients pass the engine, and no bucket. divisor: of the running backward.
    """
    for output in outputs:
        node: Any = output.grad_fn
        node.metadata[_KNOWN] = True
    tensors = with_graphs(inputs, leaves=True)
    roots = [tensor.grad_fn or _node_of(tensor) for tensor in tensors]
    if not roots:
        return
    reduced: set[int] = set().union(*map(upstream_engine.trained_ids, engines.known))
    for node in _leaves_beneath(roots):
        if id(node.variable) not in reduced:
            node.metadata[_KNOWN] = True
            node.register_prehook(partial(_divide, divisor))


def _divide(divisor: Callable[[], int], gradients: Any) -> Any:
    by = divisor()
    return tuple(gradient if gradient is None else gradient / by for gradient in gradients)


def _node_of(leaf: torch.Tensor) -> Any:
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _leaves_beneath(pending: list[Any]) -> Iterator[Any]:
    """Yield the nodes that accumulate, up to outputs of engines, which have seen to theirs."""
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or _KNOWN in node.metadata:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node
        pending += [beneath for beneath, _ in node.next_functions]
