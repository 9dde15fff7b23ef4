"""The wrappers around DeepSpeed's two checkpointing functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.steps import graph_task
from ds_patches.upstream.checkpointing import (
    ClosureVariables,
    SavedState,
    checkpoint_node,
    holds_saved_tensors,
)

Unpack = Callable[[Any], torch.Tensor]


def around_checkpoint(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """The reentrant one: its node recomputes, runs a backward and gives up what it has saved."""
    outputs = wrapped(*args, **kwargs)
    if (node := checkpoint_node(outputs)) is not None:
        node.register_prehook(_before_backward)
    return outputs


def _before_backward(_: Any) -> None:
    node: Any = torch._C._current_autograd_node()
    saved = getattr(node, "_ds_patches_saved", None)
    if saved is not None:  # and the backward before this one may have raised
        saved.restore(node)
    if not graph_task.retains_graph():
        node._ds_patches_saved = None
    elif saved is None and holds_saved_tensors(node):
        node._ds_patches_saved = SavedState(node)
        node.register_hook(_after_backward)


def _after_backward(*_: Any) -> None:
    node: Any = torch._C._current_autograd_node()
    if node._ds_patches_saved is not None:
        node._ds_patches_saved.restore(node)


def around_non_reentrant(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """The other one: it recomputes once, and keeps the result for as long as there is a graph."""

    def checkpoint(function: Callable[..., Any], *inputs: Any) -> Any:
        return wrapped(_in_each_backward(function), *inputs)

    return checkpoint(*args, **kwargs)


def _in_each_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, of which each backward recomputes what its first call has saved.

    Up to torch 2.7 nothing tells which hooks take what is saved.
    """
    hooks_now, ran = graph_task.top_saved_tensors_hooks, False

    def run(*inputs: Any) -> Any:
        nonlocal ran
        if ran or hooks_now is None:
            return function(*inputs)
        ran, (pack, unpack) = True, hooks_now(True)
        with saved_tensors_hooks(pack, _handing_out(unpack)):
            return function(*inputs)

    return run


def _handing_out(unpack: Unpack) -> Unpack:
    """Return `unpack`, which in a backward that retains its graph keeps no tensor that it returns.

    After such a backward all is as the forward left it.
    """
    owner, task_id = ClosureVariables(unpack), graph_task.NO_TASK
    saved: SavedState | None = None

    def restore() -> None:
        nonlocal saved
        if saved is not None:
            owner.storage.clear()
            saved.restore(owner)
            saved = None

    def unpack_once(holder: Any) -> torch.Tensor:
        nonlocal saved, task_id
        if task_id != graph_task.current_task_id() or holder not in owner.storage:
            restore()  # the backward before this one raised, or somebody unpacks it twice
        if saved is None and graph_task.retains_graph() and holds_saved_tensors(owner):
            saved, task_id = SavedState(owner), graph_task.current_task_id()
            graph_task.at_end_of_task(restore)
        tensor = unpack(holder)
        if saved is not None:
            del owner.storage[holder]
        return tensor

    return unpack_once
