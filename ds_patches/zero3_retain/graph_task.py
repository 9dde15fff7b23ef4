"""One run of the autograd engine, seen from inside it.

PyTorch numbers every run of the engine (`torch._C._current_graph_task_id`) and lets code that
runs inside it queue a callback for its end. A run that raises never calls back: it drops the
callback, and with it the last reference to the callback's owner. So a weak reference tells all
three fates of a run apart: alive (still running), finished, or gone without finishing (raised).
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch

NO_TASK = -1


def current_task_id() -> int:
    """Id of the graph task that is running on this thread, or :data:`NO_TASK`."""
    return int(torch._C._current_graph_task_id())


def at_end_of_task(callback: Callable[[], None]) -> None:
    """Run `callback` when the running graph task ends, unless it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _RunningTask:
    """Held alive by the autograd engine alone, for as long as the graph task runs."""

    __slots__ = ("__weakref__", "_watch")

    def __init__(self, watch: TaskWatch) -> None:
        self._watch = watch

    def end(self) -> None:
        self._watch._task = None


class TaskWatch:
    """Remembers the graph task that was entered last, and how it ended."""

    __slots__ = ("_id", "_task")

    def __init__(self) -> None:
        self._task: ref[_RunningTask] | None = None
        self._id = NO_TASK

    def enter(self) -> None:
        """Call from inside a backward, as often as you like."""
        task_id = current_task_id()
        if task_id in (self._id, NO_TASK):
            return
        task = _RunningTask(self)
        at_end_of_task(task.end)
        self._task = ref(task)
        self._id = task_id

    @property
    def raised(self) -> bool:
        """True when the last graph task is gone and never called back."""
        return self._task is not None and self._task() is None

    def forget(self) -> None:
        """Take the failure as handled."""
        self._task = None
