"""One run of the autograd engine, seen from inside it, and what leads there. Plain PyTorch.

PyTorch numbers every run of the engine (`torch._C._current_graph_task_id`) and lets code that
runs inside it queue a callback for its end. A run that raises never calls back: it drops the
callback, and with it the last reference to it. So a weak reference tells all three fates of a run
apart: alive (still running), finished, or gone without finishing (raised).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any
from weakref import ref

import torch
from torch.utils import checkpoint

NO_TASK = -1
#: Id of the graph task that is running on this thread, or :data:`NO_TASK`.
current_task_id: Callable[[], int] = torch._C._current_graph_task_id
#: Have a function called when the running graph task ends, unless it raises.
at_end_of_task: Callable[[Callable[[], None]], None]
at_end_of_task = torch.autograd.Variable._execution_engine.queue_callback

#: Called with True, the hooks that take what this thread saves for a backward; from torch 2.8 on.
top_saved_tensors_hooks: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)

#: In a graph task: whether the graph stays for another one; to torch 2.5 nothing tells, and it may.
retains_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def recomputes_for_hooks() -> bool:
    """Whether ``checkpoint(use_reentrant=False)`` is recomputing, in the running graph task.

    DeepSpeed's ``non_reentrant_checkpoint`` counts, too. Up to torch 2.7 nothing tells which hooks
    take what is saved, but the call that recomputes is in the stack.
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
    """Whether the running graph task adds to leaves beneath the tensor whose hook this is in.

    ``torch.autograd.grad`` hands gradients out, and so does a backward whose `inputs` are others.
    """
    return any(map(_gets_its_gradient, _leaves_beneath(torch._C._current_autograd_node())))


def reaches(leaf: torch.Tensor) -> bool:
    """Whether the running graph task adds to this leaf. A task inside it is another."""
    if not leaf.requires_grad:
        return False
    with torch.enable_grad():
        ((node, _),) = leaf.view_as(leaf).grad_fn.next_functions  # type: ignore[union-attr]
    return _gets_its_gradient(node)


def _gets_its_gradient(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # so it answers of a leaf that torch.autograd.grad was asked for
        return False


def _leaves_beneath(node: Any) -> Iterator[Any]:
    """Depth first: of most modules the first is a node or two away."""
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node
        pending.extend(beneath for beneath, _ in node.next_functions)


class Entry(Enum):
    """What begins where a graph task is entered."""

    #: A backward begins here.
    BEGINS = auto()
    #: The same, but for the one before, which raised: that is to be dealt with first.
    AFTER_FAILURE = auto()
    #: One inside that which runs, as by reentrant checkpointing, or in a hook: it is part of it.
    NESTED = auto()


class TaskWatch:
    """Which backward is running, and how the last one ended."""

    __slots__ = ("_end", "task_id")

    def __init__(self) -> None:
        #: Of the backward that was entered last, until its end: `current_task_id()` is the same
        #: inside that one alone, as no number comes twice.
        self.task_id: int | None = None
        self._end: ref[Callable[[], None]] | None = None

    @property
    def running(self) -> bool:
        """Whether the backward that was entered last has not ended."""
        return self._end is not None and self._end() is not None

    @property
    def raised(self) -> bool:
        """True when the last backward is gone and never called back.

        A thread of a device may hold it a moment longer: until it takes up its next work, so not
        when that is a backward of the same model.
        """
        return self._end is not None and self._end() is None

    def enter(self) -> Entry:
        """Tell what begins, inside a graph task that is not `task_id`."""
        if self._end is not None:
            return Entry.AFTER_FAILURE if self._end() is None else Entry.NESTED

        def end() -> None:  # held by the autograd engine alone
            self._end = self.task_id = None

        at_end_of_task(end)
        self._end, self.task_id = ref(end), current_task_id()
        return Entry.BEGINS

    def forget(self) -> None:
        """Take the failure as handled."""
        self._end = None


def with_graphs(outputs: Any, leaves: bool = False) -> list[torch.Tensor]:
    """Return the tensors with a graph behind them, in nested tuples, lists, dicts and dataclasses.

    leaves: also leaves that require a gradient.
    """
    tensors: list[torch.Tensor] = []
    pending = [outputs]
    for value in pending:  # which become more
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
