"""The backwards that run over one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .graph_task import NO_TASK, current_task_id


def tensors_with_graph(outputs: Any) -> Iterator[torch.Tensor]:
    """Tensors with a graph behind them in nested tuples, lists and dicts."""
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is not None:
            yield outputs
    elif isinstance(outputs, (tuple, list)):
        for item in outputs:
            yield from tensors_with_graph(item)
    elif isinstance(outputs, dict):
        for item in outputs.values():
            yield from tensors_with_graph(item)


class ForwardWindow:
    """Counts the graph tasks that enter one forward's graph through its outputs.

    The window lives as long as the outputs do: only their hooks refer to it.
    """

    def __init__(self, outputs: Any, on_backward: Callable[[ForwardWindow], None]) -> None:
        self.backwards = 0
        self._task_id = NO_TASK
        self._on_backward = on_backward
        for tensor in tensors_with_graph(outputs):
            tensor.register_hook(self._enter)  # type: ignore[no-untyped-call]

    def _enter(self, grad: torch.Tensor) -> None:
        task_id = current_task_id()
        if task_id != self._task_id:
            self._task_id = task_id
            self.backwards += 1
            self._on_backward(self)
