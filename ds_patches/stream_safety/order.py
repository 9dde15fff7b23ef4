"""Who waits for whom around the stream that gradients are reduced on.

Three rules. The reduction waits for every stream that a gradient came from. What it reads is
recorded on its stream, or the allocator hands the memory on as soon as the backward lets go of it
(PyTorch issue 33909). And the backward waits for the reduction of a buffer only where it writes
into this buffer again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Over:
    """An event that nobody has to wait for."""

    def wait(self, stream: Any) -> None:
        pass


class Order:
    """The streams of one optimizer.

    accelerator: what knows the current stream. reduction: the stream that reduces.
    """

    def __init__(self, accelerator: Any, reduction: Any) -> None:
        self._accelerator, self._reduction = accelerator, reduction
        self._producers: dict[Any, None] = {}  # in the order met
        self.reducing = False

    def produced(self) -> None:
        """The current stream has queued work on a gradient."""
        self._producers[self._accelerator.current_stream()] = None

    def before_reduction(self) -> None:
        """Let the reduction wait for all of them."""
        for producer in self._producers:
            self._reduction.wait_stream(producer)

    def backward_is_over(self) -> None:
        """Its streams need not be those of the next."""
        self._producers.clear()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor` until the reduction stream has got there."""
        tensor.record_stream(self._reduction)

    def current(self) -> Any:
        return self._accelerator.current_stream()

    def reduced(self) -> Any:
        """An event: what is queued on the reduction stream by now."""
        return type(self._reduction).record_event(self._reduction)

    @contextmanager
    def one_way(self) -> Iterator[None]:
        """Let whoever waits for the whole reduction stream inside go on at once."""
        here = vars(self._reduction)
        here["record_event"] = lambda event=None: _Over()
        try:
            yield
        finally:
            del here["record_event"]
