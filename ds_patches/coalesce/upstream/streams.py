"""The stream that reductions run on, and what has to wait for what.

The rules, each broken by some release: the reduction waits for every stream that produced a
gradient, not for one and not for the default stream; a tensor read on a stream other than its own
is recorded there, or its memory is handed on while it is read; nothing but the reduction waits for
the reduction before the window closes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ds_patches.core.device import accelerator, keeps_order


class SideStream:
    """One stream beside those of the backward.

    Without a stream (a device that keeps order by itself, as the CPU does) every method is empty.
    """

    def __init__(self, accelerator: Any, stream: Any | None) -> None:
        self._accelerator = accelerator
        self._stream = stream
        self._producers: dict[Any, None] = {}  # in the order met

    @classmethod
    def of(cls, optimizer: Any) -> SideStream:
        """The optimizer's own reduction stream: it orders itself behind upstream's work there."""
        return cls(accelerator(), None if keeps_order() else optimizer.reduction_stream)

    def current_produced(self) -> None:
        """Something to be reduced is queued on the current stream."""
        if self._stream is not None:
            self._producers[self._accelerator.current_stream()] = None

    def entered(self) -> AbstractContextManager[Any]:
        """Behind all that the producers have queued, queue on this stream."""
        if self._stream is None:
            return nullcontext()
        for producer in self._producers:
            self._stream.wait_stream(producer)
        context: AbstractContextManager[Any] = self._accelerator.stream(self._stream)
        return context

    def current_waits(self) -> None:
        """Let the current stream go on behind what is queued on this one."""
        if self._stream is not None:
            self._accelerator.current_stream().wait_stream(self._stream)


def reader() -> Callable[[torch.Tensor], None]:
    """A function that keeps the memory of a tensor until the now current stream, which reads it,
    has got there."""
    if keeps_order():
        return lambda tensor: None
    stream = accelerator().current_stream()
    return lambda tensor: tensor.record_stream(stream)
