"""The wrappers around DeepSpeed's two checkpointing functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ds_patches.core.calls import Args, Kwargs, Wrapped
from ds_patches.steps import graph_task
from ds_patches.steps.graph_task import current_node
from ds_patches.upstream import checkpointing
from ds_patches.upstream.checkpointing import ClosureVariables, SavedState

Unpack = Callable[[Any], torch.Tensor]


def around_checkpoint(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """Keep what the reentrant ``checkpoint`` saved for another backward over its graph."""
    outputs = wrapped(*args, **kwargs)
    if (node := checkpointing.checkpoint_node(outputs)) is not None:
        node.register_prehook(_before_backward)
    return outputs


def _before_backward(_: Any) -> None:
    """Restore what an earlier backward freed; keep a copy if the graph is retained."""
    node: Any = current_node()
    saved = getattr(node, "_ds_patches_saved", None)
    if saved is not None:  # an earlier backward may have raised before `_after_backward`
        saved.restore(node)
    if not graph_task.retains_graph():
        node._ds_patches_saved = None
    elif saved is None and checkpointing.is_intact(node):
        node._ds_patches_saved = SavedState(node)
        node.register_hook(_after_backward)


def _after_backward(*_: Any) -> None:
    """Restore what this backward freed, if its graph is retained."""
    node: Any = current_node()
    if node._ds_patches_saved is not None:
        node._ds_patches_saved.restore(node)


def around_non_reentrant(wrapped: Wrapped, _: None, args: Args, kwargs: Kwargs) -> Any:
    """Make ``non_reentrant_checkpoint`` recompute in each backward, not in the first only.

    Not up to torch 2.7, which does not tell which saved-tensor hooks are in place.
    """
    top_hooks, has_run = graph_task.top_saved_tensors_hooks, False
    if top_hooks is None:
        return wrapped(*args, **kwargs)

    def checkpoint(function: Callable[..., Any], *inputs: Any) -> Any:
        def run(*inputs: Any) -> Any:
            nonlocal has_run
            if has_run:
                return function(*inputs)
            has_run, (pack, unpack) = True, top_hooks(True)
            with saved_tensors_hooks(pack, _freeing_unpack(unpack)):
                return function(*inputs)

        return wrapped(run, *inputs)

    return checkpoint(*args, **kwargs)


def _freeing_unpack(unpack: Unpack) -> Unpack:
    """Return `unpack`, which keeps none of the tensors that it returns if the graph is retained.

    After such a backward the checkpoint's state is as the forward left it.
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
            restore()  # an earlier backward raised, or a tensor is unpacked twice
        if saved is None and graph_task.retains_graph() and checkpointing.is_intact(owner):
            saved, task_id = SavedState(owner), graph_task.current_task_id()
            graph_task.at_end_of_task(restore)
        tensor = unpack(holder)
        if saved is not None:
            del owner.storage[holder]
        return tensor

    return unpack_once
