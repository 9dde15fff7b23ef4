"""The buffers that gradients are gathered in before they are reduced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

import torch

from .order import Order


class Buffers(list[torch.Tensor]):
    """A bucket's buffers, which it takes by their index to write or to reduce.

    Whoever takes one to write waits, on its current stream, for the last reduction of it; before
    there was one, for the stream that it was allocated on.
    """

    def __init__(self, buffers: Iterable[torch.Tensor], order: Order) -> None:
        super().__init__()
        self._order = order
        self._being_reduced: set[int] = set()
        self._ready: dict[int, Any] = {}  # events
        self._waited: dict[int, set[Any]] = {}  # streams, since that event
        for buffer in buffers:
            self.append(buffer)

    def append(self, buffer: torch.Tensor) -> None:
        """Just allocated, on the current stream."""
        current = self._order.current()
        self._ready[len(self)], self._waited[len(self)] = current.record_event(), {current}
        super().append(buffer)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, SupportsIndex):
            self._taken(index.__index__())
        return super().__getitem__(index)

    def _taken(self, index: int) -> None:
        if self._order.reducing:
            self._being_reduced.add(index)
            return
        current = self._order.current()
        if current not in self._waited[index]:
            current.wait_event(self._ready[index])
            self._waited[index].add(current)

    def reduced(self) -> None:
        """What was taken to be reduced is queued on the reduction stream, and all that reads it."""
        for index in self._being_reduced:
            self._ready[index], self._waited[index] = self._order.reduced(), set()
        self._being_reduced.clear()

    def clear(self) -> None:
        """Let go of the buffers, when the backward is over and all streams have met."""
        super().clear()
        self._ready.clear()
        self._waited.clear()

    def plain(self) -> list[torch.Tensor]:
        """The same in a list that knows nothing."""
        return list(iter(self))
