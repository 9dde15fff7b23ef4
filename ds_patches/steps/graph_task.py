"""One run of the autograd engine, seen from inside it, and the graph that leads to it.

PyTorch numbers every run of the engine (`torch._C._current_graph_task_id`), and calls the callbacks
that code inside the run has queued (`queue_callback`) when the run ends. A run that raises drops
its callbacks without calling them. So a weak reference to a callback tells whether a run is running
(alive), finished (called), or has raised (gone and not called). Plain PyTorch, without DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.utils import checkpoint

NO_TASK = -1
#: Id of the graph task that is running on this thread, or :data:`NO_TASK`.
current_task_id: Callable[[], int] = torch._C._current_graph_task_id
#: Returns the node that is running on this thread, or None.
current_node: Callable[[], Any] = torch._C._current_autograd_node
#: Queues a callback for the end of the running graph task. It is not called if the task raises.
at_end_of_task: Callable[[Callable[[], None]], None]
at_end_of_task = torch.autograd.Variable._execution_engine.queue_callback

#: Called with True, returns the saved tensors hooks of this thread, or None; from torch 2.8 on.
top_saved_tensors_hooks: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)

#: Returns True if the running graph task may keep its graph (`retain_graph`); always to torch 2.5.
retains_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def is_recomputing() -> bool:
    """Return True if ``checkpoint(use_reentrant=False)`` recomputes, in this graph task.

    DeepSpeed's ``non_reentrant_checkpoint`` counts, too. Up to torch 2.7 the saved tensors hooks
    cannot be queried, so the stack is searched for the function that recomputes.
    """
    if top_saved_tensors_hooks is not None:
        return top_saved_tensors_hooks(True) is not None
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame, code = caller, caller.f_code
        if code.co_name == "unpack_hook" and code.co_filename == checkpoint.__file__:
            return True
        if code.co_name == "checkpoint_unpack":
            return True
    return False


def accumulates() -> bool:
    """Return True if the running graph task accumulates into leaves below the hook's node.

    False in ``torch.autograd.grad``, which returns gradients, and in a ``backward(inputs=...)`` of
    other leaves.
    """
    nodes = graph_nodes([current_node()])
    return any(map(_will_accumulate, filter(is_accumulate_node, nodes)))


def reaches(leaf: torch.Tensor) -> bool:
    """Return True if the running graph task accumulates into this leaf, itself and not nested."""
    return leaf.requires_grad and _will_accumulate(accumulate_node(leaf))


def _will_accumulate(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # PyTorch raises for a leaf that is an input of torch.autograd.grad
        return False


def accumulate_node(leaf: torch.Tensor) -> Any:
    """Return the AccumulateGrad node of a leaf that requires a gradient."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def is_accumulate_node(node: Any) -> bool:
    """Return True if an autograd node accumulates into a leaf."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def graph_nodes(pending: list[Any], stops: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield these autograd nodes and those below, depth first.

    stops: returns True for nodes that are left out, with those that only they lead to.
    """
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or (stops is not None and stops(node)):
            continue
        seen.add(node)
        yield node
        pending += [next_node for next_node, _ in node.next_functions]


class TaskWatch:
    """The graph task of the running backward, and whether the last backward raised."""

    __slots__ = ("_end_callback", "task_id")

    def __init__(self) -> None:
        #: Id of the graph task of the backward that began last; None after its end, and not if it
        #: raised. A hook is in that backward, and in none nested in it, if `current_task_id()` is
        #: the same.
        self.task_id: int | None = None
        self._end_callback: ref[Callable[[], None]] | None = None

    @property
    def running(self) -> bool:
        """True if the backward that began last has not ended: another in it is a part of it."""
        return self._end_callback is not None and self._end_callback() is not None

    @property
    def raised(self) -> bool:
        """True if the backward that began last raised.

        A device thread of autograd may keep a raised graph task alive, as if it ran, until the
        thread's next work; a backward of the same model is such work.
        """
        return self._end_callback is not None and self._end_callback() is None

    def begin(self) -> None:
        """Watch the current graph task, in which a backward begins."""

        def end() -> None:  # only the autograd engine refers to it
            self._end_callback = self.task_id = None

        at_end_of_task(end)
        self._end_callback, self.task_id = ref(end), current_task_id()

    def clear_failure(self) -> None:
        """Forget that the last backward raised."""
        self._end_callback = self.task_id = None


def graph_tensors(outputs: Any, leaves: bool = False) -> list[torch.Tensor]:
    """Return the tensors with a ``grad_fn`` in nested tuples, lists, dicts and dataclasses.

    leaves: also return leaves that require a gradient.
    """
    tensors: list[torch.Tensor] = []
    pending = [outputs]
    for value in pending:  # grows in the loop
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None or (leaves and value.requires_grad):
                tensors.append(value)
        elif isinstance(value, (tuple, list)):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif hasattr(type(value), "__dataclass_fields__"):
            pending += [getattr(value, name, None) for name in value.__dataclass_fields__]
    return tensors


class SavedView(NamedTuple):
    """The elements of a storage that a tensor shows. Tensors with equal views have equal values."""

    storage: int  # `storage_of` the tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedView | None:
        """Return a tensor's view; None if it is sparse, negated or conjugated."""
        if not (storage := storage_of(tensor)) or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset())
        return cls(storage, tensor.dtype, tensor.size(), tensor.stride(), offset)


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's memory, unique while anything refers to it; 0 if it has none."""
    return int(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else 0
