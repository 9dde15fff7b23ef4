"""One run of the autograd engine, seen from inside it. Plain PyTorch.

PyTorch numbers every run of the engine (`torch._C._current_graph_task_id`) and lets code that
runs inside it queue a callback for its end. A run that raises never calls back: it drops the
callback, and with it the last reference to the callback's owner. So a weak reference tells all
three fates of a run apart: alive (still running), finished, or gone without finishing (raised).
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


#: Called with True, the hooks that take what this thread saves for a backward; from torch 2.8 on.
top_saved_tensors_hooks: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


def at_end_of_task(callback: Callable[[], None]) -> None:
    """Run `callback` when the running graph task ends, unless it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def recomputes_for_hooks() -> bool:
    """In a graph task: whether ``checkpoint(use_reentrant=False)`` recomputes what is running.

    To torch 2.7 nothing tells which hooks take what is saved, but the call that recomputes is in
    the stack.
    """
    if top_saved_tensors_hooks is not None:
        return top_saved_tensors_hooks(True) is not None
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame, code = caller, caller.f_code
        if code.co_name == "unpack_hook" and code.co_filename == checkpoint.__file__:
            return True
    return False


def accumulates() -> bool:
    """In a hook of a tensor: whether this run adds to leaves beneath it, as a backward does.

    ``torch.autograd.grad`` hands gradients out, and so does a backward whose `inputs` are others.
    """
    return any(map(_gets_its_gradient, _leaves_beneath(torch._C._current_autograd_node())))


def reaches(leaf: torch.Tensor) -> bool:
    """Inside a run: whether it adds to this leaf. A run inside it is another."""
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


class _RunningTask:
    """Held alive by the autograd engine alone, for as long as the graph task runs."""

    __slots__ = ("__weakref__", "_watch")

    def __init__(self, watch: TaskWatch) -> None:
        self._watch = watch

    def end(self) -> None:
        self._watch._task = None


class Entry(Enum):
    """What a call from inside a graph task has met."""

    #: A backward begins here.
    BEGINS = auto()
    #: The same, but for the one before, which raised: that is to be dealt with first.
    AFTER_FAILURE = auto()
    #: The one that is running.
    RUNS = auto()
    #: One inside that, as by reentrant checkpointing, or in a hook: it belongs to the outer one.
    NESTED = auto()


class TaskWatch:
    """Which backward is running, and how the last one ended."""

    __slots__ = ("_id", "_task")

    def __init__(self) -> None:
        self._task: ref[_RunningTask] | None = None
        self._id = NO_TASK

    @property
    def running(self) -> bool:
        """Whether the backward that was entered last has not ended."""
        return self._task is not None and self._task() is not None

    @property
    def raised(self) -> bool:
        """True when the last backward is gone and never called back."""
        return self._task is not None and self._task() is None

    @property
    def runs_here(self) -> bool:
        """Whether it is the backward that was entered last, and no other, that runs here."""
        task = self._task
        return task is not None and task() is not None and current_task_id() == self._id

    def enter(self) -> Entry:
        """From inside a backward, as often as you like."""
        task_id = current_task_id()
        if self._task is not None:
            if self._task() is None:
                return Entry.AFTER_FAILURE
            return Entry.RUNS if task_id == self._id else Entry.NESTED
        task = _RunningTask(self)
        at_end_of_task(task.end)
        self._task, self._id = ref(task), task_id
        return Entry.BEGINS

    def forget(self) -> None:
        """Take the failure as handled."""
        self._task = None
