"""Division of gradients by the micro steps: once, where they are reduced.

From 0.18.3 on DeepSpeed divides the gradients of a plain ``loss.backward()`` at the engine's
outputs. A gradient may bypass the outputs, as that of a penalty on a weight or of
``engine.module(x)``, or pass several outputs that are computed from one another. But each gradient
passes one reduce bucket, so the step's `GradientSum` divides there, by `divisor_of`.
``engine.backward(loss)`` divides the loss, and so does ``engine.scale(loss)`` if it scales it.

Gradients that leave the engine by its inputs pass no bucket: the leaves that they reach divide.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from ds_patches.core import engines
from ds_patches.steps.graph_task import (
    NO_TASK,
    accumulate_node,
    accumulates,
    current_task_id,
    graph_nodes,
    graph_tensors,
    is_accumulate_node,
)
from ds_patches.upstream import engine as upstream_engine

#: Key in an autograd node's metadata: an engine's output, or a leaf whose gradient is divided.
_SEEN = "ds_patches.division"
#: The engines whose ``backward`` is running, innermost last.
engine_backwards: list[Any] = []
#: The graph task of the last backward that began at a loss of ``engine.scale``.
_scaled_task_id = NO_TASK


def is_loss_divided() -> bool:
    """Return True if the loss of the running backward was divided by the micro steps."""
    return bool(engine_backwards) or _scaled_task_id == current_task_id() != NO_TASK


def divisor_of(engine: Any) -> int:
    """Return the divisor that the reduction applies to the gradients of the running backward."""
    if is_loss_divided() or not upstream_engine.divides_plain_backwards(engine):
        return 1
    return int(engine.gradient_accumulation_steps())


def divided_backward(
    run: Callable[..., Any],
    engine: Any,
    loss: torch.Tensor,
    retain_graph: bool = False,
    scale_wrt_gas: bool = True,
) -> Any:
    """Divide the loss by the micro steps, and call ``engine.backward``, which is `run`.

    `scale_wrt_gas` is stored at the engine: plain backwards that follow use it, and so do the
    output hooks of forwards that ran before the patch was applied.
    """
    try:
        if scale_wrt_gas:
            loss = loss / engine.gradient_accumulation_steps()
        run(loss, retain_graph, scale_wrt_gas=False)
        return loss
    finally:
        upstream_engine.set_scale_wrt_gas(engine, scale_wrt_gas)


def divide_scaled_loss(engine: Any, loss: torch.Tensor, is_nested: Callable[[], bool]) -> None:
    """Divide the gradient of a loss of ``engine.scale``: undivided, half precision may overflow."""

    def divide(gradient: torch.Tensor) -> torch.Tensor:
        global _scaled_task_id
        if is_nested() or not accumulates():
            return gradient
        divisor = divisor_of(engine)
        _scaled_task_id = current_task_id()
        return gradient / divisor

    loss.register_hook(unserializable_hook(divide))  # type: ignore[no-untyped-call]


def divide_leaves(inputs: Any, outputs: list[torch.Tensor], get_divisor: Callable[[], int]) -> None:
    """Register hooks that divide the gradients of the leaves behind a forward's inputs.

    Parameters of engines are left out, because their gradients pass a bucket.

    outputs: of the forward, where the search for another forward's leaves stops.
    get_divisor: returns the divisor of the running backward.
    """
    for output in outputs:
        node: Any = output.grad_fn
        node.metadata[_SEEN] = True
    tensors = graph_tensors(inputs, leaves=True)
    roots = [tensor.grad_fn or accumulate_node(tensor) for tensor in tensors]
    if not roots:
        return
    reduced: set[int] = set().union(*map(upstream_engine.trained_ids, engines.known))
    nodes = graph_nodes(roots, stops=lambda node: _SEEN in node.metadata)
    for node in filter(is_accumulate_node, nodes):
        if id(node.variable) not in reduced:
            node.metadata[_SEEN] = True
            node.register_prehook(partial(_divide, get_divisor))


def _divide(get_divisor: Callable[[], int], gradients: Any) -> Any:
    divisor = get_divisor()
    return tuple(gradient if gradient is None else gradient / divisor for gradient in gradients)
